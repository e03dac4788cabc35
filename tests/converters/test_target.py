"""Any mesh, any rule, any layout: which rank gets which element, and that each arrives bit for bit."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sharded, sweep
from support.golden import golden
from support.oracle import arange, scatter
from support.resharded import contents, make_job, saved
from support.sharded import elements_of, manifest_edited

import muonckpt
from muonckpt import OpenCheckpoint, TargetError
from muonckpt.algebra.layout import stacked, through
from muonckpt.converters.engine.outputs import OutputItem, Outputs, OutputTensor, constant, unchanged
from muonckpt.converters.engine.rank_files import lay_out
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import LAYOUTS, ShardRule, Target
from muonckpt.layouts.buffers.records import recorded_buffers
from muonckpt.layouts.flat import owned_layout
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import Manifest, StateRecord
from muonckpt.store.formats.torch_save.plain_item import plain_item

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensor(key: str, *shape: int, slot: str | None = None) -> StateRecord:
    return StateRecord(key, (key,), shape, "float32", no_chunks(len(shape)), slot=slot)


# --- which rank gets what ---------------------------------------------------------------------------------------------


def cut_by_torch(shape, mesh, cuts, rank) -> list[int]:
    """What a rank has, as flat indices, by applying ``torch.chunk`` once for each cut."""
    where = dict(zip(mesh, np.unravel_index(rank, tuple(mesh.values())), strict=True))
    part = torch.from_numpy(arange(shape))
    for axis, dim in cuts:
        parts = part.chunk(mesh[axis], dim)
        part = parts[where[axis]] if where[axis] < len(parts) else part.narrow(dim, 0, 0)
    return part.reshape(-1).tolist()


def test_rows_are_what_torch_chunk_gives_for_any_mesh_and_any_order_of_cuts():
    choose = random.Random(7)
    for _ in range(300):
        mesh = {axis: choose.randint(1, 4) for axis in choose.sample(["dp", "ep", "tp", "x"], choose.randint(1, 3))}
        shape = tuple(choose.randint(1, 9) for _ in range(choose.randint(1, 3)))
        axes = choose.sample(list(mesh), choose.randint(0, len(mesh)))
        cuts = tuple((axis, choose.randrange(len(shape))) for axis in axes)
        laid = lay_out(Target(mesh, (ShardRule("*", cuts),)), [tensor("w", *shape)])
        held = scatter(arange(shape), laid.layouts["w"])
        for rank in range(math.prod(mesh.values())):
            mine = held.get(rank, {})
            assert [mine[at] for at in sorted(mine)] == cut_by_torch(shape, mesh, cuts, rank), (mesh, shape, cuts)
            assert sorted(mine) == list(range(len(mine)))


def test_without_a_rule_every_axis_cuts_rows_and_the_first_rule_that_fits_wins():
    mesh = {"dp": 2, "tp": 2}
    rules = ShardRule("a.*", (("tp", 1),)), ShardRule("a.b*", (("tp", 0),)), ShardRule("kept", ())
    laid = lay_out(Target(mesh, rules), [tensor("a.b", 6, 4), tensor("c", 6, 4), tensor("kept", 6, 4), tensor("step")])
    words = {key: (word["axes"], word["placements"]) for key, word in laid.recorded.items() if word}
    assert words == {
        "a.b": (["tp", "dp"], ["Shard(1)", "Replicate"]),
        "c": (["dp", "tp"], ["Shard(0)", "Shard(0)"]),
        "kept": (["dp", "tp"], ["Replicate", "Replicate"]),
    }
    assert laid.layouts["step"].buffers == (0,) and laid.recorded["step"] is None


WRONG = {
    "layout": (lambda: Target({"dp": 2}, (), "diagonal"), "unknown layout 'diagonal'; expected one of rows, flat"),
    "axis": (lambda: Target({"dp": 2}, (ShardRule("*", (("tp", 0),)),)), "expected axes of the mesh \\(dp\\)"),
    "twice": (lambda: Target({"dp": 2}, (ShardRule("*", (("dp", 0), ("dp", 1))),)), "each at most once"),
    "dim": (
        lambda: lay_out(Target({"dp": 2}, (ShardRule("*", (("dp", 1),)),)), [tensor("m", 2, 2), tensor("v", 2)]),
        r"rule \*=dp:1 cuts a dim that tensor 'v' of shape \(2,\) does not have",
    ),
    "nothing": (
        lambda: lay_out(Target({"dp": 2}, (ShardRule("x*", (("dp", 0),)),)), [tensor("v", 2)]),
        "matches none of 1 tensors",
    ),
    "selected": (lambda: make_job(saved("own rows3"), Target({"dp": 2}), ["x*"]), "no key.*matches 'x"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_target_that_does_not_fit_is_an_error_that_says_why(case):
    make, message = WRONG[case]
    with pytest.raises(TargetError, match=message):
        make()


# --- every element arrives --------------------------------------------------------------------------------------------

# Two axes that cut rows of everything but what has one row, in the order that torch's mesh cannot hold without strides.
TURNED = ShardRule("t.row", (("tp", 1),)), ShardRule("t.*", (("tp", 0), ("dp", 0)))
EXPERTS = ShardRule("t.cube", (("ep", 0), ("dp", 1))), ShardRule("t.tower", (("dp", 3), ("ep", 0)))
TARGETS = {
    **{layout: Target({"dp": 3}, (), layout) for layout in LAYOUTS},
    **{f"{layout} in parts": Target({"dp": 2, "ep": 2}, EXPERTS, layout) for layout in LAYOUTS},
    "turned": Target({"dp": 2, "tp": 3}, TURNED),
    "replicas": Target({"r": 3, "dp": 2}, (ShardRule("*", (("dp", 0),)),)),
    "three axes": Target({"dp": 2, "ep": 2, "tp": 2}, EXPERTS),
}


def check(manifest: Manifest, target: Target) -> None:
    """Every chunk lies in the file of a rank that the target gives its box to, no replica twice."""
    laid = lay_out(target, manifest.tensors)
    for written in manifest.tensors:
        layout = laid.layouts[written.key]
        owners = {replicas[0].box: {f.place.buffer for f in replicas} for replicas in layout.holders}
        assert sorted(owners, key=str) == sorted((chunk.box for chunk in written.chunks), key=str)
        for chunk in written.chunks:
            assert chunk.item.file in {f"__{rank}_0.distcp" for rank in owners[chunk.box]}
        assert written.layout == laid.recorded[written.key]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("source", sweep(["stock grid2x2", "own rows4"], "stock grid2x2"))
def test_every_element_arrives_bit_for_bit_in_any_layout_and_back(name, source, tmp_path):
    expected = {f"t.{key}": sharded.bits(value) for key, value in sharded.small().items()}
    done = run_job(make_job(saved(source), TARGETS[name]), tmp_path / "there")
    check(done, TARGETS[name])
    before = muonckpt.open(saved(source)).outline
    assert elements_of(tmp_path / "there") == sharded.stock_load(tmp_path / "there", before) == expected
    report = muonckpt.verify(tmp_path / "there")
    assert {finding.kind for finding in report.findings} <= {"nonfinite"} and report.notes == ()
    back = run_job(make_job(tmp_path / "there", Target({"dp": 4})), tmp_path / "back")
    assert elements_of(tmp_path / "back") == expected
    assert {t.fingerprint for t in back.tensors} == {t.fingerprint for t in done.tensors}
    assert "buffers" not in back.provenance


@pytest.mark.parametrize("name", sweep(TARGETS, *[*TARGETS][::2]))
def test_gathering_runs_and_strided_pieces_writes_the_same_bytes(name, tmp_path):
    """Rows are runs of bytes in their source; columns are strided there."""
    columns, runs = saved("own columns3", "wide"), tmp_path / "runs"
    run_job(make_job(columns, Target({"dp": 3}, (), TARGETS[name].layout)), runs)
    rules = tuple(rule for rule in TARGETS[name].rules if rule.glob == "*")
    target = Target(TARGETS[name].mesh, rules, TARGETS[name].layout)
    copied, assembled = make_job(runs, target), make_job(columns, target)
    assert any(plan.copies.in_runs for file in copied.files for plan in file.chunks.plans)
    assert not all(plan.copies.in_runs for file in assembled.files for plan in file.chunks.plans)
    run_job(copied, tmp_path / "copied")
    run_job(assembled, tmp_path / "assembled", memory=1)
    written = [contents(tmp_path / "copied"), contents(tmp_path / "assembled")]
    assert len({manifest.pop("muonckpt.json") for manifest in written}) == 2  # they have other sources
    assert written[0] == written[1]


THEIRS = ["torch_fsdp4/ckpt", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sweep(THEIRS, THEIRS[1]))
def test_checkpoints_of_other_programs_take_any_layout(name, layout, tmp_path):
    source = golden(name)
    expected = sharded.stock_load(source, muonckpt.open(source).outline)
    run_job(make_job(source, Target({"dp": 2, "ep": 3}, (), layout)), tmp_path / "out")
    assert sharded.stock_load(tmp_path / "out", muonckpt.open(source).outline) == expected


def test_buffers_are_recorded_with_their_owners_and_those_have_the_tensors(tmp_path):
    for layout in ("balanced", "padded-nscost", "padded-numel", "decoupled-total-order", "legacy-pingpong"):
        done = run_job(make_job(saved("own rows3"), Target({"dp": 3}, (), layout)), tmp_path / layout)
        buffers = recorded_buffers(muonckpt.open(tmp_path / layout).outline.provenance)
        assert all(buffer.group == (0, 1, 2) and buffer.layout.whole for buffer in buffers)
        owners = {name: owner for buffer in buffers for name, owner in buffer.layout.owners.items()}
        with_elements = [t for t in done.tensors if math.prod(t.shape)]
        assert owners.keys() == {t.key for t in with_elements}
        for written in with_elements:
            assert [chunk.item.file for chunk in written.chunks] == [f"__{owners[written.key]}_0.distcp"]


def test_replicas_are_written_once_and_spread_over_their_holders(tmp_path):
    job = make_job(saved("own rows3"), TARGETS["replicas"])
    sizes = [file.payload for file in job.files]
    largest = max(plan.frame.payload_length for file in job.files for plan in file.chunks.plans)
    assert len(sizes) == 6 and max(sizes) - min(sizes) <= 2 * largest
    assert sum(sizes) == sum(map(len, elements_of(saved("own rows3")).values()))


def test_what_is_not_selected_is_neither_read_nor_written(tmp_path):
    whole = elements_of(saved("own rows3"))
    job = make_job(saved("own rows3"), Target({"dp": 2}), ["t.cube", "*.bf*", "hyper.*"])
    done = run_job(job, tmp_path / "out")
    assert elements_of(tmp_path / "out") == {key: whole[key] for key in ("t.cube", "t.bfloat16")}
    assert sorted(blob.key for blob in done.blobs) == ["hyper.betas", "hyper.lr"]
    assert job.bytes_to_check == job.payload_to_write == len(whole["t.cube"]) + len(whole["t.bfloat16"])


def test_reads_avoided_are_those_of_whole_chunks(tmp_path):
    run_job(make_job(saved("own rows3"), Target({"dp": 1}), ["t.cube"]), tmp_path / "one")
    assert make_job(tmp_path / "one", Target({"dp": 1})).reads_avoided == 0
    assert make_job(tmp_path / "one", Target({"dp": 3})).reads_avoided == 2 * 3 * 4 * 5 * 4


def halves_and_more(source: OpenCheckpoint) -> Outputs:
    """The upper half of a tensor renamed, the lower one scaled as well; a counter and an item that are new."""
    plain, tensors = unchanged(source).selected(["t.float32", "hyper.betas"]), []
    for each in plain.tensors:
        two = lay_out(Target({"h": 2}), [each.record]).layouts[each.key]
        for end, fragment, scale in zip(("_w", "_v"), two.fragments, (None, 0.1), strict=True):
            part = through(stacked([fragment.box], 0), each.layout)
            tensors.append(OutputTensor(tensor(each.key + end, *part.shape), part, each.sources, scale=scale))
    three = constant(source.payloads, "float32", struct.pack("<f", 3))
    step = OutputTensor(tensor("step"), owned_layout((), 0), (three.chunks,))
    moved = [OutputItem("moved", ("moved",), item.source) for item in plain.items]
    items = [*moved, OutputItem("new", ("new",), data=plain_item({"lr": 0.5}))]
    return Outputs([*tensors, step], items, constants=(three,))


def test_a_translation_may_rename_split_scale_and_add(tmp_path):
    """The seam for tables of names and conventions: it makes other layouts of the same buffers, and moves nothing.

    Chosen by what it is to be called; nothing that only the rest needs is read."""
    source = saved("stock columns3")
    whole = elements_of(source)["t.float32"]
    job = make_job(source, Target({"dp": 3}), ["t.float32*", "step", "moved", "new"], halves_and_more)
    assert [tensor.shape for tensor in job.manifest.tensors] == [(13, 5), (1,)]  # t.float32, and what fills the counter
    done = run_job(job, tmp_path / "out")
    assert [(t.key, t.shape) for t in done.tensors] == [("t.float32_w", (7, 5)), ("t.float32_v", (6, 5)), ("step", ())]
    found = elements_of(tmp_path / "out")
    assert found["t.float32_w"] == whole[: 7 * 5 * 4] and struct.unpack("<f", found["step"]) == (3,)
    values, scaled = (torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in (whole, found["t.float32_v"]))
    once_rounded = (values[7 * 5 :].double() * 0.1).float()
    torch.testing.assert_close(scaled, once_rounded, rtol=0, atol=0, equal_nan=True)
    assert {finding.kind for finding in muonckpt.verify(tmp_path / "out").findings} <= {"nonfinite"}
    state = {"moved": None, "new": None}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state == {"moved": (0.9, 0.95), "new": {"lr": 0.5}}


def test_words_of_a_layout_that_is_given_up_do_not_stay_in_the_manifest(tmp_path):
    run_job(make_job(saved("own rows3"), Target({"dp": 2}, (), "padded-nscost")), tmp_path / "padded-nscost")
    manifest_edited(tmp_path / "padded-nscost", lambda entries: entries["t.cube"].update(layout={"algorithm": "old"}))
    done = run_job(make_job(tmp_path / "padded-nscost", Target({"dp": 2})), tmp_path / "rows")
    assert {t.layout["algorithm"] for t in done.tensors if t.layout} == {"mesh"}


def test_a_chunk_to_write_takes_a_few_words_of_memory(tmp_path):
    """So that the plan of a million of them fits beside the buffers; an object for each takes hundreds of bytes."""
    muonckpt.save({f"t{number}": torch.arange(64.0) for number in range(200)}, tmp_path / "source")

    def planned(ranks: int) -> int:
        """Bytes that a job of 200 chunks for each of these ranks takes."""
        make_job(tmp_path / "source", Target({"dp": ranks}))  # what is cached counts for neither
        tracemalloc.start()
        job = make_job(tmp_path / "source", Target({"dp": ranks}))
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert sum(len(file.chunks) for file in job.files) == 200 * ranks
        return taken

    assert planned(64) - planned(16) < 200 * (64 - 16) * 40
