"""muonckpt.save and muonckpt.load move live tensors exactly on any mesh, all or nothing, and pass nothing over."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import sweep
from support.every_kind import assert_same_bits, snapshot
from support.failing import full_disk
from support.fsdp_model import build, steps
from support.golden import golden
from support.manifest_json import manifest_at, put
from support.workers import run
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import DestinationError, LayoutError, SourceError
from muonckpt.record.record import Manifest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype and of every number of dims, with uneven and empty shards among them."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (13, 5, dtype.itemsize), generator=generator)
        tensors[f"{dtype}".removeprefix("torch.")] = raw.to(torch.uint8).view(dtype).reshape(13, 5)
    tensors |= {
        "cube": torch.randn(3, 4, 5, generator=generator),
        "vector": torch.randn(7, generator=generator),
        "row": torch.randn(1, 9, generator=generator),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
    }
    return tensors


def distribute(values: dict[str, torch.Tensor], mesh_shape: tuple[int, ...], dim: int) -> dict[str, torch.Tensor]:
    """Shard tensors along ``dim`` (or their last dim) on the last axis of a mesh, and replicate them on the others."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1)

    def place(value):
        return distribute_tensor(value, mesh, [*placements, Shard(min(dim, value.ndim - 1))], src_data_rank=None)

    return {name: place(value) if value.ndim else value for name, value in values.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return local.reshape(-1).contiguous().view(torch.uint8)


def local_tensors(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the shards of this rank: float8 has no collectives on gloo, so that a test compares these."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in values.items()}


def save_job(rank, world, path, mesh_shape, dim):
    state = {"t": distribute(tensors(), mesh_shape, dim), "hyper": {"lr": 0.5, "betas": (0.9, 0.95)}}
    muonckpt.save(state, path, provenance={"step": 7})


def load_job(rank, world, path, mesh_shape, dim, stock):
    expected = distribute(tensors(), mesh_shape, dim)
    blank = {name: torch.zeros_like(value) for name, value in expected.items()}
    state = {"t": blank, "hyper": {"lr": 0.0, "betas": None}}
    if stock:
        dcp.load(state, checkpoint_id=path)
    else:
        muonckpt.load(state, path)
    assert state["hyper"] == {"lr": 0.5, "betas": (0.9, 0.95)}
    for name, value in local_tensors(state["t"]).items():
        assert torch.equal(bits(value), bits(local_tensors(expected)[name])), name


SOURCES = [((1,), 0), ((4,), 0), ((3,), 1), ((2, 2), 0)]


@pytest.mark.parametrize(("shape", "dim"), sweep(SOURCES, *SOURCES[2:]), ids=str)
def test_any_mesh_to_any_mesh_bit_for_bit_also_for_stock_dcp(shape, dim, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(torch.Size(shape).numel(), save_job, path, shape, dim)
    for target, stock in [((1,), True), ((1,), False), ((4,), False), ((3,), False), ((2, 2), False), ((4,), True)]:
        for to_dim in (0, 1) if target == (3,) else (0,):
            run(torch.Size(target).numel(), load_job, path, target, to_dim, stock)


def test_fingerprints_do_not_depend_on_the_mesh(tmp_path):
    actual = []
    for number, (shape, dim) in enumerate([((1,), 0), ((4,), 0), ((3,), 1), ((2, 2), 0)]):
        path = tmp_path / str(number)
        run(torch.Size(shape).numel(), save_job, str(path), shape, dim)
        manifest = muonckpt.open(path).outline
        assert manifest.provenance["step"] == 7
        actual.append({tensor.key: tensor.fingerprint for tensor in manifest.tensors})
    assert all(prints == actual[0] for prints in actual) and None not in actual[0].values()


def test_an_empty_shard_writes_nothing_and_replicas_are_written_once(tmp_path):
    run(4, save_job, str(tmp_path / "c"), (4,), 0)
    chunks = {t.key: [chunk.item.file for chunk in t.chunks] for t in muonckpt.open(tmp_path / "c").outline.tensors}
    assert chunks["t.row"] == ["__0_0.distcp"] and chunks["t.none"] == [] and len(chunks["t.scalar"]) == 1
    assert len(chunks["t.float32"]) == 4


@pytest.mark.parametrize("stock", [False, True])
def test_small_tensors_between_large_ones_are_written_bit_for_bit(stock, tmp_path):
    # Small ones of all dtypes fill several megabytes; among them are views, and now and then a tensor of many bands.
    state = {}
    for number in range(120):
        generator = torch.Generator().manual_seed(number)
        for name, value in tensors().items():
            state[f"{name}.{number}"] = value.roll(number, 0) if value.ndim else value + number
        complex_values = torch.randn(6, 3, dtype=torch.complex64, generator=generator)
        state[f"conjugate.{number}"] = complex_values.conj()
        state[f"negative.{number}"] = complex_values.conj().imag
        state[f"columns.{number}"] = torch.randn(5, 8, generator=generator).t()[1:]
        if number % 50 == 0:
            state[f"large.{number}"] = torch.randn(700, 601, generator=generator)
    muonckpt.save(state, tmp_path / "c")
    blank = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    if stock:
        dcp.load(blank, checkpoint_id=tmp_path / "c")
    else:
        assert muonckpt.attest(state, tmp_path / "c").compared == len(state)
        muonckpt.load(blank, tmp_path / "c", check="before")
    for name, value in state.items():
        assert torch.equal(bits(blank[name]), bits(value.resolve_conj().resolve_neg())), name


# --- the optimizer's state ----------------------------------------------------------------------------------------


def resume_job(rank, world, path, saves):
    """Train four steps and save after two, or load and train the last two; return a snapshot at the end."""
    net, opt = build()
    if saves:
        steps(net, opt, 0, 2)
        model, state = get_state_dict(net, opt)
        muonckpt.save({"model": model, "optimizer": state}, path)
        steps(net, opt, 2, 4)
    else:
        model, state = get_state_dict(net, opt)
        template = {"model": model, "optimizer": state}
        muonckpt.load(template, path)
        set_state_dict(net, opt, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
        steps(net, opt, 2, 4)
    return snapshot(list(net.parameters()), opt)


def test_resume_is_the_uninterrupted_run_and_state_is_annotated(tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = run(4, resume_job, path, True)
    for uninterrupted, actual in zip(expected, run(4, resume_job, path, False), strict=True):
        assert_same_bits(actual, uninterrupted)
    # The manifest says what each state is.
    tensors = {(t.name, t.slot): t for t in muonckpt.open(Path(path)).outline.tensors}
    momentum = tensors["unused.weight", "momentum_buffer"]
    assert momentum.convention == "ema" and momentum.layout["placements"] == ["Shard(0)"]
    assert tensors["unused.bias", "step"].convention is None


# --- refusals: nothing is touched, and all ranks hear of it ---------------------------------------------------------


def plain(**changes):
    return {"w": torch.arange(12.0).reshape(4, 3), "v": torch.ones(5), **changes}


@pytest.fixture
def saved(tmp_path):
    muonckpt.save({"s": plain(), "lr": 0.1}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def zeros(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["s"].update(extra=torch.ones(2)), "missing key 's.extra'"),
        (lambda t: t["s"].pop("v"), "extra key 's.v'"),
        (lambda t: t["s"].update(v=torch.zeros(6)), r"'s\.v' has shape \(5,\), expected \(6,\)"),
        (lambda t: t["s"].update(v=torch.zeros(5, dtype=torch.float16)), r"'s\.v' is float32, expected float16"),
        (lambda t: t["s"].update(v=3), r"'s\.v' is a tensor in the checkpoint.*Give 's\.v' as it was saved, a tensor"),
        (
            lambda t: t.update(lr=torch.ones(1)),
            "'lr' is no tensor in the checkpoint.*Give 'lr' as it was saved, no tensor",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_refused_before_anything_is_touched(change, message, saved):
    template = {"s": zeros(plain()), "lr": 0.0}
    change(template)
    with pytest.raises(SourceError, match=message):
        muonckpt.load(template, saved)
    assert not any(
        value.any() for value in template["s"].values() if isinstance(value, torch.Tensor) and value.numel() > 2
    )


def test_extra_keys_can_be_allowed(saved):
    template = {"s": {"v": torch.zeros(5)}}
    muonckpt.load(template, saved, allow_extra=True)
    assert torch.equal(template["s"]["v"], torch.ones(5))


def edit(path, change):
    """Edit the manifest as JSON."""
    data = manifest_at(path / "muonckpt.json")
    change({tensor["key"]: tensor for tensor in data["tensors"]})
    put(path / "muonckpt.json", data)


def test_a_template_may_have_nothing_where_items_go(tmp_path):
    def state(value, lr, params):
        momentum = torch.full((2, 3), value)
        return {
            "optimizer": {"state": {"w": {"momentum_buffer": momentum}}, "param_groups": [{"lr": lr, "params": params}]}
        }

    muonckpt.save(state(1.0, 0.5, ["w"]), tmp_path / "ckpt")
    loaded = state(0.0, None, None)
    muonckpt.load(loaded, tmp_path / "ckpt")
    assert str(loaded) == str(state(1.0, 0.5, ["w"]))


def test_a_hole_in_the_checkpoint_is_an_error_naming_tensor_and_box(saved):
    edit(saved, lambda tensors: tensors["s.w"].update(shape=[6, 3]))
    with pytest.raises(LayoutError, match=r"s\.w.*no buffer holds box \[4:6, 0:3\]"):
        muonckpt.load({"s": {"w": torch.zeros(6, 3)}}, saved, allow_extra=True)


def test_a_list_that_parameters_had_in_common_is_loaded_for_each(tmp_path):
    def state(marks: list[float]) -> dict:
        momenta = {f"state.{name}.momentum_buffer": torch.ones(2) for name in "ab"}
        return {"optimizer": momenta | {f"param_groups.{name}.marks": [*marks] for name in "ab"}}

    muonckpt.save(state([1.0, 2.0]), tmp_path / "c")
    template = state([0.0, 0.0])
    muonckpt.load(template, tmp_path / "c")
    template["optimizer"]["param_groups.a.marks"].append(3.0)
    assert template["optimizer"]["param_groups.b.marks"] == [1.0, 2.0]


def test_another_momentum_convention_is_refused(tmp_path):
    net, opt = torch.nn.Linear(3, 4, bias=False), None
    opt = muonckpt.optimizer.Muon(net.parameters())
    _, state = get_state_dict(net, opt)
    muonckpt.save({"optimizer": state}, tmp_path / "c")
    edit(tmp_path / "c", lambda tensors: tensors["optimizer.state.weight.momentum_buffer"].update(convention="sum"))
    with pytest.raises(SourceError, match="convention sum, expected ema"):
        muonckpt.load({"optimizer": state}, tmp_path / "c")


def test_no_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(SourceError, match="no directory"):
        muonckpt.load({}, tmp_path / "nothing")
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(SourceError, match=r"weights.safetensors does not fit the state dict: extra key 'a'") as refusal:
        muonckpt.load({}, tmp_path / "weights.safetensors")
    assert "convert" not in str(refusal.value)  # weights that are left over do not tell another program


class Bomb:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_stored_object_is_not_run(tmp_path):
    dcp.save({"x": Bomb(tmp_path / "ran")}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(SourceError, match=r"refused 'x'.*more than plain data \(.*builtins.getattr"):
        muonckpt.load({"x": 1}, tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_a_stock_checkpoint_loads_checked(tmp_path):
    path = golden("torch_fsdp4")
    manifest = muonckpt.open(path / "ckpt").manifest
    # Load with torch, into flat keys.
    template = {}
    for tensor in manifest.tensors:
        template[tensor.key] = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
    flat = dict(template)
    dcp.load(flat, checkpoint_id=path / "ckpt", no_dist=True)
    # Load with muonckpt, into dicts by path.
    nested: dict = {}
    for tensor in manifest.tensors:
        node = nested
        for part in tensor.path[:-1]:
            node = node.setdefault(part, {})
        node[tensor.path[-1]] = torch.zeros_like(template[tensor.key])
    muonckpt.load(nested, path / "ckpt", allow_extra=True)
    # Both have the same tensors.
    for tensor in manifest.tensors:
        node = nested
        for part in tensor.path:
            node = node[part]
        assert torch.equal(node, flat[tensor.key]), tensor.key


# --- saving: all or nothing -----------------------------------------------------------------------------------------


def test_nothing_is_ever_overwritten(saved):
    before = (saved / "muonckpt.json").read_bytes()
    with pytest.raises(DestinationError, match="exists already"):
        muonckpt.save({"s": plain()}, saved)
    assert (saved / "muonckpt.json").read_bytes() == before


def failing_job(rank, world, path):
    """Save where the disk of rank 1 is full after 1 KiB, and return the error."""
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.randn(999, 4), mesh, [Shard(0)], src_data_rank=None)}
    with full_disk(1024) if rank == 1 else nullcontext():
        try:
            muonckpt.save(state, path)
        except DestinationError as error:
            return str(error)
    return "no error"


def test_if_one_rank_fails_all_hear_of_it_and_nothing_is_published(tmp_path):
    for message in run(3, failing_job, str(tmp_path / "checkpoint")):
        assert "rank 1" in message and "cannot write" in message
    assert list(tmp_path.iterdir()) == []


def differing_job(rank, world, path):
    try:
        muonckpt.save({"same": torch.ones(2), "x": torch.full((3,), float(rank))}, path)
    except LayoutError as error:
        return str(error)
    return "no error"


def test_replicas_that_differ_are_not_dropped_silently(tmp_path):
    for message in run(3, differing_job, str(tmp_path / "a")):
        assert "'x'" in message and "hold different data under one key" in message
    assert not (tmp_path / "a").exists()


def test_what_is_published_is_what_the_manifest_says(saved):
    """Files are stock items: torch reads each by itself, and `.metadata` has no path of this machine."""
    manifest: Manifest = muonckpt.open(saved).outline
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            assert chunk.payload.offset % 64 == 0
            with (saved / chunk.item.file).open("rb") as stream:
                stream.seek(chunk.item.offset)
                item = stream.read(chunk.item.length)
            (saved.parent / "item").write_bytes(item)
            stored = torch.load(saved.parent / "item", weights_only=True)
            assert torch.equal(stored, plain()[tensor.path[-1]])
    assert str(saved).encode() not in (saved / ".metadata").read_bytes()


def test_column_major_tensors_are_saved_row_major(tmp_path):
    value = torch.arange(12.0).reshape(3, 4).T
    muonckpt.save({"w": value}, tmp_path / "c")
    template = {"w": torch.zeros(4, 3)}
    muonckpt.load(template, tmp_path / "c")
    assert torch.equal(template["w"], value)
    muonckpt.load(columns := {"w": torch.zeros(3, 4).T}, tmp_path / "c")
    assert torch.equal(columns["w"], value)


def test_a_process_without_a_group_needs_none(saved):
    assert not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        muonckpt.load({"s": zeros(plain()), "lr": 0.0}, saved)


def test_an_option_of_another_program_may_have_any_value(tmp_path):
    """``pieces`` and ``convention`` are words of ours, and other optimizers may use them."""
    for number, value in enumerate((4, 2.5, "rows", None, {"rows": 3}, [1.5])):
        options = {"lr": 0.1, "pieces": value, "convention": value, "params": ["w"]}
        optimizer = {"state": {"w": {"momentum_buffer": torch.arange(6.0)}}, "param_groups": [options]}
        path = tmp_path / str(number)
        muonckpt.save({"optimizer": optimizer}, path)
        template = {"state": {"w": {"momentum_buffer": torch.zeros(6)}}, "param_groups": [dict(options)]}
        muonckpt.load({"optimizer": template}, path)
        assert torch.equal(template["state"]["w"]["momentum_buffer"], torch.arange(6.0))
        assert muonckpt.attest({"optimizer": optimizer}, path)
