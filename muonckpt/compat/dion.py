"""``Muon`` with the arguments of microsoft/dion, and updates equal to its own up to rounding, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import optimizer
from ..layouts.tensors import local_of
from ..names.resumption import LoadReport
from ..names.vocabulary import FLATTEN, GROUP_OPTIONS, MOMENTUM, MUON_CONVENTION, ParamGroup
from ..programs import dion, ours

METHODS = {method.name: method for method in dion.PROGRAM.methods if method.name != "normuon"}
"""The algorithms of dion that this package has, too."""

SCALES: Mapping[str | None, str] = {value: ours.SCALES[common][0] for common, (value, *_) in dion.SCALES.items()}
"""Our name of each value of dion's ``adjust_lr``."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    name: {option: common for common, option in method.options.items() if common in GROUP_OPTIONS[name]}
    for name, method in METHODS.items()
}
"""Our name of each option that an algorithm of dion reads of a group."""

_CODINGS = chain.from_iterable(method.codings for method in METHODS.values())
_CODED = frozenset(chain.from_iterable(coding.options for coding in _CODINGS))
DION_OPTIONS = _CODED.union(*((*method.options.values(), *method.inert_options) for method in METHODS.values()))
DION_OPTIONS -= dion.SHARED.keys() - {"step"}
"""Every option of dion that has another name or meaning here, or that some algorithms do not read."""

FOREIGN_OPTIONS = DION_OPTIONS - GROUP_OPTIONS["muon"].keys() - {FLATTEN}
"""Options of dion that no group here has under the same name."""

SLOTS: Mapping[str, Mapping[str, str]] = {
    name: {slot: ours.SLOTS[name][common] for common, slot in method.slots.items()} for name, method in METHODS.items()
}
"""Our name of each of dion's slots of state."""


class Muon(optimizer.Muon):
    """``dion.Muon``, drop-in.

    Groups take dion's options (``mu``, ``epsilon``, ``cautious_wd``, ``beta1``, ``beta2``, ``num_heads``,
    ``split_sizes``, …) and those of `optimizer.Muon`.  ``param_groups`` then has our names; an option that is written
    there under dion's name is taken over by the next step.

    Differences: momentum is kept as an average instead of a sum, which gives the same updates (`load_state_dict`
    converts); ``epsilon`` is the smallest norm of a matrix instead of being added to it; every sharding is supported.

    Args:
        params, lr, weight_decay: as for `optimizer.Muon`, but with dion's defaults.
        distributed_mesh: a process group or a mesh of one axis over which plain tensors are replicated, so that ranks
            share their matrices out.  DTensors have their own meshes.
        mu, epsilon, nesterov, cautious_wd: ``momentum``, ``eps``, ``nesterov`` and ``cautious`` of `optimizer.Muon`.
        betas: of AdamW and Lion groups; in a group ``beta1`` and ``beta2``.
        adjust_lr: "spectral_norm", "rms_norm" or None.
        flatten: parameters of more than two dims are one matrix, as convolutions are, and no stacks.
        use_gram_newton_schulz: the Gram form in float16, with the coefficients of that package.
        use_triton: ignored: the GPU decides the kernels; results are the same up to rounding.
        use_polar_express: its coefficients, or those of the quintic iteration.
        newton_schulz_func: refused.

    Raises:
        ValueError: an option cannot be had here; says what to do instead.  Or `optimizer.Muon` refuses.
        TypeError: ``distributed_mesh`` is something else.
    """

    def __init__(
        self,
        params: Any,
        distributed_mesh: DeviceMesh | dist.ProcessGroup | None = None,
        lr: float | Tensor = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
    ) -> None:
        if newton_schulz_func is not None:
            raise ValueError(
                "newton_schulz_func: a function of one's own cannot be planned for; choose coefficients of "
                "muonckpt.optimizer.COEFFICIENTS with muonckpt.optimizer.Muon(ns_coefficients=...)"
            )
        # `add_param_group`, which the base constructor calls, reads these for the groups that do not say them.
        self._betas, self._epsilon, self._flatten = betas, epsilon, flatten
        # Dion chooses the iteration by flags; its Gram form computes in float16 and restarts after the second step.
        iteration: dict[str, Any] = {"ns_coefficients": "polar_express_dion" if use_polar_express else "quintic"}
        if use_gram_newton_schulz:
            iteration = {"ns_coefficients": "polar_express_gram", "ns_dtype": "float16", "gram": (2,)}
        super().__init__(
            params,
            lr,
            momentum=mu,
            nesterov=nesterov,
            weight_decay=weight_decay,  # type: ignore[arg-type]  # a tensor, as in groups
            cautious=cautious_wd,
            adjust_lr_fn=_scale(adjust_lr),
            eps=epsilon,
            replicas=_replicas(distributed_mesh),
            **iteration,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose options have dion's names, or ours."""
        params = param_group["params"]
        members = [params] if isinstance(params, Tensor) else list(params)
        params = [member[1] if isinstance(member, tuple) else member for member in members]
        group = {"flatten": self._flatten, **param_group}
        algorithm = _algorithm(group)
        arguments: dict[str, Any] = {}  # of the constructor, which dion uses for element-wise groups
        if algorithm in ("adamw", "lion"):
            arguments = {"lr": self.defaults["lr"], "betas": self._betas}
        if algorithm == "adamw":
            arguments["eps"] = self._epsilon
        super().add_param_group({**arguments, **_our_options(group, params, self._betas), "params": members})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in ("_betas", "_epsilon", "_flatten")}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update, after taking over the options that were written under dion's names since the last one."""
        for group in self.param_groups:
            options = {name: group.pop(name) for name in FOREIGN_OPTIONS & group.keys()}
            if options:
                options["algorithm"] = group["algorithm"]
                group.update(_our_options(options, group["params"], group.get("betas", self._betas)))
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any], fresh: Iterable[str] = ()) -> LoadReport:  # type: ignore[override]
        """Load a state of this optimizer, or one of dion's own, whose momentum becomes an average.

        ``muonckpt convert OLD NEW --to muonckpt`` translates checkpoints in files.

        Raises:
            ValueError: as `optimizer.Muon.load_state_dict`.
        """
        if any("mu" in group for group in state_dict["param_groups"]):
            state_dict = self._converted(state_dict)
        return super().load_state_dict(state_dict, fresh)

    def _converted(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of dion in our names and convention; its tensors are not changed."""
        groups, state = [], {}
        for live_group, group in zip(self.param_groups, saved["param_groups"], strict=False):
            options = _our_options(group, live_group["params"], self._betas)
            convention = {"convention": MUON_CONVENTION.value} if options["algorithm"] == "muon" else {}
            groups.append(options | convention)
            # State gets our slots, and momentum our convention; AdamW's step may be in dion's group alone.
            for key in group["params"]:
                slots = dict(saved["state"].get(key, {}))
                if group["algorithm"] == "adamw":
                    slots.setdefault("step_dev", torch.tensor(float(group["step"])))
                state[key] = {SLOTS[group["algorithm"]][name]: value for name, value in slots.items()}
                if group["algorithm"] == "muon" and MOMENTUM in state[key]:
                    total = state[key][MOMENTUM]
                    average = state[key][MOMENTUM] = torch.empty_like(total)
                    local_of(average).copy_(local_of(total).double() * (1 - group["mu"]))  # rounded once
        return {"state": state, "param_groups": [*groups, *saved["param_groups"][len(groups) :]]}


def _algorithm(group: ParamGroup) -> str:
    algorithm = group.get("algorithm", "muon")
    if algorithm not in OPTIONS:
        raise ValueError(f"algorithm={algorithm!r}: expected one of {', '.join(OPTIONS)}, as in dion.Muon")
    return str(algorithm)


def _our_options(group: ParamGroup, params: Sequence[Tensor], betas: tuple[float, float]) -> dict[str, Any]:
    """Return a group's options in our names, without those that its algorithm does not read in dion."""
    algorithm = _algorithm(group)
    # Options of ours stay; those of dion get our names, where the algorithm reads them.
    options = {name: value for name, value in group.items() if name not in DION_OPTIONS}
    options |= {common: group[name] for name, common in OPTIONS[algorithm].items() if name in group}
    if algorithm == "muon":
        if "adjust_lr" in group:
            options["adjust_lr_fn"] = _scale(group["adjust_lr"])
        if group.get(FLATTEN) and any(param.ndim > 2 for param in params):
            options[FLATTEN] = True
        return options | _pieces(group, params)
    if "beta1" in group or "beta2" in group:
        options["betas"] = (group.get("beta1", betas[0]), group.get("beta2", betas[1]))
    return options


def _scale(adjust_lr: str | None) -> str:
    if adjust_lr not in SCALES:
        raise ValueError(f"adjust_lr={adjust_lr!r}: expected 'spectral_norm', 'rms_norm' or None, as in dion.Muon")
    return SCALES[adjust_lr]


def _pieces(group: ParamGroup, params: Sequence[Tensor]) -> dict[str, Any]:
    """Return ``pieces`` for the matrices in a group's parameters, if it describes any."""
    shapes = {tuple(param.shape) for param in params}
    # dion has equal heads, or blocks of any heights.
    heads, sizes = group.get("num_heads") or 1, group.get("split_sizes")
    if heads > 1 and sizes is not None:
        raise ValueError(f"num_heads={heads} and split_sizes={sizes}: expected one of them")
    if heads > 1:
        heights = {shape[0] for shape in shapes}
        if len(heights) > 1 or any(len(shape) != 2 or shape[0] % heads for shape in shapes):
            raise ValueError(
                f"num_heads={heads}: expected matrices of one height, a multiple of it, got shapes {sorted(shapes)}; "
                "make a group for each height"
            )
        return {"pieces": tuple(height // heads for height in heights) * heads}
    return {"pieces": tuple(sizes)} if sizes is not None else {}


def _replicas(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group over which plain tensors are replicated."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"distributed_mesh: expected a mesh of one axis, got {mesh.ndim}; give the one over which plain "
                "tensors are replicated, or None if there are none: DTensors say themselves where they are"
            )
        return mesh.get_group()
    if mesh is not None and not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"distributed_mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    return mesh
