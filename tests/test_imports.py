"""The rules of imports between packages, read from the source, and what starts without torch."""

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

# The packages that a package imports from, besides itself, the lowest first.  "store" has the files of the folder
# `store` itself, "store/io" those of the folder in it; "" is `muonckpt/__init__`.
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
PUBLIC = {"lab", "optimizer"}
"""Packages whose ``__init__`` is above all of their folders, because it re-exports what is in several of them."""

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
    """A source file: its path in the project, as "store/io/new_file" (a package is its folder), and its imports.

    Attributes:
        inside: the modules of the project that it imports, also inside functions and for typing only.
        outside: the first names of everything else that it imports when it runs.
    """

    path: str
    file: Path
    inside: frozenset[str]
    outside: frozenset[str]

    @property
    def package(self) -> str:
        if self.file.stem == "__init__" and self.path in PUBLIC:
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
        inside = {found if found in files else found[:-1] for found in imported if found[0] == "muonckpt"}
        modules["/".join(name[1:])] = Module(
            "/".join(name[1:]),
            file,
            frozenset("/".join(found[1:]) for found in inside if found in files and found != name),
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


def permitted(package: str) -> set[str]:
    return set(RULES[package].split())


def test_packages_import_only_what_the_rules_allow(modules):
    wrong = [
        f"{module.path} imports {found}"
        for module in modules.values()
        for found in module.inside
        if modules[found].package != module.package and modules[found].package not in permitted(module.package)
    ]
    assert not wrong


def test_every_permission_is_used(modules):
    used = defaultdict(set)
    for module in modules.values():
        used[module.package] |= {modules[found].package for found in module.inside} - {module.package}
    assert {package: set(rule.split()) for package, rule in RULES.items()} == {
        package: used[package] for package in RULES
    }


def test_no_module_imports_itself_through_others(modules):
    """A CycleError names the modules."""
    TopologicalSorter({module.path: module.inside for module in modules.values()}).prepare()


def test_no_package_imports_itself_through_others():
    """Else packages have no order in which they can be read, and moving one moves all."""
    needs = {package: permitted(package) for package in RULES}
    for middle in RULES:  # Warshall's closure
        for package in RULES:
            if middle in needs[package]:
                needs[package] |= needs[middle]
    assert not [package for package in RULES if package in needs[package]]


def test_the_picture_of_the_architecture_is_that_of_the_rules():
    """A package is drawn with the folders in it: "store" stands for "store/io", too."""
    picture = re.search(r"```text\n(.*?)```", (ROOT / "docs/design/architecture.md").read_text(), re.DOTALL)
    assert picture is not None
    rows = re.findall(r"^(\S+) +-> ([\w/]+(?:, [\w/]+)*)", picture[1], re.MULTILINE)
    arrows = {package: set(below.split(", ")) for package, below in rows}

    def drawn(package: str) -> str:
        return package if package in arrows else package.partition("/")[0] or "muonckpt"

    def reached(package: str) -> set[str]:
        return {package}.union(*map(reached, arrows.get(package, ())))

    packages = RULES.keys() - {"__main__"}
    needed = {(drawn(package), drawn(below)) for package in packages for below in permitted(package)}
    assert not {(package, below) for package, below in needed if below not in reached(package)}
    assert not {(package, below) for package in arrows for below in arrows[package]} - needed


def test_no_package_needs_the_lab():
    """What observes and advises: commands and `muonckpt` import it, and no other package does."""
    visitors = {package for package in RULES if any(needed.startswith("lab") for needed in permitted(package))}
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
def test_a_heavy_package_is_imported_in_its_packages_only(package, where, modules):
    assert not [m.path for m in modules.values() if package in m.outside and not m.path.startswith(where)]


def test_the_first_files_of_the_algebra_need_no_numpy(modules):
    assert not [name for name in NUMPY_FREE if "numpy" in modules[name].outside]


def test_collectives_are_in_one_file_of_a_package(modules):
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
