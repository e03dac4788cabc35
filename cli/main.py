"""Entry point: finds the command, and turns errors into one clear paragraph and an exit code.

Exit codes: 0 fine; 1 a finding (damage, difference); 2 usage; 3 the source is unreadable, corrupt or refused;
4 the destination or its file system failed; 5 interrupted, and can be resumed; 130 interrupted, nothing to resume.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

import click

from ..errors import DestinationError, Interrupted, LayoutError, MuonckptError, SourceError

COMMANDS = {
    "inspect": "Say what is in a checkpoint and how it is laid out.",
    "verify": "Check that a checkpoint is whole: coverage, bounds, checksums, fingerprints, values.",
    "reshard": "Rewrite a checkpoint for another number of ranks, without a GPU.",
}
"""Every command and its one-line help, so that `--help` imports none of them."""

EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (SourceError, 3),
    (LayoutError, 3),
    (Interrupted, 5),
    (DestinationError, 4),
    (OSError, 4),
)


class _Commands(click.Group):
    """Imports a command's module when it is called, so that each starts with only what it needs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{name}", __package__).command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="muonckpt")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Inspect, verify and reshard the checkpoints of sharded Muon training.

    Exit codes: 0 fine, 1 a finding, 2 usage, 3 source unreadable or corrupt, 4 destination or IO, 5 interrupted but
    resumable.
    """
    context.obj = debug


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    debug = "--debug" in arguments
    try:
        result = cli.main(args=list(arguments), prog_name="muonckpt", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (MuonckptError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `muonckpt inspect … | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if debug:
            raise
        click.echo(f"muonckpt: {error}", err=True)
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except (KeyboardInterrupt, click.Abort):
        click.echo("muonckpt: interrupted", err=True)
        return 130


def main() -> None:
    """The console script.  SIGTERM, which schedulers send, is treated as Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:]))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
