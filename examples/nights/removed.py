"""The run removes an old step while another program reads it."""

import torch
from night import begin, message_of, solved, train

import muonckpt

step = begin()
with muonckpt.open(step) as opened:
    train("run", keep_last=1)
    message = message_of(lambda: opened.tensors["model.up.weight"].numpy())

# That is no damage: the message says that it was removed, and to open a newer one.
assert "was removed while it was read. Open the newest whole step" in message
with muonckpt.open("run/step-00000004") as opened:
    found = torch.tensor(opened.tensors["model.up.weight"].numpy())
weights = train("run")
assert any(torch.equal(found, weight) for weight in weights)
solved(weights)
