"""What an optimizer's groups are, as plain data: for people, and as the template of a conversion."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .groups.sorting import WRAPPERS
from .state import as_numbers


class DescribesGroups:
    """What makes an optimizer able to describe its groups."""

    param_groups: list[dict[str, Any]]

    def describe(self, model: nn.Module | None = None) -> dict[str, Any]:
        """The groups with their parameters' names and all options, as JSON data.

        `muonckpt convert OLD NEW --to muonckpt --like FILE`, with this in FILE, makes what fits this optimizer::

            json.dump(optimizer.describe(model), open("template.json", "w"))

        Args:
            model: has the names; not needed by an optimizer of named parameters.

        Raises:
            ValueError: a parameter has no name.
        """
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names = {} if inner is None else {param: _plain(name) for name, param in inner.named_parameters()}
        groups = []
        for number, group in enumerate(self.param_groups):
            own = group.get("param_names") or [names.get(param) for param in group["params"]]
            if None in own:
                raise ValueError(
                    f"group {number}: parameter {own.index(None)} has no name; give describe() the model that has "
                    "all parameters, or make the optimizer of named_parameters()"
                )
            options = {key: as_numbers(value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": list(own), **options})
        return {"param_groups": groups}


def _plain(name: str) -> str:
    """A parameter's name as state dicts have it: without those that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
