"""The words of CONTRIBUTING's list stand nowhere that a user or a contributor reads."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("muonckpt", "optimizer", "converters", "cli", "examples", "benchmarks")
LIST = re.search(r"^## Words\n\n```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
assert LIST
ROWS = [row.split(": ") for row in LIST[1].splitlines()]
REPLACEMENTS = {word: better for words, better in ROWS for word in words.split(", ")}
assert len(REPLACEMENTS) == 13
PATTERN = re.compile(rf"\b({'|'.join(REPLACEMENTS)})(s|ed|ing)?\b", re.IGNORECASE)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield names, comments and strings of several words of a module, or the paragraphs of a page, with their lines."""
    text = path.read_text()
    if path.suffix == ".md":
        pages = re.sub(r"```.*?```|`[^`\n]+`", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
        yield from enumerate(pages.splitlines(), 1)
        return
    strings = {
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }  # the text of an f-string, from 3.12 on
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type in strings and " " in token.string):
            yield from enumerate(token.string.splitlines(), token.start[0])
        elif token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " ")


def replaced_in(path: Path) -> list[str]:
    return [
        f"{path.name}:{line}: {found[0]}, write: {REPLACEMENTS[found[1].lower()]}"
        for line, text in prose_of(path)
        for found in PATTERN.finditer(text)
    ]


def test_words_of_our_own_are_written_as_the_field_does():
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert len(modules) > 200 and len(pages) > 40
    assert [found for path in [*modules, *pages] for found in replaced_in(path)] == []


def test_a_word_is_found_in_every_kind_of_prose(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Built anew."""\n# nobody waits\nx = "nobody"\ny = f"the rest is mended"\nplan_anew = 1\n'
    )
    (tmp_path / "b.md").write_text("`dealt` is a key.\n\n```\nanew\n```\nIt is told by\nSick.\n")
    again, another = "anew, write: again, from zero", "nobody, write: no rank, another process, or the passive"
    found = [f"a.py:1: {again}", f"a.py:2: {another}", "a.py:4: mended, write: fix", f"a.py:5: {again}"]
    assert replaced_in(tmp_path / "a.py") == found
    found = ["b.md:6: is told, write: is reported, reported by", "b.md:7: Sick, write: suspicious"]
    assert replaced_in(tmp_path / "b.md") == found
