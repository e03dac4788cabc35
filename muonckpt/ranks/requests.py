"""Requests of one process to all ranks, such as a signal makes: bits that travel with what ranks exchange anyway.

The optimizer sends those of this process in a step's first notes, and reports here what all ranks have sent.  Who asks
for that (`checkpoint.signals`) needs a collective of its own only if no step has run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..names.errors import warn_on_rank

SAVE, STOP = 1, 2
"""The requests: to save at the end of this step, and to save and stop."""

BITS = (SAVE, STOP)

Ranks = frozenset[int]

_made: set[int] = set()
"""The requests of this process.  A signal handler adds to it, which is one operation of the interpreter."""

make = _made.add


def made() -> int:
    """Return the requests of this process, as bits."""
    return sum(_made)


def withdraw(bits: int) -> None:
    """Forget requests of this process, as they are met."""
    for bit in BITS:
        if bits & bit:
            _made.discard(bit)


@dataclass(slots=True)
class _Exchanges:
    """Exchanges of one set of ranks that have told of requests.

    Attributes:
        number: of the last one; the first is 1.
        last: the number of the last one in which each request was made.
        unheard: those with requests since anybody has asked for them.
    """

    number: int = 0
    last: dict[int, int] = field(default_factory=dict)
    unheard: int = 0


_exchanges: dict[Ranks, _Exchanges] = {}

PATIENCE = 8
"""Exchanges with a request that nobody asks for, until a warning: a step may have several, one for each optimizer."""


def report(ranks: Ranks, bits: int) -> None:
    """Record that these ranks have exchanged their requests, of which ``bits`` were made by any of them.

    Warns:
        RuntimeWarning: nobody has asked for requests in `PATIENCE` exchanges.
    """
    exchanges = _exchanges.setdefault(ranks, _Exchanges())
    exchanges.number += 1
    exchanges.last |= {bit: exchanges.number for bit in BITS if bits & bit}
    exchanges.unheard += bits > 0
    if bits and exchanges.unheard == PATIENCE:
        warn_on_rank(
            "a signal asked for a checkpoint some steps ago, and there is none yet: write "
            "`if series.due(step): series.save(step, state_dict)` after each step",
            RuntimeWarning,
            stacklevel=2,
        )


class Listener:
    """Hears, at each call, of the requests since the last one, and at first since it was made."""

    def __init__(self) -> None:
        self._heard = {ranks: exchanges.number for ranks, exchanges in _exchanges.items()}

    def hear(self, ranks: Ranks) -> int | None:
        """Return the requests of any of these ranks; None if they have not all exchanged any since the last call."""
        news: int | None = None
        for together, exchanges in _exchanges.items():
            before = self._heard.get(together, 0)
            if ranks <= together and exchanges.number > before:
                news = (news or 0) | sum(bit for bit, number in exchanges.last.items() if number > before)
                self._heard[together], exchanges.unheard = exchanges.number, 0
        return news
