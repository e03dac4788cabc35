"""The optimizers of other programs, known by their own class and the options of their groups.

The meaning of a group's options is in `programs`; here is what only the living optimizer says: the method of a
parameter, and options that are in its code, its closures or its attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...names.coefficients import EMERGING_TYPES, emerging_coefficients
from ...names.errors import SourceError
from ...names.vocabulary import FLATTEN, HISTORY_OPTIONS, PARAMS, ParamGroup
from ...programs import dion, scripts, torch, veomni
from ...programs.dialect import Dialect

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """Another program's optimizer.

    Attributes:
        package: the first part of the module that has the class; empty for a script that people copy, whose class
            counts only if its groups have the options of the dialect and no others.
        classes: names of the class, any of them.
        method: returns the method of a parameter, given its group and its state.
        options_in_code: returns the common options of a parameter that the optimizer has, and its groups have not.
        flattens: whether a parameter of a group, and of this shape, is one matrix of its first dim and all others.
    """

    dialect: Dialect
    package: str
    classes: tuple[str, ...]
    method: Callable[[ParamGroup, Mapping[str, Any]], str]
    options_in_code: Callable[[Optimizer, Tensor], Options] = lambda optimizer, parameter: {}
    flattens: Callable[[ParamGroup, tuple[int, ...]], bool] = lambda group, shape: (
        len(shape) > 2 and bool(group.get(FLATTEN))
    )

    def is_of(self, optimizer: Optimizer) -> bool:
        for ancestor in type(optimizer).__mro__:
            if ancestor.__name__ in self.classes:
                if self.package:
                    if ancestor.__module__.partition(".")[0] == self.package:
                        return True
                elif ancestor is type(optimizer):
                    return not any(map(self._contradiction, optimizer.param_groups))
        return False

    def _contradiction(self, group: ParamGroup) -> str:
        table = self.dialect.options
        if table.always.keys() <= group.keys() or "betas" not in group:
            return table.contradicted_by(group)
        return ", ".join(group.keys() - {PARAMS, *HISTORY_OPTIONS, *table.elementwise, *table.beside, *table.always})


def _by_option(option: str) -> Callable[[ParamGroup, Options], str]:
    return lambda group, state: str(group[option])


_ORTHOGONALISE: Mapping[str, Options] = {
    "polar_express": {"ns": "polar_express_dion"},
    "polar_express_triton": {"ns": "polar_express_dion"},
    "zeropower_via_newtonschulz5": {"ns": "quintic"},
    "newton_schulz_triton": {"ns": "quintic"},
    "<lambda>": {"ns": "polar_express_gram", "gram": (2,), "ns_dtype": "float16"},
}
"""The iteration of each function that dion and XTuner choose from."""


def _by_function(optimizer: Optimizer, parameter: Tensor) -> Options:
    """Return the iteration of an optimizer of dion's family; their lambda is the Gram form."""
    function: Any = optimizer._newton_schulz_func  # type: ignore[attr-defined]
    name = getattr(function, "__name__", type(function).__name__)
    if name not in _ORTHOGONALISE:
        raise SourceError(
            f"newton_schulz_func={name}: a function of one's own has no counterpart here; choose coefficients of "
            "muonckpt.optimizer.COEFFICIENTS with ns_coefficients="
        )
    return {"ns_dtype": "bfloat16", "ns_steps": 5, "gram": None, **_ORTHOGONALISE[name]}


def _of_xtuner(optimizer: Optimizer, parameter: Tensor) -> Options:
    sizes = getattr(optimizer, "_muon_split_sizes", {}).get(parameter)
    pieces = {} if sizes is None else {"pieces": tuple(sizes)}
    return {**_by_function(optimizer, parameter), **pieces}


def _of_emerging(optimizer: Optimizer, parameter: Tensor) -> Options:
    """Return the arguments that the constructor keeps as attributes, or before 0.5 in a closure."""
    arguments = dict(inspect.getclosurevars(optimizer.scaled_orthogonalize_fn).nonlocals)  # type: ignore[attr-defined]
    for name in ("coefficient_type", "num_ns_steps", "scale_mode", "extra_scale_factor"):
        arguments[name] = getattr(optimizer, name, arguments.get(name))
    kind, mode, steps = arguments["coefficient_type"], arguments["scale_mode"], arguments["num_ns_steps"]
    if kind not in EMERGING_TYPES or mode not in scripts.EMERGING_SCALES:
        raise SourceError(f"coefficient_type={kind!r} with scale_mode={mode!r}: unknown to muonckpt")
    hook = type(getattr(optimizer, "_weight_update_hook", None)).__name__
    if hook not in ("NoneType", "NoOpWeightUpdateHook"):
        raise SourceError(f'weight_update_hook is a {hook}, which muonckpt lacks: of Muon on spheres see "hyperball"')
    if (method := getattr(optimizer, "weight_decay_method", "decoupled")) != "decoupled":
        raise SourceError(f"weight_decay_method={method!r}: muonckpt has decoupled decay only")
    scale, factor = scripts.EMERGING_SCALES[mode]
    # Fused queries, keys and values are split only for parameters that the user's function selects.
    pieces: dict[str, Any] = {"pieces": None}
    if getattr(optimizer, "split_qkv", False) and optimizer.is_qkv_fn(parameter):  # type: ignore[attr-defined]
        sizes = tuple(getattr(parameter, "qkv_split_shapes", None) or optimizer.qkv_split_shapes)  # type: ignore[attr-defined]
        pieces = {"pieces": sizes, "interleaved": parameter.shape[0] // sum(sizes)}
    return {
        "ns": emerging_coefficients(kind, steps),
        "ns_steps": steps,
        "nesterov": bool(optimizer.nesterov),  # type: ignore[attr-defined]
        "scale": scale,
        "scale_factor": factor * float(arguments["extra_scale_factor"] or 1.0),
        **pieces,
    }


def _bfloat16(optimizer: Optimizer, parameter: Tensor) -> Options:
    return {"ns_dtype": "bfloat16"}


def _by_algorithm(optimizer: Optimizer, parameter: Tensor) -> Options:
    """Return the dtype of torch's standard form; that of its Gram form follows from the group."""
    groups = (group for group in optimizer.param_groups if any(parameter is member for member in group[PARAMS]))
    return {} if next(groups).get("ns_algorithm") == "gram" else {"ns_dtype": "bfloat16"}


def _muon(group: ParamGroup, state: Options) -> str:
    return "muon"


_SCRIPTS = ("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")
_MEGATRON = ("TensorParallelMuon",)

KNOWN = (
    KnownOptimizer(torch.PROGRAM, "torch", ("Muon",), _muon, _by_algorithm),
    KnownOptimizer(torch.PROGRAM, "torch", ("AdamW", "Adam"), lambda group, state: "adamw"),
    KnownOptimizer(dion.PROGRAM, "dion", ("Muon", "NorMuon"), _by_option("algorithm"), _by_function),
    KnownOptimizer(dion.XTUNER, "xtuner", ("Muon",), _by_option("algorithm"), _of_xtuner),
    KnownOptimizer(veomni.PROGRAM, "veomni", ("DistributedMuon",), _muon, _bfloat16),
    KnownOptimizer(torch.TITAN, "torchtitan", ("DistMuon",), _muon, _bfloat16),
    KnownOptimizer(scripts.EMERGING, "emerging_optimizers", ("Muon",), _muon, _of_emerging),
    KnownOptimizer(scripts.EMERGING, "megatron", _MEGATRON, _muon, _of_emerging),
    KnownOptimizer(
        scripts.MOONLIGHT,
        "",
        ("Muon",),
        lambda group, state: "muon" if state.get("use_muon") else "adamw",
        lambda optimizer, parameter: {"eps": 1e-7, "ns_dtype": "bfloat16"},
    ),
    KnownOptimizer(
        scripts.KELLER,
        "",
        _SCRIPTS,
        lambda group, state: "muon" if group.get("use_muon", True) else "adamw",
        flattens=lambda group, shape: len(shape) == 4,
    ),
)

REFUSED: Mapping[str, str] = {
    "MuonAdamW": "nanochat's MuonAdamW rescales rows before it orthogonalises (MuonEq) and the norm after it (Muon+), "
    "which no option here does",
    "Dion": "dion's Dion keeps a low-rank basis, which is another algorithm",
    "Dion2": "dion's Dion2 orthogonalises a selection of rows, which is another algorithm",
    "AdaptiveMuon": "AdaptiveMuon normalises every element, which is another algorithm",
    "TensorParallelAdaptiveMuon": "Megatron's adaptive Muon normalises every element, which is another algorithm",
}
"""Optimizers of the field that ours cannot stand in for, by the name of the class."""


def known_optimizer(optimizer: Optimizer) -> KnownOptimizer | None:
    """Return the program of an optimizer; None if it is not known."""
    if type(optimizer).__name__ in REFUSED:
        return None
    return next((program for program in KNOWN if program.is_of(optimizer)), None)


def class_of(optimizer: Optimizer) -> str:
    """Return the full name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def refusal(optimizer: Optimizer) -> str:
    """Say why an optimizer is not known."""
    class_refusal = REFUSED.get(type(optimizer).__name__)
    if class_refusal is not None:
        return class_refusal
    options = set[str]().union(*optimizer.param_groups) - {PARAMS}
    classes = dict.fromkeys(f"{program.package or 'script'}: {', '.join(program.classes)}" for program in KNOWN)
    return (
        f"{class_of(optimizer)} with the options {', '.join(sorted(options))} is not known, so its groups are not "
        "translated; "
        f"known are muonckpt's own and {'; '.join(classes)}"
    )
