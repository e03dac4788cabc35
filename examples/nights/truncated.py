"""The data file of the newest step was cut."""

import os

from night import begin, follow, message_of, solved, train

step = begin()
os.truncate(step / "__0_0.distcp", 30_000)

# The job goes on from the step before by itself, and the warning has the command for the cut one.
message = message_of(train, "run", 2)
assert "is cut short" in message and "resumed from step 1" in message
assert "start the job again\n    it resumes from step-00000001" in follow(message)

# When the job has come past that step, the same command says where the step is.
weights = train("run")
assert "that step was saved again as" in follow(message)
solved(weights)
