"""Groups from a whole model: `Muon.for_model` sorts its parameters, `Muon.describe` writes groups with their names."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..names.errors import ArgumentError, called_like, did_you_mean, warn_on_rank
from ..names.renaming import WRAPPERS
from ..names.resumption import in_globs
from ..names.vocabulary import FUSION, GROUP_OPTIONS, MOMENTUM_DTYPE, STATE_DTYPE
from ..names.wording import listed
from .decisions import FAMILIES, Decisions
from .groups import NO_SPLITS, Heads, Splits, UnsortedError, layers_for, sort_by_layers, sort_parameters
from .methods.scalar import SCALARS
from .options import FLAG, as_numbers, check_value, params_of
from .rules import KINDS, Rule, Rules


@dataclass(frozen=True, slots=True, eq=False)
class ModelGroups:
    """The arguments of `Muon.for_model` that make groups, with a weak reference to the model."""

    model: weakref.ref[nn.Module]
    layers: Sequence[Sequence[Rule]]
    adamw: Mapping[str, Any]
    kinds: Mapping[str, Mapping[str, Any]]
    named: bool

    def groups_of(self, decisions: Decisions) -> list[dict[str, Any]]:
        """Return the groups that decisions make."""
        groups = decisions.groups(adamw=self.adamw, kinds=self.kinds)
        if self.named:
            names = {decision.parameter: decision.names[0] for decision in decisions}
            for group in groups:
                # Without this, torch takes a group without parameters for one without names.
                group["param_names"] = [names[param] for param in group["params"]]
        return groups


def plain_name(name: str) -> str:
    """Return the name of a parameter in checkpoints, without the parts of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


EXAMPLE_LINE = "Muon.for_model(model, lr=0.02, adamw_lr=3e-4)"

WITH_ALGORITHM = (
    f"[{{'params': ..., 'algorithm': ...}}], which is an option of groups, or {EXAMPLE_LINE[:-1]}, "
    "kinds={'matrix': {'algorithm': 'normuon'}})"
)


def refuse_no_parameters(params: object) -> None:
    """Raise ArgumentError for a model, or decisions on one, with the line that makes an optimizer of them."""
    if isinstance(params, nn.Module):
        arguments: Mapping[str, str] = {}
        try:
            sort_parameters(params)
        except UnsortedError as error:
            arguments = error.arguments
        line = "".join([EXAMPLE_LINE[:-1], *(f", {name}={code}" for name, code in arguments.items()), ")"])
        raise ArgumentError(
            f"params: expected parameters or groups, found a model, {type(params).__name__}. Write {line}"
        )
    if isinstance(params, Mapping):
        line, kind = "Muon([{'params': ...}])" if "params" in params else EXAMPLE_LINE, type(params).__name__
        raise ArgumentError(f"params: expected parameters or groups in a list, found {kind}. Write {line}")
    if isinstance(params, Decisions):
        raise ArgumentError(
            "params: expected parameters or groups, found the decisions of sort_parameters. Write "
            "Muon(decisions.groups(adamw={'lr': 3e-4}), lr=0.02)"
        )


def _refuse_group_options(options: Mapping[str, Any], arguments: Collection[str]) -> None:
    """Raise ArgumentError for an option that only some groups have, and that is no argument of the optimizer."""
    for key in sorted(options.keys() - arguments):
        value = options[key]
        if key in FUSION:
            raise ArgumentError(f"{key}={value!r}: name the projections. Write split={{'*.qkv_proj': (q, k, v)}}")
        algorithms = [value] if key == "algorithm" else []
        # "adamw_lr" is an argument, so that others look for "adamw_betas".
        option, prefixed = key.removeprefix("adamw_"), key.startswith("adamw_")
        for name, defaults in GROUP_OPTIONS.items() if not prefixed else [("adamw", GROUP_OPTIONS["adamw"])]:
            dtype_option = STATE_DTYPE if name in SCALARS else MOMENTUM_DTYPE
            algorithms += [name] if option in defaults or option == dtype_option else []
        # The kinds that have such an algorithm by themselves, or may choose one.
        kinds = [name for name, kind in KINDS.items() if kind.algorithm in algorithms]
        kinds = kinds or [name for name, kind in KINDS.items() if {*algorithms} & {*FAMILIES[kind.algorithm]}]
        if kinds:
            code = ", ".join(f"{kind!r}: {{{option!r}: {value!r}}}" for kind in kinds)
            raise ArgumentError(
                f"{key}={value!r} is an option of some kinds of parameters only. Write kinds={{{code}}}"
            )
        if hint := did_you_mean(key, [*inspect.signature(ForModel.for_model).parameters]):
            raise ArgumentError(f"for_model has no argument {key!r}{hint}")


class ForModel:
    """The methods of `Muon` that take a model."""

    param_groups: list[dict[str, Any]]

    _model_groups: ModelGroups | None = None
    _warned: frozenset[str] = frozenset()
    """The names of parameters in no group that a warning has named."""

    @classmethod
    @called_like(EXAMPLE_LINE)
    def for_model(
        cls,
        model: nn.Module,
        *,
        lr: float | Tensor,
        adamw_lr: float | Tensor | None = None,
        head: Heads = ...,
        split: Splits = NO_SPLITS,
        rules: Rules = (),
        kinds: Mapping[str, Mapping[str, Any]] | None = None,
        named: bool = False,
        **options: Any,
    ) -> Self:
        """Return an optimizer of a whole model: Muon for matrices, AdamW for embeddings, the output head and vectors.

        By default the rates of Muon and AdamW differ by two orders of magnitude.  Give both, or a scale that makes one
        rate serve both::

            Muon.for_model(model, lr=0.02, adamw_lr=3e-4)
            Muon.for_model(model, lr=3e-4, adjust_lr_fn="match_rms_adamw", head="lm_head", split={"*.qkv_proj": 3})

        Everything decays by ``weight_decay``, 0.1 by default, as with one ``torch.optim.AdamW`` for all: also norms,
        biases and embeddings.  Recipes that spare them write ``kinds={"vector": {"weight_decay": 0.0}}``.

        Frozen parameters are in no group; a step warns of gradients of parameters in no group.

        Args:
            model: may be sharded, compiled or wrapped.  A DistributedDataParallel gives ``replicas``.
            lr: rate of matrices.
            adamw_lr: rate of all others.  None: ``lr``, which is refused unless ``adjust_lr_fn="match_rms_adamw"``.
            head: the output head, a module or its name, or several; None: there is none.  It has to be given where an
                untied layer has as many rows as an embedding; the error says which.
            split: the matrices in fused projections, by patterns of their names: how many rows each has,
                ``(q, k, v)``, N for N equal ones, a `Split`, or None for one matrix.  Known names (`families.FUSED`)
                are asked.
            rules: a set, such as `groups.LLAMA`, or several in a list; earlier ones beat later ones:
                ``[[Rule("other", "*.scale")], MODULE_TYPES]``.  By default: `groups.MODULE_TYPES`.
            kinds: options by kind, as `Decisions.groups` takes them: ``{"vector": {"weight_decay": 0.0}}``.
            named: give parameters names, by which `Muon.load_state_dict` matches them even across changed groups.
                Torch's flattened state dicts have names anyway, and would repeat a group's for each parameter.
            options: of the optimizer itself.

        Raises:
            ArgumentError: an argument is wrong, there is no rate for AdamW, or `sort_parameters` raises it.
        """
        _refuse_group_options(options, inspect.signature(cls).parameters)
        check_value("named", named, FLAG)
        rate = {} if adamw_lr is None else {"lr": adamw_lr}
        replicas = {"replicas": model.process_group} if isinstance(model, DistributedDataParallel) else {}
        decisions = sort_parameters(model, rules, head=head, split=split)
        sorter = ModelGroups(
            model=weakref.ref(model),
            layers=layers_for(model, rules, head, split),
            adamw=rate,
            kinds=kinds or {},
            named=named,
        )
        if not (groups := sorter.groups_of(decisions)):
            raise ArgumentError(
                "model: expected parameters to train, found none with requires_grad=True. Write "
                "model.requires_grad_(True), or that of the modules to train, before this line"
            )
        optimizer = cls(groups, lr=lr, **{**replicas, **options})  # type: ignore[call-arg]
        optimizer._model_groups = sorter
        return optimizer

    def decisions(self) -> Decisions | None:
        """Return the decisions of `for_model` on each parameter of the model; None if the code made the groups."""
        if self._model_groups is None or (model := self._model_groups.model()) is None:
            return None
        return sort_by_layers(model, self._model_groups.layers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _warn_of_left_out(self) -> None:
        """Warn once of each parameter of the model that has a gradient and is in no group."""
        if self._model_groups is None or (model := self._model_groups.model()) is None:
            return
        grouped = {*map(id, params_of(self.param_groups))}
        if all(id(param) in grouped or param.grad is None for param in model.parameters()):
            return
        names = {param: plain_name(name) for name, param in model.named_parameters()}
        if grouped.isdisjoint(map(id, names)):
            return  # the model's parameters have changed, and `warn_of_no_gradient` warns of that
        strangers = [param for param in names if id(param) not in grouped and param.grad is not None]
        ungrouped = [names[param] for param in strangers if names[param] not in self._warned]
        # Each once.
        if ungrouped:
            self._warned |= {*ungrouped}
            shown = in_globs(ungrouped, {*names.values()} - {*ungrouped})
            warn_on_rank(
                f"parameters have gradients and are in no group, so no step changes them: {listed(shown, 3)}. They "
                "were frozen when the optimizer was made, or came later. To train them, save, make the optimizer "
                f"again, and load into that with fresh={shown!r}",
                RuntimeWarning,
            )

    def describe(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the groups with their parameters' names and all options, as JSON data.

        With this in FILE, `muonckpt convert OLD NEW --to muonckpt --like FILE` makes a checkpoint for this optimizer::

            json.dump(optimizer.describe(model), open("template.json", "w"))

        Args:
            model: gives the names; not needed by an optimizer of named parameters.

        Raises:
            ArgumentError: a parameter has no name.
        """
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names: dict[Tensor, str] = {}
        for name, param in inner.named_parameters() if inner is not None else ():
            names[param] = plain_name(name)
        groups = []
        for number, group in enumerate(self.param_groups):
            labels = group.get("param_names") or [names.get(param) for param in group["params"]]
            if None in labels:
                raise ArgumentError(
                    f"group {number}: parameter {labels.index(None)} has no name; give describe() the model that has "
                    "all parameters, or make the optimizer of named_parameters()"
                )
            options = {key: as_numbers(value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": list(labels), **options})
        return {"param_groups": groups}
