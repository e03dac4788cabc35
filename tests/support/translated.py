"""Translations carried out, and what must come of them: by means that are not those under test."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import muonckpt
from muonckpt.converters.engine.outputs import Outputs, OutputTensor, scaled
from muonckpt.converters.translate import translator
from muonckpt.converters.translate.request import Request
from muonckpt.programs.registry import DIALECTS
from muonckpt.record.record import Blob
from muonckpt.store.formats.torch_save.plain_item import plain_value
from muonckpt.store.reading.payloads import chunk_elements
from support.golden import golden

PEERS = {"torch": "torch_fsdp4", "dion": "dion_fsdp4", "xtuner": "xtuner_fsdp4", "titan": "titan_fsdp4",
         "torch on hsdp": "torch_hsdp2x2"}  # fmt: skip
TARGETS = ("torch", "veomni", "titan", "dion", "xtuner", "muonckpt", "dcp")

# What each program calls the state, written down once more and not taken from the tables under test.
MOMENTUM = {"dion": "momentum", "xtuner": "momentum"}
FIRST = MOMENTUM
SECOND = {"dion": "variance", "xtuner": "variance"}
SUMS = {"dion", "xtuner"}
FLAT = {"titan", "veomni"}
MEGATRON = "megatron/fsdp_dtensor/{}/iter_0000010"


opened = cache(muonckpt.open)


def read(name: str):
    path = golden(name)
    return path, opened(path).manifest


def translate(manifest, values, target=None, **options) -> Outputs:
    return translator.translate(manifest, values, Request(target=target, **options))


def translated(name: str, target: str, **options) -> Outputs:
    path, manifest = read(name)
    return translate(manifest, opened(path).values, DIALECTS[target], **options)


def constants(outputs: Outputs) -> list[OutputTensor]:
    """The tensors that are made of elements that the source does not have."""
    places = {tensor.chunks.place for tensor in outputs.constants}
    return [output for output in outputs.tensors if output.sources[0].place in places]


def executed(path, outputs: Outputs) -> dict[str, np.ndarray]:
    """Every target tensor as unsigned words, moved by following the layouts, an element at a time."""
    tensors = (*opened(path).manifest.tensors, *outputs.constants)
    owners = {chunk: tensor for tensor in tensors for chunk in tensor.chunks}
    results = {}
    with opened(path).payloads as payloads:
        for output in outputs.tensors:
            itemsize = getattr(torch, output.record.dtype).itemsize
            out = np.zeros(output.record.shape, f"<u{itemsize}")
            is_filled = np.zeros(output.record.shape, bool)
            for fragment in output.layout.fragments:
                source, number = output.locate(fragment.place.buffer)
                chunk = source[number]
                assert owners[chunk].dtype == output.record.dtype
                words = chunk_elements(payloads, owners[chunk], chunk).reshape(-1)
                for index in np.ndindex(*fragment.box.shape):
                    at = sum(i * stride for i, stride in zip(index, fragment.place.strides, strict=True))
                    whole_index = tuple(lo + i for lo, i in zip(fragment.box.lo, index, strict=True))
                    assert not is_filled[whole_index]
                    is_filled[whole_index] = True
                    out[whole_index] = words[fragment.place.offset + at]
            assert is_filled.all()
            results[output.key] = scaled(out, output.record.dtype, output.scale) if output.scale else out
    return results


@cache
def truth_of(folder: str) -> dict[str, np.ndarray]:
    """The tensors of the safetensors file beside a checkpoint, as words."""
    data = (golden(folder) / "truth.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    results = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            lo, hi = (start + offset for offset in entry["data_offsets"])
            words = {"F32": "<u4", "BF16": "<u2", "U8": "<u1", "I64": "<u8"}[entry["dtype"]]
            results[name] = np.frombuffer(data[lo:hi], words).reshape(entry["shape"])
    return results


def expected(folder: str, target: str) -> dict[str, np.ndarray]:
    """What the run had in memory, under the target's keys and in its convention."""
    meta = json.loads((golden(folder) / "meta.json").read_text())
    slots, mu = meta["slots"], meta["momentum"]["mu"]
    was, becomes = meta["momentum"]["convention"], "sum" if target in SUMS else "ema"
    becomes = was if target == "dcp" else becomes
    out = {}
    for name, words in truth_of(folder).items():
        kind, _, name_rest = name.partition("/")
        if kind == "param":
            out[name_rest if target == "titan" else f"model.{name_rest}"] = words
            continue
        param, slot = name_rest.rsplit("/", 1)
        entry = next(p for p in meta["params"] if p["name"] == param)
        if entry["group"] == "muon":
            values = words.view("<f4").astype(np.float64)
            if was != becomes:
                values = values * (1 - mu) if becomes == "ema" else values / (1 - mu)
            out[f"optimizer.state.{param}.{MOMENTUM.get(target, 'momentum_buffer')}"] = values.astype("<f4").view("<u4")
        elif slot == slots["adamw"]["first"]:
            out[f"optimizer.state.{param}.{FIRST.get(target, 'exp_avg')}"] = words
        elif slot == slots["adamw"]["second"]:
            out[f"optimizer.state.{param}.{SECOND.get(target, 'exp_avg_sq')}"] = words
    if target != "xtuner":
        step = np.array(meta["steps"], "<f4").view("<u4")
        for entry in meta["params"]:
            if entry["group"] == "adamw":
                out[f"optimizer.state.{entry['name']}.{'step_dev' if target == 'dion' else 'step'}"] = step
    return out


def words_apart(a: np.ndarray, b: np.ndarray) -> int:
    """The most that two arrays of float32 words are apart, in steps of the representation."""

    def ordered(words):
        signed = words.view("<i4").astype(np.int64)
        return np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)

    return int(np.abs(ordered(a) - ordered(b)).max(initial=0))


def saved(tmp_path, state):
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return muonckpt.open(tmp_path / "checkpoint").manifest, tmp_path / "checkpoint"


# The options of a group of torch.optim.Muon, without its rates.
TORCH = {
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_coefficients": [1.5, -0.5, 0.0],
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
TORCH |= {"lr": 0.1, "momentum": 0.95}

W = torch.arange(6.0).reshape(2, 3)


def nested(slots, **group) -> dict:
    return {"model": {"w": W}, "optimizer": {"state": {"w": slots}, "param_groups": [{"params": ["w"], **group}]}}


def options(outputs: Outputs) -> dict[str, object]:
    """The options that are written anew."""
    return {item.key: plain_value(item.data) for item in outputs.items if item.source is None}


def copied(outputs: Outputs) -> dict[str, Blob]:
    """The items that are copied as they are."""
    return {item.key: item.source for item in outputs.items if item.source is not None}
