"""A weight is in FP8 with scales beside it, and the model is in float32."""

import torch
import torch.distributed.checkpoint as dcp
from night import Model, message_of

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
print("solved")
