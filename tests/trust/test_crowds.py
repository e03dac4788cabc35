"""Several processes at one checkpoint, and signals at random moments: what is published is whole, or there is an error.

A series that is pruned while others read it is in the suite in tests/checkpoint/test_series.py, too.
"""

from __future__ import annotations

from support import crowds, trials
from support.trials import SCALE, count

IN_SUITE = ("a source that changes", "two saves")


def test_crowds_tear_nothing_and_leave_nothing(tmp_path):
    names = IN_SUITE if SCALE == 0 else tuple(crowds.CROWDS)
    told = trials.script(crowds.__file__, tmp_path / "crowds", count(2, 40), *names)
    assert trials.tallied("crowds", told) == {*names}
