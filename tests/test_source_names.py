"""Conventions of names and of the tests, read from the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
FOLDERS = ("muonckpt", "optimizer", "converters", "cli")
PRODUCT = [file for folder in FOLDERS for file in sorted((TESTS.parent / folder).rglob("*.py"))]

INTERFACES = {"Muon"}
"""Classes that several modules define on purpose: the optimizer and its stand-ins for others."""


def test_no_test_file_is_imported():
    """What tests share is in tests/support/: a test file can be moved, renamed or deleted alone."""
    wrong = [
        f"{file.relative_to(TESTS)}:{node.lineno} imports {module}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        for module in imported(node)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert not wrong


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
    return []


@pytest.mark.parametrize(
    "source", ["import test_x", "from test_x import y", "from folder.test_x import y", "from folder import test_x"]
)
def test_every_way_to_import_a_test_file_is_seen(source):
    [statement] = ast.parse(source).body
    assert any(module.rpartition(".")[2] == "test_x" for module in imported(statement))


def test_names_of_test_files_differ():
    """pytest imports them by name alone."""
    names = [file.name for file in FILES if file.name.startswith("test_")]
    assert len(names) == len(set(names))


def test_a_class_name_occurs_once():
    """Who reads a class name in one file and meets it in another can trust that it is the same thing.

    Functions and files may share a name where each says what its folder makes obvious, such as ``parse``.
    """
    homes = defaultdict(set)
    for file in PRODUCT:
        for name in classes(ast.parse(file.read_text())):
            homes[name].add(str(file.relative_to(TESTS.parent)))
    public = {name: files for name, files in homes.items() if not name.startswith("_") and name not in INTERFACES}
    assert {name: sorted(files) for name, files in public.items() if len(files) > 1} == {}


def classes(module: ast.Module) -> Iterator[str]:
    """Yield the names of the classes that a module defines."""
    return (node.name for node in module.body if isinstance(node, ast.ClassDef))


def test_classes_are_seen():
    assert list(classes(ast.parse("A = 1\nclass D: pass\ndef e(): f = 1\nimport g"))) == ["D"]
