"""A script: the command line, in which one worker strikes itself with a signal while it writes its files.

    struck.py NUMBER RANK COMMAND...

When worker RANK is about to make its second file in the staging directory, it gets the signal; where a launcher starts
the workers again, only the first time.  The thread that writes goes no further than the signal allows.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from muonckpt.cli.main import main


def strike(number: int, names: list[str]) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and ".tmp/__" in str(arguments[0]):
            names.append(str(arguments[0]))
            if len(names) == 2:
                signal.pthread_kill(threading.get_ident(), number)  # the process's others might let this one go on
                if number in (signal.SIGINT, signal.SIGTERM):
                    time.sleep(3)  # Python handles it in the main thread, which looks five times a second

    sys.addaudithook(hook)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    number, rank = sys.argv.pop(1), sys.argv.pop(1)
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        strike(int(number), [])
    main()
