"""The numbers of parameters, for programs that name state by the number of its parameter in the optimizer.

torch numbers the parameters of all groups one after the other, in the order in which the run listed them.  That order
is in the source's list of groups, or in a template of the run's groups; where it is in neither, a number would be a
guess, by which momentum would silently go to another parameter of the same shape.  A checkpoint that was written with
numbers keeps the names in its manifest, so that it can be read under names again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...errors import SourceError
from ...record import Manifest
from ..engine.checklist import Action, Findings
from .context import Context
from .dialect import Dialect
from .group_options import SourceGroup, TargetGroup
from .names import NameRule, NameRules


def numbers_of(
    context: Context,
    groups: Sequence[SourceGroup],
    members: Iterable[Sequence[str]],
    written: Sequence[TargetGroup],
    findings: Findings,
) -> Mapping[str, str]:
    """The number of each parameter, by name; empty if the target has no numbers, or the source's stay.

    Args:
        groups: those of the source, and ``members`` their parameters by the target's names.
        written: those of the target, in which every member has to be.

    Raises:
        SourceError: the order of the parameters is not known, or one of them would be left out of it.
    """
    if not context.target.numbered or context.dialect.numbered:
        return {}
    ordered = context.like is not None or (groups and all(group.number is not None for group in groups))
    if not ordered:
        known = "keeps options by parameter, without an order" if groups else "does not say what its groups are"
        raise SourceError(
            f"{context.target.name} numbers parameters in the order of the run's groups, and {context.dialect.name} "
            f"{known}; give that order with --like"
        )
    names = [name for group in written for name in group.params]
    if context.like is not None and not groups:
        names = [name for group in context.like.groups for name in group["params"]]
    lost = sorted({name for some in members for name in some} - set(names))
    if lost:
        raise SourceError(
            f"{lost[0]!r} and {len(lost) - 1} more are in groups of the source, but nothing says by which method they "
            f"are updated, so they are in no group of {context.target.name}, and all numbers after them would be wrong"
        )
    numbers = {name: str(number) for number, name in enumerate(names)}
    findings.check(
        Action.SET,
        "the order of parameters in the optimizer",
        *(f"{number} {name}" for name, number in numbers.items()),
        reason=f"{context.target.name} knows them by number; the run's groups must list them so",
    )
    return numbers


def recorded_names(manifest: Manifest, dialect: Dialect) -> NameRules:
    """Rules from numbers to the names that the manifest records; none if the dialect has names, or it records none."""
    found: dict[str, str] = {}
    for tensor in manifest.tensors if dialect.numbered else ():
        fields = dialect.state.read(tensor.path)
        if fields is not None and tensor.name not in (None, fields["name"]):
            found[fields["name"]] = str(tensor.name)
    return NameRules(tuple(NameRule((number,), (name,)) for number, name in found.items()))
