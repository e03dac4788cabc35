"""Quantised weights, codes with scales beside them, are named as such, and are no numbers for any command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.commands import called

import muonckpt

FP8, U8, I8, I32 = torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32
ONE = (1, 1)

FORMS: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    "DeepSeek": {"l.weight": (FP8, (4, 8)), "l.weight_scale_inv": (torch.float32, ONE)},
    "compressed-tensors": {"l.weight": (FP8, (4, 8)), "l.weight_scale": (torch.bfloat16, (4, 1))},
    "packed": {"l.weight_packed": (I32, (4, 1)), "l.weight_scale": (torch.bfloat16, (4, 1))},
    "alone": {"l.weight": (FP8, (4, 8)), "l.scale": (torch.float32, ())},
    "ModelOpt's NVFP4": {
        "l.weight": (U8, (4, 4)), "l.weight_scale": (FP8, (4, 1)), "l.weight_scale_2": (torch.float32, ()),
    },
    "Mistral": {"l.weight": (FP8, (4, 8)), "l.qscale_weight": (torch.float32, ())},
    "experts": {"l.gate_up_proj": (FP8, (2, 4, 8)), "l.gate_up_proj_scale_inv": (torch.float32, (2, 1, 1))},
    "MXFP4": {"l.gate_up_proj_blocks": (U8, (2, 4, 1, 4)), "l.gate_up_proj_scales": (U8, (2, 4, 1))},
    "GPTQ": {"l.qweight": (I32, (1, 8)), "l.scales": (torch.float16, (1, 8)), "l.qzeros": (I32, (1, 1))},
    "bitsandbytes, 8 bits": {"l.weight": (I8, (4, 8)), "l.SCB": (torch.float32, (4,)), "l.weight_format": (U8, ())},
    "bitsandbytes, 4 bits": {
        "l.weight": (U8, (16, 1)), "l.weight.absmax": (torch.float32, (1,)),
        "l.weight.quant_map": (torch.float32, (16,)),
    },
    "torchao": {"l._weight_qdata": (FP8, (4, 8)), "l._weight_scale": (torch.float32, (4, 1))},
    "quanto": {"l.weight._data": (I8, (4, 8)), "l.weight._scale": (torch.float32, (4, 1))},
}  # fmt: skip
"""The tensors of a layer, as programs store it: the codes come first, and their scales after them."""

PLAIN = {
    "a mask and a scale": {"l.mask": (U8, (4, 4)), "l.scale": (torch.float32, (4,))},
    "codes alone": {"l.weight": (FP8, (4, 8))},
    "the scale of another layer": {"l.weight": (FP8, (4, 8)), "m.weight_scale_inv": (torch.float32, ONE)},
    "a norm": {"l.weight": (torch.bfloat16, (4, 8)), "l.scale": (torch.float32, (4,))},
    "counters": {"l.num_batches": (I32, ()), "l.scale": (torch.float32, (4,))},
}


def layer(form: dict[str, tuple[torch.dtype, tuple[int, ...]]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in form.items():
        words = torch.randint(1, 100, shape, generator=generator)
        tensors[name] = words.to(U8).view(dtype) if dtype is FP8 and shape else words.to(dtype)
    return tensors


@pytest.mark.parametrize("kind", FORMS)
def test_codes_are_named_with_their_scales_and_never_measured_or_compared_as_numbers(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes, scales = list(FORMS[kind])[:2]
    for seed in (0, 1):
        save_file(layer(FORMS[kind], seed), f"{seed}.safetensors")
    told = f"1 quantised weight, such as {codes!r} with its scales in {scales!r}"
    assert muonckpt.inspect("0.safetensors").quantised == {codes: scales}
    assert told in called("inspect", "0.safetensors").stdout
    figures = muonckpt.stats("0.safetensors")
    assert figures.quantised == {codes: scales} and codes not in {tensor.key for tensor in figures.tensors}
    assert f"not measured: {told}" in called("stats", "0.safetensors").stdout
    difference = muonckpt.diff("0.safetensors", "1.safetensors", rtol=1e9)
    [of_codes] = [tensor for tensor in difference.tensors if tensor.key == codes]
    assert (of_codes.status, of_codes.by) == ("changed", "bits")
    assert of_codes.to_json()["changed"] > 0 and of_codes.to_json()["norm_a"] is None
    assert f"{told}: compared bit by bit, not as numbers" in called("diff", "0.safetensors", "1.safetensors").stdout
    same = muonckpt.diff("0.safetensors", "0.safetensors")
    assert not same.differs


@pytest.mark.parametrize("kind", PLAIN)
def test_what_has_no_scales_of_its_own_is_measured(kind, tmp_path):
    save_file(layer(PLAIN[kind]), tmp_path / "a.safetensors")
    assert muonckpt.inspect(tmp_path / "a.safetensors").quantised == {}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("allow_extra", [False, True])
def test_a_load_says_that_they_are_quantised_and_advises_no_cast(kind, allow_extra, tmp_path):
    save_file(layer(FORMS[kind]), tmp_path / "a.safetensors")
    codes, scales = list(FORMS[kind])[:2]
    template = {"l.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}
    with pytest.raises(muonckpt.SourceError) as refused:
        muonckpt.load(template, tmp_path / "a.safetensors", allow_extra=allow_extra)
    told = str(refused.value)
    assert f"such as {codes!r} with its scales in {scales!r}: dequantise with the program that wrote it" in told
    assert not re.search(r"\.to\(|fresh|allow_extra|grow", told) and len(told.split()) <= 60
    assert not template["l.weight"].any()


def test_codes_are_loaded_into_codes(tmp_path):
    saved = layer(FORMS["DeepSeek"])
    save_file(saved, tmp_path / "a.safetensors")
    template = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    muonckpt.load(template, tmp_path / "a.safetensors")
    assert all(torch.equal(template[name].view(U8), saved[name].view(U8)) for name in saved)


def test_codes_without_scales_are_not_cast_either(tmp_path):
    muonckpt.save({"w": layer(PLAIN["codes alone"])["l.weight"]}, tmp_path / "c")
    with pytest.raises(muonckpt.SourceError, match=r"Give each tensor the dtype that it has in the checkpoint$"):
        muonckpt.load({"w": torch.zeros(4, 8)}, Path(tmp_path / "c"))
