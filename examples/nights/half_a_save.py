"""The job was killed in the middle of a save."""

import os
from pathlib import Path

from night import begin, follow, message_of, solved, train

begin()
if not (job := os.fork()):
    # It ends in the moment before the step appears.
    os.rename = os.replace = lambda *places, **options: os._exit(9)
    train("run", 4)
assert os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) == 9
assert any(entry.name.startswith(".step-00000003") for entry in Path("run").iterdir())

# A step appears whole or not at all: the one before is the newest, and the job goes on from it.
assert "newest whole  step-00000002" in follow("muonckpt verify run")
assert "resumed from step 2" in message_of(train, "run", 4)
assert not [entry for entry in Path("run").iterdir() if entry.name.endswith(".tmp")]
solved(train("run"))
