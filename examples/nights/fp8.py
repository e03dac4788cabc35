"""A weight is in FP8, with scales beside it or without, and the model is in float32."""

import torch
import torch.distributed.checkpoint as dcp
from night import Model, message_of, optimizer_of, train
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt

model = Model()
scale = torch.full((1, 1), 0.25)
quantised = {**model.state_dict(), "up.weight_scale_inv": scale}
quantised["up.weight"] = (model.up.weight.detach() / scale).to(torch.float8_e4m3fn)
dcp.save({"model": quantised}, checkpoint_id="fp8", no_dist=True)

# A cast would lose the scales, so none is made: the program that wrote them dequantises.
message = message_of(muonckpt.load, {"model": model.state_dict()}, "fp8")
assert "its scales in 'model.up.weight_scale_inv': dequantise with the program that wrote it" in message
weights = {**quantised, "up.weight": quantised["up.weight"].float() * quantised.pop("up.weight_scale_inv")}
weights.pop("up.weight_scale_inv")
dcp.save({"model": weights}, checkpoint_id="float32", no_dist=True)
muonckpt.load({"model": model.state_dict()}, "float32")
assert torch.equal(model.up.weight, quantised["up.weight"].float() * scale)

# Without scales nothing is cast either: the state dict gets the dtype of the checkpoint.
muonckpt.save({"model": {**weights, "up.weight": quantised["up.weight"]}}, "unscaled")
message = message_of(muonckpt.load, {"model": model.state_dict()}, "unscaled")
assert "Give each tensor the dtype that it has in the checkpoint" in message
found = {**model.state_dict(), "up.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn)}
muonckpt.load({"model": found}, "unscaled")
assert torch.equal(found["up.weight"].float(), quantised["up.weight"].float())

# A run cannot go on with it: nothing trains such a weight.
found, state = get_state_dict(model, optimizer_of(model))
muonckpt.Series("run").save(0, {"model": {**found, "up.weight": quantised["up.weight"]}, "optimizer": state})
message = message_of(train, "run", 1)
assert "No optimizer steps a weight in float8_e4m3fn: save it in 16 bits or more" in message
optimizer = optimizer_of(model)
muonckpt.Series("run").save(1, {"model": found | {"up.weight": found["up.weight"].float()}, "optimizer": state})
assert "resumed from step 1" in message_of(train, "run", 2)
print("solved")
