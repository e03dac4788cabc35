"""The entry point: finds the command, and turns errors into one clear paragraph and an exit code.

Exit codes: 0 success; 1 damage or a difference was found; 2 usage; 3 the source is unreadable, corrupt or refused; 4
the destination or its file system failed; 5 one of several processes was interrupted or lost; 70 a bug in
muonckpt; 130 interrupted; 141 standard output was closed.  (70 is from BSD's sysexits; shells use 130 and 141.)
"""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import StringIO, TextIOWrapper
from itertools import chain
from types import FrameType

import click

from ..names.errors import (
    DestinationError,
    Interrupted,
    LayoutError,
    MuonckptError,
    SourceError,
    TargetError,
    UnavailableError,
    did_you_mean,
)
from ..names.version import VERSION
from .printing import BEGAN, print_line, with_options

COMMANDS = {
    "inspect": "Show the contents of a checkpoint, their owners, and suspicious facts.",
    "verify": "Check that a checkpoint is whole: coverage, bounds, checksums, fingerprints, values.",
    "diff": "Say what differs between two checkpoints, tensor by tensor.",
    "stats": "Measure weights and state: norms, spectra, updates; say what looks odd.",
    "report": "Write a page for a browser about a checkpoint or a run: its faults, a map of shards, norms.",
    "preflight": "Say whether a job would resume from a checkpoint, before it is queued.",
    "reshard": "Rewrite a checkpoint for another mesh, layout, format or program, without a GPU.",
    "convert": "Rewrite a checkpoint in another format, or for another program.",
    "lab": "Examine an optimizer, a step, or meshes of your choice.",
}
"""The commands, each with a line for `--help`, which imports none of them."""

_FILES = dict.fromkeys(("reshard", "convert"), "rewriting")
"""The modules of commands that do not have one of their own name."""

_EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (SourceError, 3),
    (UnavailableError, 3),
    (LayoutError, 3),
    (Interrupted, 5),
    (DestinationError, 4),
    (OSError, 4),
)

_MAX_MESSAGE = 20_000
"""The most characters of a message, which may quote a hostile file."""

_FLAGS = re.compile(r"muonckpt [a-z]+ [^`;(]*|(?<![\w-])(--[a-z][a-z-]*)")
"""Options in a message, but for those after the command that they are of."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_received_signals: list[int] = []
"""Signals that have told this process to end."""


_coloured: list[bool | None] = []
"""Whether the command line requests colours; errors are printed when click's context is gone."""


def _colour(context: click.Context, _: click.Parameter, choice: str | None) -> None:
    """Set when output has colours; an option after the command counts, else the one before it, else ``NO_COLOR``."""
    if choice is not None:
        context.color = context.find_root().color = {"always": True, "never": False}.get(choice)
    elif context.parent is None and (os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"):
        context.color = False
    _coloured[:] = [context.color]


_COLOUR_CHOICE = click.Choice(["auto", "always", "never"])

COLOUR = click.Option(["--color"], type=_COLOUR_CHOICE, expose_value=False, callback=_colour, hidden=True)
"""The option `--color` of every command, listed in the help of `muonckpt` itself."""


class Commands(click.Group):
    """Answers a mistake with the usage of its command, and an unknown name with those that come close."""

    def invoke(self, context: click.Context) -> object:
        """Run the command.

        A closed output is handled here because click would exit with 1, which means damage.
        """
        context.meta[BEGAN] = time.monotonic()
        try:
            return super().invoke(context)
        except BrokenPipeError:  # `muonckpt inspect … | head`
            _discard_output()
            raise click.exceptions.Exit(141) from None
        except MuonckptError as error:
            name = context.invoked_subcommand or ""
            command, convert = self.get_command(context, name), cli.get_command(context, "convert")
            if command is None or convert is None or isinstance(command, click.Group):  # a group has added the note
                raise
            # Say where the options are that a message of the library names and the command lacks.
            foreign_flags = _flags(convert) - _flags(command)
            flags = [flag for flag in _FLAGS.findall(with_options(str(error))) if flag in foreign_flags]
            options = ", ".join(dict.fromkeys(flags))
            note = f" ({options}: options of `muonckpt convert`; give {name} what that writes)" if flags else ""
            if isinstance(error, TargetError):  # a mistake in the command line
                raise click.UsageError(f"{error}{note}", click.Context(command, context, name)) from error
            error.add_note(note)
            raise

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        command = super().get_command(context, name)
        if command is not None and COLOUR not in command.params:
            command.params.append(COLOUR)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = arguments[0], self.list_commands(context)
        if name not in names and not name.startswith("-"):
            context.fail(f"no such command {name!r}{did_you_mean(name, names)}")
        return super().resolve_command(context, arguments)


class _LazyCommands(Commands):
    """Imports the module of a command only when that command runs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS and name not in self.commands:
            gc.disable()  # imported modules stay; the collector would search them in vain
            try:
                module = import_module(f".{_FILES.get(name, name)}", __package__)
            finally:
                gc.enable()
            self.commands[name] = getattr(module, f"{name}_command")
        return super().get_command(context, name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _flags(command: click.Command) -> set[str]:
    return set(chain.from_iterable(option.opts for option in command.params))


@click.group(cls=_LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION)
@click.option(
    "--color", type=_COLOUR_CHOICE, expose_value=False, callback=_colour,
    help="Colours, also after the command; auto: on a terminal, unless NO_COLOR is set.",
)  # fmt: skip
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")  # `run` looks for it
def cli() -> None:
    """Inspect, verify, reshard and convert checkpoints of sharded Muon training.

    \b
    muonckpt inspect run/step-00001000
    muonckpt COMMAND --help

    Exit codes: 0 success, 1 damage or a difference found, 2 usage, 3 source unreadable or corrupt, 4 destination
    failed, 5 interrupted and resumable.
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Warnings are notes, each once: whoever runs a command has no use for the line of our source.
    """
    printed = set()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if text not in printed:
            printed.add(text)
            with suppress(OSError):
                _print_error(f"note: {text}\n", "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = note
        return _exit_code_of(arguments)


def _exit_code_of(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code, and print an error as the user needs it."""
    try:
        result = cli.main(args=list(arguments), prog_name="muonckpt", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show(text := StringIO())
        _print_error(text.getvalue(), "red")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _print_failure("interrupted")
        return 130
    except Exception as error:
        if _received_signals and not isinstance(
            error, MuonckptError | OSError
        ):  # libraries turn interruptions into other errors
            _print_failure("interrupted")
            return 130
        # Errors that the user can fix have a code; all others are our bugs.
        if "--debug" in arguments:
            import traceback

            _print_failure(traceback.format_exc())
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            _print_failure("this needs torch, which is not installed here: pip install torch")
            return 2
        if isinstance(error, RecursionError):
            _print_failure("the source is nested too deeply: expected a checkpoint's metadata, found something else")
            return 3
        for kind, code in _EXIT_CODES:
            if isinstance(error, kind):
                _print_failure("".join((str(error), *getattr(error, "__notes__", ()))))
                too_many = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                return 3 if too_many else code  # Python opens its modules, too
        _print_failure(f"this is a bug ({type(error).__name__}: {error}); please report it with the output of --debug")
        return 70


def _print_failure(text: str) -> None:
    shown = text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE // 2]} … {text[-_MAX_MESSAGE // 2 :]}"
    with suppress(OSError):  # standard error may be closed
        _print_error(f"muonckpt: {shown}\n", "red")


def _print_error(text: str, fg: str) -> None:
    """Print on standard error, on a terminal folded and the error in a colour, without what could control it."""
    with click.Context(cli) as context:
        context.color = _coloured[0] if _coloured else None
        for line in text.removesuffix("\n").split("\n"):
            print_line(line, err=True, fg=fg if line.startswith(("muonckpt: ", "Error: ", "note: ")) else None)


def _discard_output() -> None:
    """Redirect standard output to nowhere, so that buffered text does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the console script.  SIGTERM, which schedulers send, counts as Ctrl-C; a second signal ends the process."""
    # numpy's BLAS would start a thread for each core when it is imported, and no command uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # our own messages say what failed in torch
    for stream in (sys.stdout, sys.stderr):  # the name of a tensor may contain anything
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # a checkpoint may have thousands of files
    try:
        _catch_signals()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the command ran
        code = 130
    _leave_signals()
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    # Threads of torch, also those of its process groups, would return into an interpreter that has ended, and abort.
    if threading.active_count() > 1 or "torch.distributed" in sys.modules:
        sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # or the collector would visit every object once more at exit
    sys.exit(code)


def _catch_signals() -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as Ctrl-C is in a background job of a shell
            signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again


def _leave_signals() -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _leave_signals()
    _received_signals.append(number)
    raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise an interruption again that came in a destructor, where Python drops errors."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    _catch_signals()
    signal.raise_signal(signal.SIGTERM)
