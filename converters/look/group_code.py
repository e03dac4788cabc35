"""The parameter groups of a checkpoint as data that can be read, edited, and given to an optimizer or to ``--like``."""

from __future__ import annotations

import pprint
from collections.abc import Sequence
from typing import Any

from ...record import Manifest
from ...store.stored_items import Values
from ...vocabulary import PARAMS
from ..translate.detection import detect
from ..translate.group_options import TargetGroup, merge_equal, source_groups


def groups_as_data(manifest: Manifest, values: Values) -> list[dict[str, Any]]:
    """The groups in their order, each with the names of its parameters and its options as its program calls them.

    Where options are by parameter, those with equal ones are together.

    Raises:
        SourceError: the program is unknown, or an option is damaged or not plain data.
    """
    groups = (
        TargetGroup(
            group.params,
            {option: values.read(item) for option, item in group.items.items() if option != PARAMS},
            group.number is not None,
        )
        for group in source_groups(manifest, detect(manifest).dialect, values)
    )
    return [{PARAMS: list(group.params), **group.options} for group in merge_equal(groups)]


def groups_as_code(groups: Sequence[dict[str, Any]]) -> str:
    """The groups as a Python expression."""
    return pprint.pformat(list(groups), width=120, compact=True, sort_dicts=False)
