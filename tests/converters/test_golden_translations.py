"""Real checkpoints of every program in the words of every other have the tensors and options that were recorded.

Run this file to record them again, and look at each line that changes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import muonckpt
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.names.errors import MuonckptError, SourceError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.golden import GOLDEN

RECORDED = GOLDEN.parent / "golden_translations.json"

QKV = NameRules(
    (NameRule(("{p*}.qkv.weight",), ("{p*}.q.weight", "{p*}.k.weight", "{p*}.v.weight"), shares=(3, 1, 1)),)
)

REQUESTS = {
    **{f"to {name}": {"to_dialect": name} for name in ("muonckpt", "torch", "dion", "titan", "xtuner", "veomni",
                                                       "deepspeed", "fsdp_dtensor", "torch_dist_chained")},
    "flat keys": {"to_dialect": "muonckpt", "keys": "flat"},
    "split, as it is": {"rules": QKV},
    "split, to ours": {"rules": QKV, "to_dialect": "muonckpt"},
    "halves, to ours": {"to_dialect": "muonckpt", "rules": "megatron-swiglu"},
    "a sum": {"to_dialect": "fsdp_dtensor", "target_convention": "sum", "mu": 0.95},
    "rounded": {"to_dialect": "muonckpt", "state_dtype": "bfloat16"},
    "weights alone": {"to_dialect": "titan", "model_only": True},
}  # fmt: skip


AVERAGE = {"convention": "ema"}
MASTERS = {**AVERAGE, "weights": "masters", "step": 10}
SOURCES = {
    "dion_fsdp4/ckpt": {},
    "titan_fsdp4/ckpt": {},
    "torch_fsdp4/ckpt": {},
    "torch_hsdp2x2/ckpt": {},
    "xtuner_fsdp4/ckpt": {},
    "upstream/xtuner_interleaved_fsdp2_ep1_etp2/ckpt": {},
    "upstream/titan_torch_checkpointing/ckpt": {},
    "torch_checkpointing/ckpt": {},
    "deepspeed_bf16/global_step3": {},
    "deepspeed_zero1/global_step3": {},
    "deepspeed_zero2/global_step2": {},
    "deepspeed_zero2/global_step3": {},
    "deepspeed_zero3/global_step3": {},
    "megatron/fsdp_dtensor/dp4/iter_0000010": AVERAGE,
    "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010": AVERAGE,
    "megatron/layer_wise/ws4_padded/torch_dist": MASTERS,
    "megatron/layer_wise/ws4_pingpong/torch_dist": MASTERS,
    "upstream/fsdp_dtensor_mla_mtp/ckpt": AVERAGE,
    "upstream/mfsdp_v1_chained_muon_adam/ckpt": AVERAGE,
    "upstream/mfsdp_v2_dcp_muon_adam_nostep/ckpt": {**AVERAGE, "step": 10},
    "upstream/torch_dist_muon_lion/ckpt": MASTERS,
}
"""The checkpoints, with what they do not say of themselves."""


def digest(lines: Iterator[str]) -> str:
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def tensors_of(checkpoint: muonckpt.OpenCheckpoint) -> Iterator[str]:
    for tensor in checkpoint.manifest.tensors:
        bits = sha256(checkpoint.tensors[tensor.key].bits().tobytes()).hexdigest()
        yield f"{tensor.key} {tensor.dtype} {tensor.shape} {tensor.slot} {tensor.convention} {bits}"


def options_of(checkpoint: muonckpt.OpenCheckpoint) -> Iterator[str]:
    for key in checkpoint.items:
        try:
            yield f"{key} {checkpoint.items[key]!r}"
        except SourceError:
            yield f"{key} is no plain data"


def found(source: str) -> dict[str, list[str]]:
    """The digests of tensors and of options that each request makes of a checkpoint; or the error's class."""
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (request, choices) in enumerate(REQUESTS.items()):
            made = Path(folder) / str(number)
            try:
                muonckpt.convert(GOLDEN / source, made, **grouped(**SOURCES[source], **choices))
                with muonckpt.open(made) as checkpoint:
                    digests[request] = [digest(tensors_of(checkpoint)), digest(options_of(checkpoint))]
            except MuonckptError as error:
                digests[request] = [type(error).__name__]
    return digests


@pytest.mark.parametrize("source", SOURCES)
def test_tensors_and_options_are_those_that_were_recorded(source):
    assert found(source) == json.loads(RECORDED.read_text())[source]


if __name__ == "__main__":
    recorded = {source: found(source) for source in SOURCES}
    lines = ",\n".join(f"{json.dumps(source)}: {json.dumps(digests)}" for source, digests in recorded.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")
