"""Signals that become a checkpoint: a handler sets a flag, ranks tell each other, and all of them save at one step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch.utils.data import DataLoader

from ..names.errors import ArgumentError
from .all_ranks import bits_of_all, is_coordinator, warned_when_waiting

Then = Literal["go on", "stop"]
"""The sequel of a save: the program goes on, or stops."""

SIGNALS: Mapping[signal.Signals, Then] = {
    signal.SIGTERM: "stop",
    signal.SIGINT: "stop",
    signal.SIGHUP: "stop",
    signal.SIGXCPU: "stop",
    signal.SIGUSR1: "go on",
    signal.SIGUSR2: "go on",
}
"""The signals that may ask for a checkpoint, and what follows it unless the user says otherwise."""

BITS: Mapping[Then, int] = {"go on": 1, "stop": 2}
"""The requests: to save at the end of this step, and to save and stop."""

_pending: set[int] = set()
"""The requests of this process.  A handler adds to it, which is one operation of the interpreter."""

_LISTENS = 4
"""A bit beside these, of a rank that was given signals to listen to."""

STOPPED = 75
"""The exit code of a program that a signal has stopped after a save; it means "try again" in sysexits.h."""

Signal = signal.Signals | str
"""A signal, or its name: ``"SIGUSR1"``."""

On = Signal | Iterable[Signal] | Mapping[Signal, Then]

Handler = Callable[[int, FrameType | None], Any]

_defaults: set[Any] = {signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler}
"""Handlers that end or ignore, in whose place ours is put; any other is called after it."""


class Signals:
    """Signals to any rank, told to all.  One rank's handlers are put in place when it is made.

    Args:
        on: the signals that ask for a checkpoint, or their names; as a mapping, with what follows it.
        process_group: the ranks that save together.

    Raises:
        ArgumentError: a signal is not among `SIGNALS`, what follows is unknown, or this is not the main thread.
    """

    def __init__(self, on: On, process_group: dist.ProcessGroup | None) -> None:
        # All is checked before the first handler is put in place, so that an error leaves signals as they were.
        self._group = process_group
        sequels = sequels_of(on)
        self._requests = 0
        """The requests that all ranks know of, and that are not met."""
        self._handlers: dict[signal.Signals, tuple[Handler, Any]] = {}
        """Ours and the former ones; none after `close`."""
        self._this_rank_listens = bool(sequels)
        self._any_rank_listens = True
        """Whether a rank may listen; the same on all ranks.  Once none does, `due` asks no more."""
        if sequels and threading.current_thread() is not threading.main_thread():
            raise ArgumentError("on=: Python handles signals in the main thread only, so make this there")
        formers = {number: signal.getsignal(number) for number in sequels}
        if unknown := [number.name for number, former in formers.items() if former is None]:
            raise ArgumentError(
                f"on=: {', '.join(unknown)} has a handler that was not installed from Python, and could not be put "
                "back: leave it out, or make this before that handler is installed"
            )
        # The former handler is remembered: it is called after ours, or put back.
        for number, former in formers.items():
            self._handlers[number] = self._handler(BITS[sequels[number]], former), former
            signal.signal(number, self._handlers[number][0])

    def due(self, call: str) -> Then | None:
        """Return the action after a checkpoint, if one is requested; the same on all ranks.

        Collective, by one small gather; after the first call only where a rank listens.

        Args:
            call: has to be the same on all ranks.
        """
        if self._any_rank_listens:
            bits = bits_of_all(self._group, call, sum(_pending) | (_LISTENS if self._this_rank_listens else 0))
            self._any_rank_listens = bool(bits & _LISTENS)
            self._requests |= bits & ~_LISTENS if self._any_rank_listens else 0
        return self.then

    def ask(self, call: str) -> None:
        """Receive all requests until now; a save that begins now serves them.  Collective.

        Where no rank listens, and `due` has reported none, requests are left to others, such as another series.
        """
        # Ranks without signals answer as well: the gather takes all of them.
        with warned_when_waiting(self._group, call):
            bits = bits_of_all(self._group, call, sum(_pending) | (_LISTENS if self._this_rank_listens else 0))
        if bits & _LISTENS or self._requests:
            self._requests |= bits & ~_LISTENS
            _pending.difference_update(bit for bit in BITS.values() if bit & self._requests)

    @property
    def then(self) -> Then | None:
        """The action after the requested checkpoint; None if none is requested."""
        return "stop" if self._requests & BITS["stop"] else "go on" if self._requests else None

    def met(self, place: str) -> None:
        """Go on, or end the program, now that a checkpoint is at this place.

        Raises:
            SystemExit: on all ranks, with `STOPPED`, if that was requested.
        """
        sequel, self._requests = self.then, 0
        if sequel == "stop":
            self.stop(place)

    def stop(self, place: str) -> NoReturn:
        """End the program on this rank, with a line from the first one.

        Raises:
            SystemExit: with `STOPPED`.
        """
        if is_coordinator(self._group):
            print(
                f"muonckpt: a signal asked to stop, and {place} is saved: the program ends with exit code {STOPPED}; "
                "started again, it goes on from there",
                file=sys.stderr,
            )
        raise SystemExit(STOPPED)

    def spare_workers(self, loader: DataLoader[Any]) -> None:
        """Have workers that a loader starts from now on ignore these signals, which launchers send to them as well.

        Without its workers a loader raises before there is a checkpoint.
        """
        loader.worker_init_fn = partial(_ignore_signals, [*map(int, self._handlers)], loader.worker_init_fn)

    def _handler(self, bit: int, former: Any) -> Handler:
        """Return a handler that notes a request, and then calls the user's handler that was there before."""
        users_handler = former if callable(former) and former not in _defaults else None
        process = os.getpid()

        # A flag is all that a handler may set: it runs between any two instructions.
        def handle(number: int, frame: FrameType | None) -> None:
            is_fork = os.getpid() != process
            if number in self._handlers and not (is_fork and number == signal.SIGTERM):
                _pending.add(bit)
            # These signals were closed while another handler stood above ours, or a parent ends its fork: the signal
            # does what it did before.
            elif signal.getsignal(number) is handle:
                signal.signal(number, former)
                signal.raise_signal(number)
                return
            if users_handler is not None:
                users_handler(number, frame)

        return handle

    def close(self) -> None:
        """Put former handlers back, where no other handler has replaced ours since."""
        for number, (handler, former) in self._handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, former)
        self._handlers = {}


def _ignore_signals(numbers: Iterable[int], init_worker: Callable[[int], None] | None, worker: int) -> None:
    """Ignore signals in a worker, and then do its loader's work."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    if init_worker is not None:
        init_worker(worker)


def end_in_order(busy: Callable[[], bool]) -> None:
    """Have SIGTERM end the program as ``sys.exit`` does while it is busy, if it would end the process at once."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    # Nothing is lost by an end at once while no save is under way.
    def handle(number: int, frame: FrameType | None) -> None:
        if not busy():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)  # launchers send it twice
        raise SystemExit(128 + number)

    _defaults.add(handle)
    signal.signal(signal.SIGTERM, handle)


def sequels_of(on: On) -> dict[signal.Signals, Then]:
    """Return what follows each signal of a user's argument.

    Raises:
        ArgumentError: a signal is not among `SIGNALS`, or what follows is unknown.
    """
    by_name: Mapping[Any, signal.Signals] = {number.name: number for number in SIGNALS}
    sequels: dict[signal.Signals, Then] = {}
    for given in (on,) if isinstance(on, int | str) else on:
        number: Any = by_name.get(given, given)
        sequel: Any = on[given] if isinstance(on, Mapping) else SIGNALS.get(number)
        if number not in SIGNALS or sequel not in BITS:
            raise ArgumentError(
                f"on={on!r}: expected some of {', '.join(by_name)}, or a dict of them with "
                f"{' or '.join(map(repr, BITS))}"
            )
        sequels[signal.Signals(number)] = sequel
    return sequels
