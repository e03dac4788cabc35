"""Requests of one process to all ranks, such as a signal makes: bits that travel with the exchanges of a step.

The optimizer sends the requests of this process in a step's first notes, and records here what all ranks have sent.
`checkpoint.signals`, which asks for them, needs a collective of its own only if no step has run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..names.errors import warn_on_rank

SAVE, STOP = 1, 2
"""The requests: to save at the end of this step, and to save and stop."""

BITS = (SAVE, STOP)

Ranks = frozenset[int]

_pending: set[int] = set()
"""The requests of this process.  A signal handler adds to it, which is one operation of the interpreter."""

add = _pending.add


def pending() -> int:
    """Return the requests of this process, as bits."""
    return sum(_pending)


def withdraw(bits: int) -> None:
    """Forget requests of this process, which are met."""
    for bit in BITS:
        if bits & bit:
            _pending.discard(bit)


@dataclass(slots=True)
class _Exchanges:
    """A count of the exchanges of one set of ranks.

    Attributes:
        count: the number of exchanges so far, which is the number of the latest.
        latest_by_bit: the number of the latest exchange with each request.
        num_unheard: the number of exchanges with requests since a `Listener` asked for them.
    """

    count: int = 0
    latest_by_bit: dict[int, int] = field(default_factory=dict)
    num_unheard: int = 0


_exchanges: dict[Ranks, _Exchanges] = {}

PATIENCE = 8
"""Exchanges with a request that nobody asks for, until a warning: a step may have several, one for each optimizer."""


def record_exchange(ranks: Ranks, bits: int) -> None:
    """Record that ranks have exchanged their requests, which are ``bits`` together.

    Warns:
        RuntimeWarning: nobody has asked for requests in `PATIENCE` exchanges.
    """
    exchanges = _exchanges.setdefault(ranks, _Exchanges())
    exchanges.count += 1
    exchanges.latest_by_bit |= {bit: exchanges.count for bit in BITS if bits & bit}
    exchanges.num_unheard += bits > 0
    # A request that nobody hears would be lost without a word.
    if bits and exchanges.num_unheard == PATIENCE:
        warn_on_rank(
            "a signal asked for a checkpoint some steps ago, and there is none yet: write "
            "`if series.due(step): series.save(step, state_dict)` after each step",
            RuntimeWarning,
        )


class Listener:
    """Returns, at each call, the requests since the call before, and at first since its construction."""

    def __init__(self) -> None:
        self._counts = {ranks: exchanges.count for ranks, exchanges in _exchanges.items()}

    def hear(self, ranks: Ranks) -> int | None:
        """Return the new requests of any of these ranks; None if they have not all exchanged theirs since."""
        bits: int | None = None
        for members, exchanges in _exchanges.items():
            count = self._counts.get(members, 0)
            if ranks <= members and exchanges.count > count:
                bits = (bits or 0) | sum(bit for bit, number in exchanges.latest_by_bit.items() if number > count)
                self._counts[members], exchanges.num_unheard = exchanges.count, 0
        return bits
