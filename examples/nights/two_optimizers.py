"""The run was saved by stock DCP with two optimizers, torch.optim.Muon and AdamW; the new job has one."""

import torch
import torch.distributed.checkpoint as dcp
from night import Model, follow, message_of, optimizer_of
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt

model = Model()
others = [weight for weight in model.parameters() if weight is not model.up.weight]
two = [torch.optim.Muon([model.up.weight], lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
model(torch.arange(12)).square().mean().backward()
for optimizer in two:
    optimizer.step()
weights, muon = get_state_dict(model, two[0])
_, adamw = get_state_dict(model, two[1])
dcp.save({"model": weights, "muon": muon, "adamw": adamw}, checkpoint_id="old", no_dist=True)

new = Model()
found, state = get_state_dict(new, optimizer_of(new))
message = message_of(muonckpt.load, {"model": found, "optimizer": state}, "old")
follow(message, NEW="converted")
message_of(muonckpt.load, {"model": found, "optimizer": state}, "converted")
for name, slots in {**muon["state"], **adamw["state"]}.items():
    assert torch.equal(found[name], weights[name])
    assert all(torch.equal(state["state"][name][slot], value) for slot, value in slots.items())
print("solved")
