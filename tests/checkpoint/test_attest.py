"""Fingerprints of live tensors, and what is proved with them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.fsdp_model import build, steps
from support.sharded import DTYPES, MESHES, small, some
from support.workers import run
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import AttestError, Fingerprints, LayoutError, SourceError
from muonckpt.algebra.fingerprint import fingerprint
from muonckpt.checkpoint.attestation import held_together, shares_of
from muonckpt.checkpoint.bits import bits_of, share_by_numpy, share_by_torch, share_of, unsigned
from muonckpt.checkpoint.live_state import LiveState

LARGE = [((3_000_017,), torch.uint8), ((1_500_007, 2), torch.uint8), ((3, 800_011), torch.uint16),
         ((2, 3, 400_009), torch.uint8), ((1_100_003,), torch.int64), ((7, 1, 5, 70_001), torch.bfloat16)]  # fmt: skip
"""More than a block, along every dim."""


def expected_share(tensor: torch.Tensor, origin: tuple[int, ...]) -> int:
    bits = bits_of(tensor)
    return fingerprint(bits, origin + (0,) * (bits.ndim - len(origin)))


def assert_exact(tensor: torch.Tensor, origin: tuple[int, ...]) -> None:
    expected = expected_share(tensor, origin)
    assert [unsigned(int(take(tensor, origin))) for take in (share_by_torch, share_by_numpy, share_of)] == [
        expected
    ] * 3


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint64, torch.complex32], ids=str)
def test_torch_and_numpy_take_the_same_fingerprint_of_any_dtype_shape_stride_and_origin(dtype):
    generator = torch.Generator().manual_seed(dtype.itemsize)
    for number, shape in enumerate(
        [(), (0,), (3, 0, 2), (7,), (70_001,), (5, 9), (2, 66_000), (3, 4, 5), (2, 1, 3, 2)]
    ):
        tensor = some(shape, dtype, number)
        origin = tuple(torch.randint(0, 1 << 40, (len(shape),), generator=generator).tolist())
        assert_exact(tensor, origin)
        if tensor.ndim > 1:
            assert_exact(tensor.transpose(0, -1), origin)
            assert_exact(tensor[..., ::2], origin)


@pytest.mark.parametrize(("shape", "dtype"), LARGE, ids=str)
def test_a_tensor_of_several_blocks_has_the_same_fingerprint(shape, dtype):
    assert_exact(some(shape, dtype, 3), tuple(range(11, 11 + len(shape))))


def test_pending_conjugation_counts_and_autograd_does_not():
    tensor = some((3, 4), torch.complex64, 1).requires_grad_()
    assert_exact(tensor.detach(), (0, 0))
    resolved = unsigned(int(share_of(tensor.conj(), (0, 0))))
    assert (
        resolved
        == expected_share(tensor.detach().conj().resolve_conj(), (0, 0))
        != expected_share(tensor.detach(), (0, 0))
    )


# --- on meshes ----------------------------------------------------------------------------------------------------


def placed(mesh_name, rank):
    """Every dtype on a mesh, scalars plain, and a stage that some of the ranks hold."""
    shape, dims = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape)

    def place(value):
        here = [dim if dim is None or dim < value.ndim else None if 0 in dims else 0 for dim in dims]
        placements = [Replicate() if dim is None else Shard(dim) for dim in here]
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    tensors = {name: place(value) if value.ndim else value for name, value in small().items()}
    return {"t": tensors, "stage": {str(rank % 2): torch.arange(5.0) + rank % 2}, "lr": 0.5}


def prints_job(rank, world, path, mesh_name):
    state = placed(mesh_name, rank)
    prints = muonckpt.fingerprints(state)
    muonckpt.save(state, path)
    report = muonckpt.attest(state, path)
    assert report == muonckpt.attest(state, prints) and report.fingerprints == prints
    return prints.as_json(), str(report)


def recorded(path):
    return {t.key: (t.shape, t.dtype, t.fingerprint) for t in muonckpt.open(path).outline.tensors}


def test_live_fingerprints_are_those_that_save_writes_on_any_mesh(tmp_path):
    found = []
    for mesh in ("rows3", "hsdp2x2", "turned2x2"):
        answers = run(math.prod(MESHES[mesh][0]), prints_job, str(tmp_path / mesh), mesh)
        assert len(set(answers)) == 1
        live = Fingerprints.from_json(answers[0][0])
        assert {key: (t.shape, t.dtype, t.fingerprint) for key, t in live.tensors.items()} == recorded(tmp_path / mesh)
        found.append(live)
    assert found[0] == found[1] == found[2]
    whole = {"t": small(), "stage": {"0": torch.arange(5.0), "1": torch.arange(5.0) + 1}}
    report = muonckpt.attest(whole, live)  # another program, which holds all of it
    assert report.compared == len(live.tensors) and report.replicated == 0


def flip(tensor, number):
    """Change one bit of one element that this rank holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.reshape(-1)[number : number + 1].view(torch.uint8)[0] ^= 1


def message(function, *args, **kwargs):
    with pytest.raises((AttestError, LayoutError, SourceError)) as caught:
        function(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


def drift_job(rank, world, path):
    state = placed("hsdp2x2", rank)
    muonckpt.save(state, path)
    if rank == 3:
        flip(state["t"]["bfloat16"], 2)
    if rank == 1:
        flip(state["t"]["scalar"], 0)
    alone = message(muonckpt.fingerprints, state)
    against = message(muonckpt.attest, state, path)
    of_some = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = distribute_tensor(torch.ones(4, 6), init_device_mesh("cpu", (4,)), [Shard(1)], src_data_rank=None)
    return alone, against, message(muonckpt.fingerprints, {"columns": columns}, process_group=of_some)


def test_replicas_that_drifted_are_named_by_tensor_box_and_rank(tmp_path):
    answers = run(4, drift_job, str(tmp_path / "c"))
    alone, against, hole = answers[0]
    assert all(answer[:2] == (alone, against) for answer in answers)
    assert alone.startswith("AttestError: live state differs from rank to rank: 't.bfloat16' box [7:13, 0:5]: ")
    assert "rank 1 holds" in alone and "rank 3 holds" in alone and alone.count("replicas differ") == 2
    assert "'t.scalar' box []: replicas differ: ranks 0, 2, 3 hold" in alone
    assert "replicas differ" in against and str(tmp_path / "c") in against
    assert hole.startswith("LayoutError: tensor 'columns'") and "[0:4, 4:6]" in hole, hole


# --- training -----------------------------------------------------------------------------------------------------


def training_job(rank, world, path):
    net, opt = build()
    steps(net, opt, 0, 2)

    def state():
        model, optimizer = get_state_dict(net, opt)
        return {"model": model, "optimizer": optimizer}

    muonckpt.save(state(), path)
    saved = str(muonckpt.attest(state(), path))
    steps(net, opt, 2, 3)
    moved = message(muonckpt.attest, state(), path)
    loaded = state()
    muonckpt.load(loaded, path, attest=True)
    muonckpt.attest(loaded, path)
    if rank == world - 1:
        flip(loaded["optimizer"]["state"]["b.weight"]["momentum_buffer"], 5)
    return saved, moved, message(muonckpt.attest, loaded, path)


def test_a_training_state_is_its_checkpoint_until_anything_moves(tmp_path):
    answers = run(2, training_job, str(tmp_path / "c"))
    saved, moved, changed = answers[0]
    assert answers[1] == answers[0]
    assert "are equal" in saved and "'model.a.weight' has fingerprint" in moved and "more" in moved
    key = "optimizer.state.b.weight.momentum_buffer"
    assert changed.count("has fingerprint") == 1 and f"is not that of {tmp_path / 'c'}: '{key}' has" in changed


# --- one process --------------------------------------------------------------------------------------------------


def plain():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "step": 3}


DIFFERENT = {
    "missing": ({"b": None}, "'b' is missing"),
    "extra": ({"c": torch.ones(1)}, "'c' is not expected"),
    "shape": ({"a": torch.arange(6.0)}, r"'a' has shape \(6,\), expected \(2, 3\)"),
    "dtype": ({"b": torch.ones(4, dtype=torch.float16)}, "'b' is float16, expected bfloat16"),
    "element": ({"b": -torch.ones(4, dtype=torch.bfloat16)}, "'b' has fingerprint"),
}


@pytest.mark.parametrize("stock", [False, True], ids=["manifest", "stock"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_whatever_differs_from_a_checkpoint_is_named(case, stock, tmp_path):
    change, words = DIFFERENT[case]
    if stock:  # no fingerprints: they are taken from its bytes
        dcp.save(plain(), checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        muonckpt.save(plain(), tmp_path / "c")
    assert muonckpt.attest(plain(), tmp_path / "c").compared_bytes == 32
    state = {key: value for key, value in (plain() | change).items() if value is not None}
    with pytest.raises(AttestError, match=words):
        muonckpt.attest(state, tmp_path / "c")


class Rounding:
    """Keeps less than it is given."""

    def __init__(self):
        self.weight = torch.zeros(3)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"].bfloat16().float()


def test_load_of_a_part_of_a_tensor_is_not_attested_and_nothing_is_written(tmp_path):
    muonckpt.save({"x": torch.arange(12.0).view(4, 3), "y": torch.ones(3)}, tmp_path / "saved")
    template = {"x": muonckpt.BoxedTensor((4, 3), {(0, 0): torch.zeros(2, 3)}), "y": torch.zeros(3)}
    with pytest.raises(muonckpt.LayoutError, match=r"tensor 'x': attest=True .* Load without attest=True"):
        muonckpt.load(template, tmp_path / "saved", attest=True)
    assert not template["x"].parts[0, 0].any() and not template["y"].any()
    muonckpt.load(template, tmp_path / "saved")
    assert torch.equal(template["x"].parts[0, 0], torch.arange(6.0).view(2, 3)) and template["y"].all()


def test_load_attests_what_is_in_memory_when_it_is_asked_to(tmp_path):
    muonckpt.save({"m": {"weight": torch.tensor([1.0, 0.1, 3.0]), "more": torch.ones(2)}}, tmp_path / "c")
    muonckpt.load({"m": Rounding()}, tmp_path / "c", allow_extra=True)
    with pytest.raises(AttestError, match=r"is not that of .*, from which it was loaded: 'm.weight' has fingerprint"):
        muonckpt.load({"m": Rounding()}, tmp_path / "c", allow_extra=True, attest=True)
    # What keeps its values, and what is left out, is not compared.
    state = {"m": {"weight": torch.zeros(3), "new": torch.ones(2)}}
    muonckpt.load(state, tmp_path / "c", allow_extra=True, fresh=["new"], attest=True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}"]
    + [
        f'{{"format": "muonckpt fingerprints", "version": {version}, "tensors": {{"a": {entry}}}}}'
        for version, entry in (
            (2, '{"shape": [1], "dtype": "float32", "fingerprint": "0123456789abcdef"}'),
            (1, '{"shape": [1], "dtype": "float32", "fingerprint": "1"}'),
            (1, '{"shape": ["1"], "dtype": "float32", "fingerprint": "0123456789abcdef"}'),
            (1, '{"shape": [1], "fingerprint": "0123456789abcdef"}'),
        )
    ],
)
def test_what_is_no_list_of_fingerprints_is_refused(text):
    with pytest.raises(SourceError, match="fingerprints"):
        Fingerprints.from_json(text)


def test_replicas_of_very_many_ranks_that_differ_are_counted():
    live = [LiveState.of({"w": torch.full((2,), value)}, "to attest") for value in (0.0, 1.0)]
    shares = [shares_of(state, state.parts) for state in live]
    [fault] = held_together(range(512), [shares[rank == 300] for rank in range(512)]).faults
    assert "ranks 0, 1, 2, 3, 4 and 506 more hold " in fault and ", rank 300 holds " in fault
