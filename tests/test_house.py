"""The rules of the tests' own house, read from their source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))


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
    "source", ["import test_x", "from test_x import y", "from room.test_x import y", "from room import test_x"]
)
def test_every_way_to_import_a_test_file_is_seen(source):
    [statement] = ast.parse(source).body
    assert any(module.rpartition(".")[2] == "test_x" for module in imported(statement))


def test_names_of_test_files_differ():
    """pytest imports them by name alone."""
    names = [file.name for file in FILES if file.name.startswith("test_")]
    assert len(names) == len(set(names))
