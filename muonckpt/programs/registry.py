"""All programs: built-in ones, and those of other packages, which register in the same form.

A package names its programs in the group ``muonckpt.programs``, each a `Dialect`::

    [project.entry-points."muonckpt.programs"]
    mine = "my_package:PROGRAM"

Plug-ins are looked for only where no built-in program fits, so they cost nothing elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from ..names.errors import SourceError, TargetError
from ..names.plugins import load_plugins
from . import deepspeed, dion, megatron, moonlight, ours, torch, veomni
from .dialect import Dialect

ENTRY_POINTS = "muonckpt.programs"
"""The group of entry points."""

BUILT_IN = (
    torch.PROGRAM,
    veomni.PROGRAM,
    torch.TITAN,
    dion.PROGRAM,
    deepspeed.PROGRAM,
    dion.XTUNER,
    ours.PROGRAM,
    moonlight.PROGRAM,
    megatron.FSDP_DTENSOR,
    torch.BY_NUMBER,
    torch.UNKNOWN,
    megatron.TORCH_DIST,
    megatron.TORCH_DIST_CHAINED,
    megatron.LAYER_WISE,
)
DIALECTS: Mapping[str, Dialect] = MappingProxyType({dialect.name: dialect for dialect in BUILT_IN})
"""The built-in programs by name."""


def with_plugins() -> Mapping[str, Dialect]:
    """Return all programs by name, those of plug-ins included.

    Raises:
        SourceError: a plug-in cannot be imported, gives no program, or one whose name is taken.
    """
    return _with_plugins(tuple(sys.path))


@lru_cache(maxsize=4)
def _with_plugins(path: tuple[str, ...]) -> Mapping[str, Dialect]:
    """Return all programs.  Cached for this path, as a search of the installed packages takes milliseconds."""
    programs = dict(DIALECTS)
    for plugin, dialect in load_plugins(ENTRY_POINTS, Dialect, "programs").items():
        if dialect.name in programs:
            raise SourceError(f"the {plugin} for programs: there is a program {dialect.name!r} already; uninstall it")
        programs[dialect.name] = dialect
    return MappingProxyType(programs)


def program(name: str | None, option: str = "") -> Dialect | None:
    """Return the program of this name, which ``option`` gave; None for none.

    Raises:
        TargetError: there is none.
    """
    if name is None:
        return None
    # Looking for plug-ins takes milliseconds: only for a name that is not built in.
    programs = DIALECTS if name in DIALECTS else with_plugins()
    if name not in programs:
        where = f"{option}: " if option else ""
        raise TargetError(f"{where}unknown program {name!r}; expected one of {', '.join(programs)}")
    return programs[name]
