"""The import rules of the house, read from the source, and what starts without torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "muonckpt": "muonckpt",
    "optimizer": "muonckpt.optimizer",
    "converters": "muonckpt.converters",
    "cli": "muonckpt.cli",
}

# Which rooms a room may import from (besides itself).  A room is a sub-package, or a module of the core.
RULES = {
    "errors": set(),
    "version": set(),
    "box": {"errors"},
    "overlap": set(),
    "layout": {"errors", "box", "overlap"},
    "plan": {"errors", "box", "overlap", "layout"},
    "fingerprint": {"box"},
    "record": {"errors", "box", "layout"},
    "layouts": {"errors", "box", "layout", "plan"},
    "store": {"errors", "box", "layout", "layouts", "plan", "fingerprint", "record"},
    "checkpoint": {"errors", "record", "store", "version"},
    "optimizer": {"errors", "box", "overlap", "layout", "plan", "layouts"},
    "converters": {"errors", "box", "layout", "layouts", "plan", "fingerprint", "record", "store", "version"},
    "cli": {"errors", "record", "store", "converters", "layouts", "fingerprint", "version"},
    "__init__": {"checkpoint"},
}
TORCH = {"layouts/tensors", "store/dcp_writer", "store/dcp_reader", "store/annotation", "store/bits", "checkpoint"}
COLLECTIVES = {
    "all_to_all_single",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "all_gather_object",
    "all_gather_into_tensor",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_single",
    "send",
    "recv",
}
MAY_COMMUNICATE = {"optimizer/exchange", "optimizer/layer_wise", "checkpoint"}
NUMPY_FREE = {"box", "errors"}


def modules():
    return list(every_module())


def every_module():
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *file.relative_to(ROOT / folder).with_suffix("").parts]
            yield pytest.param(file, parts, id=".".join(parts[1:]))


def imports(file: Path, parts: list[str]):
    """Absolute names of everything that a module imports (also inside functions, but not for typing only)."""
    tree = ast.parse(file.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in typing_only:
            base = parts[: len(parts) - node.level] if node.level else []
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield [*base, *module, alias.name]


@pytest.mark.parametrize(("file", "parts"), modules())
def test_rooms_import_only_what_the_house_allows(file, parts):
    room = parts[1]
    name = "/".join(parts[1:])
    for found in imports(file, parts):
        if found[0] == "muonckpt" and len(found) > 1 and found[1] != room:
            assert found[1] in RULES[room], f"{name} imports {'.'.join(found)}"
        if found[0] == "torch":
            assert name in TORCH or room == "optimizer", f"{name} imports torch"
        if found[0] == "numpy":
            assert name not in NUMPY_FREE


@pytest.mark.parametrize(("file", "parts"), modules())
def test_collectives_are_in_one_place(file, parts):
    name = "/".join(parts[1:])
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
    }
    assert not called & COLLECTIVES or name in MAY_COMMUNICATE


def test_files_are_small():
    long = {str(file.values[0]): n for file in modules() if (n := len(file.values[0].read_text().splitlines())) > 400}
    assert not long


UNUSED = {
    "muonckpt.cli.buffer_tables",
    "muonckpt.converters.target.buffer_layouts",
    "muonckpt.converters.target.whole_files",
    "muonckpt.layouts.buffers",
    "muonckpt.store.formats.flat_buffers",
    "muonckpt.store.formats.megatron.layer_wise",
    "muonckpt.store.formats.safetensors.folder",
    "muonckpt.store.formats.zarr.hierarchy",
    "tomllib",
}
"""What is not needed to cut one of our checkpoints by rows."""


def loaded_by(*arguments: str) -> set[str]:
    """Everything in sys.modules after a command has run."""
    script = (
        "import sys, json\n"
        "from muonckpt.cli.main import run\n"
        f"code = run({list(arguments)!r})\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    code, names = json.loads(out.splitlines()[-1])
    assert code == 0
    return set(names)


def test_help_imports_neither_torch_nor_numpy():
    assert not {"torch", "numpy", "rich"} & loaded_by("--help")


def test_inspect_verify_and_reshard_run_without_torch(tiny_checkpoint, tmp_path):
    assert "torch" not in loaded_by("inspect", str(tiny_checkpoint), "--tensors")
    assert "torch" not in loaded_by("verify", str(tiny_checkpoint))
    loaded = loaded_by("reshard", str(tiny_checkpoint), str(tmp_path / "out"), "--mesh", "dp=3")
    assert "torch" not in loaded
    assert not UNUSED & loaded, "what only other formats and layouts need makes every command slower to start"
