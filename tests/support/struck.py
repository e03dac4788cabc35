"""A script: the command line, in which one worker strikes itself with a signal while it writes its files.

    struck.py NUMBER RANK COMMAND...

When worker RANK is about to give its second file its name in the staging directory, it gets the signal; where a
launcher starts the workers again, only the first time.
"""

from __future__ import annotations

import os
import sys

from muonckpt.cli.main import main


def strike(number: int, names: list[str]) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and ".out.reshard.tmp/__" in str(arguments[1]):
            names.append(str(arguments[1]))
            if len(names) == 2:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)


if __name__ == "__main__":
    number, rank = sys.argv.pop(1), sys.argv.pop(1)
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        strike(int(number), [])
    main()
