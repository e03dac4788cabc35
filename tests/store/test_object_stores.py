"""Object stores: the same files as in a directory, by ranges and in parts, and nothing to be seen of a failed run."""

from __future__ import annotations

import itertools
import json
import os
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from support import lost_ranks, store_server, sweep
from support.commands import called, cli
from support.forked import printed
from support.launched import together
from support.resharded import make_job, once, plan_job, reshard
from support.sharded import elements_of

import muonckpt
from muonckpt import DestinationError, SourceError
from muonckpt.algebra.box import row_major
from muonckpt.algebra.layout import Place
from muonckpt.converters.engine.container import FORMATS, container_of
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import Target
from muonckpt.record.record import Extent
from muonckpt.store.io.location import GAP, PART, REQUEST_BYTES, Remote, location
from muonckpt.store.reading.payloads import Payloads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MATRIX = "optimizer.state.0.weight.momentum_buffer"
S3 = f"s3://{store_server.BUCKET}"


@pytest.fixture
def server(object_store) -> store_server.Server:
    server, _ = object_store
    server.requests.clear()
    return server


@pytest.fixture(params=sweep(["memory", "s3"], "memory"))
def store(request) -> Remote:
    """An empty place in each kind of store."""
    if request.param == "s3":
        request.getfixturevalue("server")
    return location(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"{S3}/{uuid.uuid4().hex}")


@pytest.fixture
def memory() -> Remote:
    return location(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def source(tiny_checkpoint, tmp_path_factory):
    """A checkpoint in a directory, on three ranks.  Do not change."""
    path = tmp_path_factory.mktemp("source") / "run"
    reshard(tiny_checkpoint, path, 3)
    return path


def files(place) -> dict[str, bytes]:
    """What stands in the files of ranks and for stock programs; our manifest names its source."""
    contents = {}
    for file in place.iterdir():
        if file.name != "muonckpt.json":
            contents[file.name] = file.fs.cat_file(file.path) if isinstance(file, Remote) else file.read_bytes()
    return contents


def objects(place: Remote) -> list[str]:
    """All that lies in a place, or beside it under a name that begins with a dot."""
    return [name.removeprefix(place.path) for name in place.fs.find(place.path)]


def is_checkpoint(place: Remote) -> bool:
    try:
        muonckpt.open(place)
    except SourceError:
        return False
    return True


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_there_within_and_back_give_the_files_that_a_directory_has(source, store, tmp_path):
    cut = ["--mesh", "dp=2,tp=2", "--shard", f"{MATRIX}=tp:1,dp:0"]
    assert called("reshard", source, store / "up", "--mesh", "dp=3").returncode == 0
    assert called("reshard", store / "up", store / "across", *cut).returncode == 0
    assert called("reshard", store / "across", tmp_path / "down", "--mesh", "dp=3").returncode == 0
    assert called("reshard", source, tmp_path / "local", "--mesh", "dp=3").returncode == 0
    assert called("reshard", source, tmp_path / "local4", *cut).returncode == 0
    assert files(store / "up") == files(tmp_path / "down") == files(tmp_path / "local")
    assert files(store / "across") == files(tmp_path / "local4")
    assert elements_of(tmp_path / "down") == elements_of(source)
    assert sorted(name.split("/")[1] for name in objects(store)).count("up") == 5  # and no claim is left


@pytest.mark.parametrize("form", sorted({*FORMATS} - {"universal"}))
def test_every_format_is_written_and_read(source, form, memory, tmp_path):
    with_all = [] if container_of(form).of_ranks else ["--tensors-only", "--shard-size", "1KiB"]
    with_all += ["--select", "model.*"]
    done = called("convert", source, memory / "out", "--format", form, *with_all)
    assert done.returncode == 0, done.stderr
    assert called("verify", memory / "out").returncode == 0
    assert called("inspect", memory / "out").returncode == 0
    assert called("convert", memory / "out", tmp_path / "back", "--format", "dcp").returncode == 0
    whole = elements_of(source)
    assert elements_of(tmp_path / "back") == {key: raw for key, raw in whole.items() if key.startswith("model.")}


def test_one_file_of_safetensors_and_a_hierarchy_of_zarr_in_s3_and_stock_zarr_reads_it(source, server):
    zarr = pytest.importorskip("zarr")
    place = location(f"{S3}/{uuid.uuid4().hex}")
    for form, name in (("safetensors", "one.safetensors"), ("zarr", "tree")):
        done = called("convert", source, place / name, "--format", form, "--select", MATRIX)
        assert done.returncode == 0, done.stderr
        assert called("verify", place / name).returncode == 0
    found = zarr.open_array(f"{place / 'tree'}/optimizer/state/0.weight/momentum_buffer", mode="r")[...]
    assert found.tobytes() == elements_of(source)[MATRIX]
    assert [name.split("/")[1] for name in objects(place) if "tree" not in name and "verified" not in name] == [
        "one.safetensors"
    ]


# --- what is read and written -----------------------------------------------------------------------------------------


def test_only_the_ranges_that_are_needed_are_read(server, tmp_path):
    place, columns = location(f"{S3}/{uuid.uuid4().hex}"), 3 * GAP // 4
    muonckpt.save({"a": torch.randn(8, columns), "b": torch.randn(300, 100)}, tmp_path / "run")
    reshard(tmp_path / "run", place / "rows", 4)
    for more in (["--mesh", "dp=3"], ["--mesh", "tp=3", "--shard", "*=tp:1"]):
        server.requests.clear()
        assert called("reshard", place / "rows", tmp_path / more[1], "--select", "a", *more).returncode == 0
        need = 8 * columns * 4
        assert server.read(".distcp") <= 2 * need  # once to check, once to copy
    assert called("verify", tmp_path / "tp=3").returncode == 0


def test_a_large_file_goes_up_in_parts_and_a_failed_one_leaves_none(server, tmp_path):
    place = location(f"{S3}/{uuid.uuid4().hex}")
    muonckpt.save({"w": torch.arange(5 << 20, dtype=torch.float32).reshape(-1, 1024)}, tmp_path / "run")
    reshard(tmp_path / "run", place / "whole", 1)
    parts = server.parts("whole/__0_0.distcp")
    assert (
        len(parts) == 3 and max(parts) <= PART + (2 << 20) and sum(parts) == len(files(place / "whole")["__0_0.distcp"])
    )

    second = server.refusing(lambda query: query.get("partNumber") == ["2"])
    with second, pytest.raises(DestinationError, match=r"__0_0\.distcp.*Access Denied"):
        reshard(tmp_path / "run", place / "failed", 1)
    assert len(server.parts("failed/__0_0.distcp")) == 2 and objects(place / "failed") == []
    assert "Uploads" not in place.fs.call_s3("list_multipart_uploads", Bucket=store_server.BUCKET)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(source, memory):
    done = called("reshard", source, memory / "out", "--mesh", "dp=2", "--memory", "119MiB")
    assert done.returncode == 4 and "raise --memory, or lower --jobs" in done.stderr
    assert objects(memory) == []
    for more in (["--memory", "120MiB"], ["--memory", "40MiB", "--jobs", "1"]):
        memory = memory / "x"
        assert called("reshard", source, memory / "out", "--mesh", "dp=2", *more).returncode == 0


@pytest.mark.parametrize("columns", [5, GAP // 16, 2 * GAP, REQUEST_BYTES // 3], ids=["small", "near", "apart", "long"])
@pytest.mark.parametrize("dtype", sweep(["uint8", "complex128"], "complex128"))
def test_what_is_gathered_from_an_object_is_what_lies_there(columns, dtype, memory):
    """In one range, in several that are asked for together, and in more than one batch of these."""
    length = columns // np.dtype(dtype).itemsize or columns
    whole = np.arange(7 * 6 * length).astype(dtype).reshape(7, 6, length)
    (memory / "x").write(b"head" + whole.tobytes())
    payload, size, boxes = Extent("x", 4, whole.nbytes), whole.itemsize, [((0, 0, 0), whole.shape)]
    boxes += [((1, 2, length // 2), (6, 5, length)), ((3, 0, 0), (4, 6, 1)), ((6, 5, length - 1), whole.shape)]
    with Payloads(memory) as payloads:
        for lo, hi in boxes:
            shape = tuple(np.subtract(hi, lo))
            place = Place("x", int(np.dot(lo, row_major(whole.shape))), row_major(whole.shape))
            found = payloads.gather(payload, dtype, place, shape)
            assert found.tobytes() == whole[tuple(map(slice, lo, hi))].tobytes()
            assert found.itemsize * found.size == size * np.prod(shape)


# --- nothing in between -----------------------------------------------------------------------------------------------


def test_there_is_no_checkpoint_before_the_last_object(source, store):
    seen, calls = [], itertools.count()

    def looking(name):
        return lambda count: next(calls) % 20 or seen.append(is_checkpoint(store / name))

    reshard(source, store / "out", 3, progress=looking("out"))
    assert seen and not any(seen) and is_checkpoint(store / "out")
    for form, shard_bytes in (("zarr", None), ("safetensors", None), ("safetensors", 1)):
        name = f"{form}{shard_bytes}"
        job = make_job(source, Target({"dp": 1}), [MATRIX], container=container_of(form, shard_bytes))
        run_job(job, store / name, progress=looking(name))
        assert not any(seen) and is_checkpoint(store / name)
        assert not [found for found in objects(store) if found.startswith(f".{name}")]


def test_a_damaged_object_is_found_and_nothing_is_made_of_it(source, memory):
    reshard(source, memory / "good", 2)
    tensor = next(tensor for tensor in muonckpt.open(memory / "good").manifest.tensors if tensor.key == MATRIX)
    victim = memory / "good" / tensor.chunks[1].item.file
    data = bytearray(files(memory / "good")[victim.name])
    data[tensor.chunks[1].payload.offset] ^= 1
    victim.write(bytes(data))
    assert called("verify", memory / "good").returncode == 1
    done = called("reshard", memory / "good", memory / "bad", "--mesh", "dp=3")
    assert done.returncode == 3 and "has damaged bytes" in done.stderr
    assert objects(memory / "bad") == [] and len(objects(memory / "good")) == 4

    victim.write(bytes(data[:-200]))
    done = called("reshard", memory / "good", memory / "bad", "--mesh", "dp=3")
    assert done.returncode == 3 and victim.name in done.stderr


def test_a_source_that_changes_meanwhile_is_not_published(source, store):
    reshard(source, store / "source", 2)
    victim = store / "source" / "__0_0.distcp"
    data = files(store / "source")[victim.name]
    with pytest.raises(SourceError, match="changed while it was read"):
        change = once(lambda: victim.write(data[:-1] + b"!"))
        reshard(store / "source", store / "out", 3, progress=lambda count: change(count))
    assert objects(store / "out") == []


def test_a_destination_is_never_overwritten(source, memory):
    reshard(source, memory / "out", 2)
    before = files(memory / "out")
    for command in (["reshard", "--mesh", "dp=1"], ["convert", "--to-format", "zarr", "--tensors-only"]):
        done = called(command[0], source, memory / "out", *command[1:])
        assert done.returncode == 4 and "exists already" in done.stderr
    assert files(memory / "out") == before
    done = called("reshard", memory / "out", memory / "out" / "inside", "--mesh", "dp=1")
    assert done.returncode == 4 and "inside the source" in done.stderr


def test_an_interrupted_run_leaves_nothing(source, store):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(source, store / "out", 4, threads=1, progress=once(interrupt))
    assert not objects(store)


def rows(rank: int, source: Path, ranks: int) -> Job:
    return plan_job(source, ranks)


def test_several_processes_write_to_a_store(source, server, tmp_path):
    place = location(f"{S3}/{uuid.uuid4().hex}") / "out"
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert together(2, rows, source, 5, destination=place, environment=store) == ["published", "done"]
    reshard(source, tmp_path / "local", 5)
    assert files(place) == files(tmp_path / "local") and is_checkpoint(place)


def test_of_two_runs_that_work_in_a_store_at_once_the_second_is_refused(source, store, tmp_path):
    def second():
        with pytest.raises(DestinationError, match="exists already"):
            reshard(source, store / "out", 3)
        refused.append(True)

    refused: list[bool] = []
    reshard(source, store / "out", 3, threads=1, progress=once(second))
    reshard(source, tmp_path / "local", 3)
    assert refused and files(store / "out") == files(tmp_path / "local")


@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_names_are_no_patterns(store):
    for name in ("a1", "a*/a*", "a*/b[1]", "a?"):
        (store / name).write(name.encode())
    assert sorted(each.name for each in (store / "a*").iterdir()) == ["a*", "b[1]"]
    (store / "a*" / "b[1]").copy_to(store / "copy*")
    (store / "a*").remove()
    assert objects(store) == ["/a1", "/a?", "/copy*"]


# --- who may ----------------------------------------------------------------------------------------------------------


def test_without_credentials_it_says_so_and_anonymous_works_if_asked_for(source, server, tmp_path):
    place = location(f"{S3}/{uuid.uuid4().hex}")
    reshard(source, place, 2)
    place.fs.call_s3("put_bucket_acl", Bucket=store_server.BUCKET, ACL="public-read")
    for name in place.fs.find(place.path):
        place.fs.chmod(name, "public-read")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"HOME": str(tmp_path)}
    done = cli("inspect", place, env=env)
    assert done.returncode == 3 and "credentials" in done.stderr and "Traceback" not in done.stderr
    assert cli("inspect", place, env=env | {"FSSPEC_S3_ANON": "true"}).returncode == 0


def test_places_that_are_none(source, memory, tmp_path):
    done = called("inspect", "nosuch://bucket/x")
    assert done.returncode == 2 and "nosuch" in done.stderr
    assert called("inspect", memory / "nothing").returncode == 3
    assert called("reshard", memory / "nothing", memory / "out", "--mesh", "dp=1").returncode == 3
    assert called("inspect", f"file://{source}").returncode == 0


# --- saves of a training run ------------------------------------------------------------------------------------------


def test_a_rank_that_dies_ends_the_save_of_all_and_what_was_there_stays(server, tmp_path):
    """In a directory while it publishes, in a store while it writes: before the time-out, which this does not await.

    The claim in the store stays, as other ranks may still write there: without it their files would look like a step.
    """
    place = f"{S3}/{uuid.uuid4().hex}"
    told = printed(tmp_path, lost_ranks.__file__, tmp_path / "run", f"{place}/run", timeout=250)
    expected = (([-9, 0, 0], False, "/step-00000002"), ([0, -9, 0], True, "/step-00000002.2"))
    for case, (codes, is_claimed, following) in zip(json.loads(told), expected, strict=True):
        assert case["codes"] == codes
        [(_, heard), (_, same)] = case["survivors"]
        assert heard == same and len(set(heard)) == 1 and len(heard) == 2 and "a rank ended" in heard[0]
        assert case["restored"] == 1 and case["values"] == [1.0]
        assert case["claimed"] == is_claimed and case["next"] == following


def test_a_request_that_fails_fails_the_save_and_the_next_one_is_whole(server):
    place = location(f"{S3}/{uuid.uuid4().hex}")
    series, large = muonckpt.Series(place), {"w": torch.arange(3 << 20, dtype=torch.float32), "step": 1}
    series.async_save(1, large).result()
    large |= {"w": large["w"] + 1, "step": 2}
    with server.refusing(lambda query: query.get("partNumber") == ["2"]):
        saving = series.async_save(2, large)
        with pytest.raises(DestinationError, match=r"step-00000002/__0_0\.distcp.*Access Denied"):
            saving.future.result()  # which is to ask: the next save does not raise
    assert series.latest().step == 1 and {name.split("/")[1] for name in objects(place)} == {"step-00000001"}
    series.async_save(3, large).result()
    template = {"w": torch.zeros(3 << 20), "step": 0}
    assert series.restore(template).step == 3 and template["step"] == 2 and torch.equal(template["w"], large["w"])
