"""`Muon.for_model`: the optimizer of a whole model in one line, over `sort_parameters`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .groups.rules import Rule
from .groups.sorting import sort_parameters


class ForModel:
    """What makes an optimizer of parameter groups one of a whole model."""

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        lr: float | Tensor,
        rules: Sequence[Rule] | Sequence[Sequence[Rule]],
        adamw_lr: float | Tensor | None = None,
        kinds: Mapping[str, Mapping[str, Any]] | None = None,
        named: bool = False,
        **options: Any,
    ) -> Self:
        """The optimizer of a whole model: matrices by Muon, the rest by AdamW, sorted by rules.

        Rates of matrices and of AdamW differ by two orders of magnitude with the default ``adjust_lr_fn``, so one
        number never means both unless you say so.  There are two ways, and no third::

            Muon.for_model(model, rules=LLAMA, lr=0.02, adamw_lr=3e-4)
            Muon.for_model(model, rules=LLAMA, lr=3e-4, adjust_lr_fn="match_rms_adamw")  # AdamW's rate serves both

        Frozen parameters (``requires_grad=False``) are in no group; what is unfrozen later needs `add_param_group`.

        Args:
            model: may be sharded, compiled or wrapped.  If it is a DistributedDataParallel, ``replicas`` is its process
                group.
            lr: of matrices.
            rules: a set, such as `groups.LLAMA`, or several, of which earlier ones beat later ones:
                ``[[Rule("head", "out.weight")], MODULE_TYPES]``.
            adamw_lr: of everything else.  None: ``lr``, which is refused unless ``adjust_lr_fn="match_rms_adamw"``.
            kinds: options by kind, as `Decisions.groups` takes them: ``{"vector": {"weight_decay": 0.0}}``.
            named: whether the optimizer has its parameters' names, by which `Muon.load_state_dict` then matches them,
                also across changed groups.  Not for torch's flattened state dicts, which would repeat the names of a
                whole group for each of its parameters; these have names without it.
            options: of the optimizer itself.

        Raises:
            ValueError: rules leave something unclear (`sort_parameters`), there is no rate of AdamW, or what the
                optimizer refuses.
        """
        layers: Any = [rules] if all(isinstance(rule, Rule) for rule in rules) else rules
        rate = {} if adamw_lr is None else {"lr": adamw_lr}
        replicas = {"replicas": model.process_group} if isinstance(model, DistributedDataParallel) else {}
        decisions = sort_parameters(model, *layers)
        groups = decisions.groups(adamw=rate, kinds=kinds or {})
        if named:
            names = {decision.parameter: decision.names[0] for decision in decisions}
            groups = [{**group, "params": [(names[param], param) for param in group["params"]]} for group in groups]
        return cls(groups, lr=lr, **{**replicas, **options})  # type: ignore[call-arg]
