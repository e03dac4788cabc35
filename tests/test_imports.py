"""The import rules of the house, read from the source, and what starts without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "muonckpt": "muonckpt",
    "optimizer": "muonckpt.optimizer",
    "converters": "muonckpt.converters",
    "cli": "muonckpt.cli",
}

# Which rooms a room imports from, besides itself, the lowest room first.  A room is a package with what is in it;
# `store`, `layouts`, `runs`, `lab`, `optimizer` and `converters` have rooms in them.  "" is the public door.
RULES = {
    "names": "",
    "algebra": "names",
    "record": "names algebra",
    "ranks": "",
    "programs": "names algebra record",
    "layouts": "names algebra",
    "layouts/buffers": "names algebra layouts",
    "store/io": "names algebra record",
    "store/reading": "names algebra record store/io",
    "store/formats": "names algebra record programs layouts layouts/buffers store/io store/reading",
    "store": "names algebra record programs store/io store/reading store/formats",
    "store/verify": "names algebra record programs store/io store/reading store/formats store",
    "checkpoint": "names algebra record ranks programs layouts store/io store/reading store/formats store store/verify",
    "runs": "names record programs store/io store/reading store store/verify",
    "runs/series": "names programs store/io store/verify checkpoint runs converters/target converters/engine "
    "converters",
    "lab": "names record programs store/io store store/verify checkpoint optimizer/__init__",
    "optimizer/ground": "",
    "optimizer/triton": "algebra optimizer/ground",
    "converters/target": "names algebra record layouts layouts/buffers",
    "optimizer/newton_schulz": "names optimizer/ground optimizer/triton",
    "optimizer/planning": "names algebra optimizer/newton_schulz",
    "optimizer/methods": "names algebra layouts optimizer/ground optimizer/planning",
    "optimizer/step": "names algebra ranks layouts optimizer/ground optimizer/triton optimizer/newton_schulz "
    "optimizer/planning optimizer/methods",
    "optimizer": "names algebra layouts optimizer/ground optimizer/newton_schulz optimizer/planning "
    "optimizer/methods optimizer/step",
    "converters/engine": "names algebra record ranks programs layouts layouts/buffers store/io store/reading "
    "store/formats store checkpoint converters/target",
    "optimizer/layer_wise": "names algebra ranks layouts layouts/buffers optimizer/ground optimizer/methods "
    "optimizer/step optimizer",
    "converters/translate": "names algebra record programs store/formats store converters/engine",
    "optimizer/__init__": "optimizer/newton_schulz optimizer/methods optimizer optimizer/layer_wise",
    "converters/look": "names algebra record programs layouts/buffers store/io store/reading store store/verify "
    "runs converters/target converters/engine converters/translate",
    "compat": "names optimizer/__init__",
    "lab/forecasting": "names algebra record programs layouts layouts/buffers store/io store/reading store/verify "
    "converters/target optimizer/newton_schulz optimizer/planning optimizer/methods converters/look",
    "converters/compare": "names algebra record programs store/io store/reading store/formats store store/verify "
    "converters/engine converters/translate converters/look",
    "lab/page": "names record programs store/io store/reading store store/verify converters/look converters/compare",
    "lab/conformity": "names lab lab/step_audit",
    "lab/step_audit": "names algebra record programs store/io store/reading store store/verify converters/engine "
    "converters/translate converters/look converters/compare",
    "converters": "names record programs store/io store/reading store/formats store store/verify "
    "converters/target converters/engine converters/translate converters/look",
    "cli": "names record programs store/io store/reading store store/verify runs converters/target "
    "converters/engine converters/translate converters/look lab/forecasting converters/compare lab/page "
    "lab/conformity lab lab/step_audit converters",
    "lab/__init__": "names lab/conformity lab/forecasting lab/step_audit",
    "": "names layouts store store/verify checkpoint runs runs/series converters/look converters/compare lab/page "
    "lab lab/__init__ converters optimizer/__init__",
    "integrations": "names store/io store/verify checkpoint optimizer optimizer/__init__",
    "__main__": "cli",
}
TORCH = (
    "layouts/tensors",
    "layouts/boxed_tensor",
    "layouts/megatron_fsdp",
    "ranks/",
    "checkpoint/",
    "runs/series/",
    "compat/",
    "lab/built",
    "lab/conformity/",
    "lab/preflight",
    "integrations/",
    "optimizer/",
    "converters/engine/workers",
)
DOORS = {"lab", "optimizer"}
"""Packages whose ``__init__`` is a room of its own, above all of theirs: it re-exports what lies in several floors."""

TRITON = ("optimizer/triton/",)
NUMPY_FREE = ("algebra/box", "names/errors")
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}
MAY_COMMUNICATE = {
    "checkpoint/all_ranks",
    "lab/conformity/trials",
    "optimizer/step/exchange",
    "optimizer/layer_wise/buffers",
}


@dataclass(frozen=True)
class Module:
    """A source file: its path in the house, such as "store/io/new_file" (a package is its folder), and what it imports.

    Attributes:
        house: the modules of the house that it imports, also inside functions and for typing only.
        outside: the first names of everything else that it imports when it runs.
    """

    path: str
    file: Path
    house: frozenset[str]
    outside: frozenset[str]

    @property
    def room(self) -> str:
        if self.file.stem == "__init__" and self.path in DOORS:
            return f"{self.path}/__init__"
        package = self.path if self.file.stem == "__init__" else self.path.rpartition("/")[0]
        return "/".join(package.split("/")[:2]) or self.path


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every source file, by its path."""
    files = {}
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *file.relative_to(ROOT / folder).with_suffix("").parts]
            files[tuple(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    modules = {}
    for name, file in files.items():
        stub = file.with_suffix(".pyi")
        texts = [file.read_text(), *([stub.read_text()] if stub.exists() else [])]
        imported = [found for text in texts for found in imports(ast.parse(text), name, file.stem == "__init__")]
        # `from . import x` and `from .x import y` both mean the module x.
        house = {found if found in files else found[:-1] for found in imported if found[0] == "muonckpt"}
        modules["/".join(name[1:])] = Module(
            "/".join(name[1:]),
            file,
            frozenset("/".join(found[1:]) for found in house if found in files and found != name),
            frozenset(found[0] for found in imported if found[0] != "muonckpt"),
        )
    return modules


def imports(tree: ast.Module, name: tuple[str, ...], package: bool):
    """Absolute names of everything that a module imports."""
    base = name if package else name[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            yield from ((*above, *module, alias.name) for alias in node.names)


def permitted(room: str) -> set[str]:
    return set(RULES[room].split())


def test_rooms_import_only_what_the_house_allows(modules):
    wrong = [
        f"{module.path} imports {found}"
        for module in modules.values()
        for found in module.house
        if modules[found].room != module.room and modules[found].room not in permitted(module.room)
    ]
    assert not wrong


def test_every_permission_is_used(modules):
    used = defaultdict(set)
    for module in modules.values():
        used[module.room] |= {modules[found].room for found in module.house} - {module.room}
    assert {room: set(rule.split()) for room, rule in RULES.items()} == {room: used[room] for room in RULES}


def test_no_module_imports_itself_through_others(modules):
    """A CycleError names the modules."""
    TopologicalSorter({module.path: module.house for module in modules.values()}).prepare()


def test_no_room_imports_itself_through_others():
    """Else rooms have no order in which they can be read, and moving one moves all."""
    needs = {room: permitted(room) for room in RULES}
    for middle in RULES:  # Warshall's closure
        for room in RULES:
            if middle in needs[room]:
                needs[room] |= needs[middle]
    assert not [room for room in RULES if room in needs[room]]


def test_nobody_needs_the_lab():
    """What observes and advises: commands and the public door import it, and nothing else of the house."""
    visitors = {room for room in RULES if any(needed.startswith("lab") for needed in permitted(room))}
    assert visitors <= {
        "",
        "cli",
        "lab/__init__",
        "lab/conformity",
        "lab/forecasting",
        "lab/page",
        "lab/step_audit",
    }


@pytest.mark.parametrize(("package", "where"), [("torch", TORCH), ("triton", TRITON)])
def test_a_heavy_package_is_imported_in_its_rooms_only(package, where, modules):
    assert not [m.path for m in modules.values() if package in m.outside and not m.path.startswith(where)]


def test_the_first_files_of_the_algebra_need_no_numpy(modules):
    assert not [name for name in NUMPY_FREE if "numpy" in modules[name].outside]


def test_collectives_are_in_one_file_of_a_room(modules):
    calling = {
        module.path
        for module in modules.values()
        for node in ast.walk(ast.parse(module.file.read_text() if "torch" in module.outside else ""))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
        and node.func.attr in COLLECTIVES
    }
    assert calling == MAY_COMMUNICATE


def test_files_are_chapters(modules):
    assert not {m.path: n for m in modules.values() if (n := len(m.file.read_text().splitlines())) > 700}


def test_every_package_says_what_is_in_it(modules):
    packages = [module for module in modules.values() if module.file.stem == "__init__"]
    assert not [package.path for package in packages if not ast.get_docstring(ast.parse(package.file.read_text()))]
    for package in packages:
        contents = ast.get_docstring(ast.parse(package.file.read_text()))
        [first] = re.findall(r"Open\s+``([\w/]+)``\s+first", contents) or [None]
        assert first and (package.file.parent / f"{first}.py").exists(), (package.path, first)


FORMATS = "muonckpt.store.formats"
NEVER = {
    "torch",
    "rich",  # no terminal
    "muonckpt.converters.look.buffer_summary",
    "muonckpt.converters.target.buffer_layouts",
    "muonckpt.converters.engine.buffer_files",
    "muonckpt.converters.engine.whole_files",
    "muonckpt.converters.translate.translator",
    "muonckpt.layouts.buffers.buffer_layout",
    f"{FORMATS}.flat_buffers",
    f"{FORMATS}.layer_wise",
    f"{FORMATS}.safetensors",
    f"{FORMATS}.zarr",
    f"{FORMATS}.zarr_writer",
    "fsspec",
    "importlib.metadata",
    "tomllib",
}
"""What no command needs for one of our checkpoints in rows: other formats, layouts and programs, stores, plug-ins."""

OF_DCP = {f"{FORMATS}.dcp", f"{FORMATS}.dcp_metadata"}
OF_VERIFY = {"muonckpt.store.verify.audit"}
OF_READING_ALL = {"muonckpt.store.verify.small_tensors"}
OF_WRITING = {
    "muonckpt.converters.rewrite",
    "muonckpt.converters.engine.container",
    "muonckpt.converters.target",
    "muonckpt.layouts.mesh",
    f"{FORMATS}.torch_save.tensor_item",
}
UNUSED = {
    "inspect": OF_DCP | OF_VERIFY | OF_READING_ALL | OF_WRITING | {"logging"},
    "verify": OF_DCP | {"muonckpt.converters", "muonckpt.layouts"},
    "diff": OF_DCP | OF_VERIFY | OF_READING_ALL | OF_WRITING,
    "stats": OF_DCP | OF_VERIFY | OF_WRITING,
    "report": OF_DCP | OF_VERIFY | OF_WRITING,
    "reshard": OF_VERIFY | OF_READING_ALL | {"muonckpt.converters.translate.request"},
}
"""What a command does not need besides."""


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


@pytest.mark.parametrize("arguments", [["--help"], ["lab", "plan", "--help"], ["lab", "--help"]])
def test_help_imports_neither_torch_nor_numpy(arguments):
    assert not {"torch", "numpy", "rich"} & loaded_by(*arguments)


def test_commands_import_only_what_they_need(tiny_checkpoint, tmp_path):
    """Else every command would take longer to start, for the sake of others."""
    source = str(tiny_checkpoint)
    commands = {
        "inspect": [source],
        "verify": [source],
        "diff": [source, source],
        "stats": [source],
        "report": [source, source, "-o", str(tmp_path / "page.html")],
        "reshard": [source, str(tmp_path / "out"), "--mesh", "dp=3"],
    }
    excess = {name: (NEVER | UNUSED[name]) & loaded_by(name, *rest) for name, rest in commands.items()}
    assert {name: found for name, found in excess.items() if found} == {}
