"""torchrun starts two processes, and the script was written for one: each would save for itself, over the other."""

import os
import subprocess
import sys
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
RANK = "import sys, torch.distributed as dist, night; dist.init_process_group('gloo', init_method=sys.argv[1], rank=1, "
RANK += "world_size=2); night.train('run')"
meeting = Path("ranks").absolute().as_uri()
other = subprocess.Popen([sys.executable, "-c", RANK, meeting])
dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=2)
weights = train("run")
dist.destroy_process_group()
assert other.wait() == 0
solved(weights)
