"""What is or may be wrong, in one form, whoever saw it: an audit, a look at metadata or at numbers, a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong or looks odd.

    Attributes:
        kind: one word for programs.
        message: what was found, what was expected, and where.
        names: the tensors, items, parameters, files or ranks that it concerns.
        means: what that usually means, and what to do; empty where the message says it.
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()
    means: str = ""

    @property
    def key(self) -> str | None:
        """The first name; None if there is none."""
        return self.names[0] if self.names else None

    @classmethod
    def listing(cls, kind: str, message: str, names: Sequence[str], means: str = "") -> Finding:
        """Return a finding whose message ends with the first names."""
        return cls(kind, f"{message}: {', '.join(names[:3])}{' …' * (len(names) > 3)}", tuple(names), means)
