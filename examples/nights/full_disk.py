"""The disk is full when a step is saved."""

import resource
import signal

from night import begin, follow, message_of, solved, train

begin()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
message = message_of(train, "run")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # there is space again
signal.signal(signal.SIGXFSZ, former)

assert "nothing was published: free space" in message
assert "newest whole  step-00000002" in follow("muonckpt verify run")
assert "resumed from step 2" in message_of(train, "run", 4)
solved(train("run"))
