"""The table of what was tried, at the end of `make trust`."""

from __future__ import annotations

import pytest
from support.trials import SCALE, TALLIES, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SCALE and TALLIES:
        terminalreporter.write_line("\n".join(["", *table(), ""]))
