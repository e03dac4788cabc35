"""The step from which the job was resumed has vanished: a script that cleans up has removed its folder."""

import shutil

from night import begin, follow, message_of, solved, train

step = begin()
train("run", 3)  # a resume, which is recorded
shutil.rmtree(step)

# The record names the step.  The one before is whole, so the job goes on from it and makes the step again.
message = follow("muonckpt verify run")
assert "newest whole  step-00000001" in message and "missing" in message and "step 2" in message
assert "resumed from step 1" in message_of(train, "run", 4)
solved(train("run"))
