"""torchrun starts two processes, and the script was written for one: each would save for itself, over the other."""

import os
from pathlib import Path

import torch.distributed as dist
from night import begin, message_of, solved, train

begin()
launched = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
os.environ.update(launched)
message = message_of(train, "run", 4)
for name in launched:
    del os.environ[name]

# The message has the line to write; then any number of processes goes on with what one saved.
assert "call torch.distributed.init_process_group() at the start" in message and "resumed" not in message
meeting = Path("ranks").absolute().as_uri()
other = os.fork()
dist.init_process_group("gloo", init_method=meeting, rank=0 if other else 1, world_size=2)
weights = train("run")
dist.destroy_process_group()
if not other:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
solved(weights)
