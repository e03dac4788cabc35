"""Errors: each message says what failed and where, what was expected and found, and the next step.

The command line maps the families to exit codes; nothing else depends on them.
"""

from __future__ import annotations

import errno
import inspect
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain
from numbers import Integral, Real
from types import GenericAlias, UnionType
from typing import Any, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class MuonckptError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes:
        fault, advice: the parts of its text: what failed, and what follows from that.
        keys: of tensors and items whose checksums were found wrong.
        has_overwritten: whether tensors were overwritten before it was found.
    """

    def __init__(
        self, fault: str = "", advice: str = "", *, keys: tuple[str, ...] = (), has_overwritten: bool = False
    ) -> None:
        super().__init__(f"{fault}. {advice}" if advice else fault)
        self.fault, self.advice = fault, advice
        self.keys, self.has_overwritten = keys, has_overwritten

    def with_text(self, fault: str, advice: str = "", *, has_overwritten: bool = False) -> Self:
        """Return an error of this kind, with what else it says, and another text."""
        return type(self)(fault, advice, keys=self.keys, has_overwritten=has_overwritten or self.has_overwritten)


class LayoutError(MuonckptError, ValueError):
    """A layout or a plan is impossible: a hole, a partial overlap, a box out of bounds, a wrong shape."""


class TargetError(LayoutError):
    """The request does not fit the checkpoint, however healthy that is: an unknown axis, a dim that does not exist."""


class SourceError(MuonckptError):
    """A checkpoint cannot be read: missing, refused, corrupt or incomplete."""


class UnavailableError(MuonckptError):
    """A file system or an object store cannot answer now, or not to this user: this says nothing about a checkpoint.

    It is no `SourceError`: whoever goes on from an older checkpoint where one is damaged must not do so for this.
    """


class DiskError(UnavailableError):
    """A local file system cannot read a file (EIO).  If it can read the others, the file is damaged."""


class RemovedError(SourceError):
    """A checkpoint, or a file of it, was removed while it was read."""


class DamageError(SourceError):
    """A checkpoint is not what was written: a file is missing or cut, or its bytes are others."""


class UnknownOptimizerError(SourceError):
    """State is that of an optimizer that is not known, or in a form that is not read; weights can be read."""


class UnnamedStateError(SourceError):
    """State is that of numbered parameters, and nothing tells their names: the message says a whole cure."""


class UnseenError(SourceError):
    """A process does not see a file or folder that another one sees, so that nothing is known of the checkpoint."""


class ChecksumError(DamageError):
    """Bytes that were read have another checksum than was recorded."""


class LostFileError(DamageError):
    """A file of a checkpoint is missing or cut: its contents are lost, and all else may be whole."""


class UnlistedError(LostFileError):
    """The description of some tensors is lost, or the tensors with it."""


class MisdescribedError(DamageError):
    """A description is lost or wrong, and all tensors are there."""


class SeveralSavesError(DamageError):
    """Files of a checkpoint are of several saves, and nothing in it says which are of one: a whole copy does."""


ADVICE = "What to do: "
"""The beginning of an advice on damage."""


class ArgumentError(MuonckptError, TypeError, ValueError):
    """An argument is wrong, or differs between the ranks of a collective call."""


class DestinationError(MuonckptError):
    """A checkpoint cannot be written: the destination exists, is full or is not writable."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def unwritable(place: object, error: OSError) -> DestinationError:
    """Return the error where a file system refuses to write; it has the next step where space or a limit is short."""
    is_full = error.errno in _FULL
    step = "; nothing was published: free space or raise the limit there, and run it again" if is_full else ""
    return DestinationError(f"cannot write {place}: {error.strerror or error}{step}")


class UnsyncedError(DestinationError):
    """A checkpoint is published, and whole for its readers, but a crash of the machine may still undo that."""


class AttestError(MuonckptError):
    """Memory differs from a checkpoint's state, another process's, or that of the other replicas."""


class Interrupted(MuonckptError):
    """Work stopped half-way: a process that shared it was interrupted or lost."""


class LostRankError(Interrupted):
    """A rank ended, or did not answer, while all were at work together.  The process group is of no use any more."""


class lost_ranks:
    """Raises our error where the one collective in the block fails: torch's message is about a pair of sockets.

    Raises:
        LostRankError: another rank was killed, or does not answer.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise LostRankError(
            f"another rank was lost, or slower than the time-out of the process group (torch says: {reason}). Start "
            "all ranks again from a checkpoint: tensors may be half changed; a save has published nothing, or all of "
            "it. If the rank was slow, wait longer: process_group=dist.new_group(timeout=...), for steps "
            "init_process_group(timeout=...)"
        ) from error


_MAX_REASON = 160
"""Characters of torch's message that ours repeats."""


_FRAMES_OF_CALLS = ("muonckpt.", "torch.", "contextlib", "functools")
"""Modules that stand between the line of a user and a warning."""


def warn_on_rank(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of this package that led here, but do not raise on a rank of several, for which the
    others would wait in the next collective.

    Where warnings are errors (``-W error``), the message goes to standard error instead.
    """
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_FRAMES_OF_CALLS):
        frame, stacklevel = frame.f_back, stacklevel + 1
    try:
        warnings.warn(message, category, stacklevel=stacklevel)
    except category:
        distributed = sys.modules.get("torch.distributed")  # whoever has ranks has imported it
        if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
            raise
        print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)


@contextmanager
def going_on(fault: str) -> Iterator[None]:
    """Warn of an error in the block, which is no reason to end a training; the warning begins with the fault."""
    try:
        yield
    except (MuonckptError, OSError) as error:
        warn_on_rank(f"{fault}; training goes on: {error}", RuntimeWarning)


def did_you_mean(word: str, candidates: Sequence[str]) -> str:
    """Return the end of an error message: the candidates that are closest to a word; empty if none is close."""
    from difflib import get_close_matches  # few programs need it

    # Whole names first, then names that contain the word, then parts of names between dots.
    word = word.strip("*?")
    close = get_close_matches(word, candidates[:20_000], n=3, cutoff=0.6)
    close = close or [name for name in candidates if word and word.casefold() in name.casefold()][:3]
    if not close:
        parts = dict.fromkeys(chain.from_iterable(name.split(".") for name in candidates[:20_000]))
        close = get_close_matches(word, list(parts), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def value_in_short(value: object) -> str:
    """Return a number or a text as code, anything else by its type, for an error message."""
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    noun = type(value).__name__
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"


def called_like(line: str, **elsewhere: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of the public API with an example of its call, with which wrong arguments are refused.

    An argument that the function lacks, and one of another kind than its annotation says, are an `ArgumentError`.

    Args:
        elsewhere: arguments of other functions, each with the line to write instead.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, caller = inspect.signature(function), function.__qualname__.removesuffix(".__init__")
        flags = [name for name, parameter in signature.parameters.items() if parameter.annotation == "bool"]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # Anything is true or false, so that nothing else would refuse it.
            _refuse_kinds(caller, line, kwargs, dict.fromkeys(flags, bool))
            try:
                return function(*args, **kwargs)
            except (MuonckptError, ValueError):  # a ValueError of torch names the value
                raise
            except Exception as error:
                # Refuse a call that does not fit the signature or its annotations; others fail by themselves.
                try:
                    arguments = signature.bind(*args, **kwargs).arguments
                except TypeError as misfit:
                    name = str(misfit).rpartition("argument ")[2].strip("'")
                    hint = "." if name in elsewhere else did_you_mean(name, [*signature.parameters]) or "."
                    if name == str(misfit):  # too many: some are given by name only
                        by_name = [key for key, each in signature.parameters.items() if each.kind == each.KEYWORD_ONLY]
                        hint = f"; by name only: {', '.join(by_name)}." if by_name else "."
                    cure = elsewhere.get(name, line)
                    raise ArgumentError(f"{caller}: {misfit}{hint} Write {cure}") from None
                hints = get_type_hints(function)
                for name, parameter in signature.parameters.items():
                    if parameter.kind == parameter.VAR_POSITIONAL:
                        hints[name] = GenericAlias(tuple, (hints[name], ...))
                _refuse_kinds(caller, line, arguments, hints, error)
                raise

        return call

    return decorate


def constructed_like(line: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass with an example of its construction, with which values of another kind are refused."""

    def decorate(kind: type[T]) -> type[T]:
        initialise = called_like(line)(kind.__init__)
        hints = cache(lambda: get_type_hints(initialise))

        @wraps(initialise)
        def initialise_checked(self: T, *args: Any, **kwargs: Any) -> None:
            initialise(self, *args, **kwargs)
            values = {name: getattr(self, name) for name in hints() if name != "return"}
            _refuse_kinds(kind.__qualname__, line, values, hints())

        kind.__init__ = initialise_checked  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def _refuse_kinds(
    caller: str, line: str, values: Mapping[str, object], hints: Mapping[str, Any], cause: Exception | None = None
) -> None:
    """Raise `ArgumentError`, with the line to write, for the first value that is not of the kind that its hint says."""
    for name, hint in hints.items():
        if name in values and not _fits(values[name], hint):
            kind = hint.__name__ if isinstance(hint, type) else re.sub(r"(\w+\.)+", "", str(hint))
            kind = "True or False" if hint is bool else kind
            found = f"{name}={value_in_short(values[name])}"
            raise ArgumentError(f"{caller}: {found}: expected {kind}. Write {line}") from cause


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of the kind that an annotation says, and the members of a list or mapping as well."""
    kind, choices = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, choice) for choice in choices)
    if kind is Literal:
        return isinstance(value, str) and value in choices
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if hint is Any or not isinstance(kind, type):
        return True
    if isinstance(value, str) and issubclass(kind, Iterable):  # its letters are not meant
        return kind is str
    if isinstance(value, Mapping) and len(choices) == 2:
        return isinstance(value, kind) and all(_fits(k, choices[0]) and _fits(v, choices[1]) for k, v in value.items())
    is_uniform = len(choices) == 1 or choices[1:] == (...,)
    members = value if isinstance(value, list | tuple) and is_uniform else []
    return isinstance(value, kind) and all(_fits(member, choices[0]) for member in members)


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Prefix every error of ours that is raised inside with its subject, such as a tensor or a file."""
    try:
        yield
    except MuonckptError as error:
        raise error.with_text(f"{subject}: {error.fault}", error.advice) from error
