"""One HTML file of data, style and script, which needs no network.

Names in a checkpoint may be hostile.  They are in the page as JSON, in which no ``<`` occurs and which the script shows
as text, and escaped in the summary for browsers without scripts.  A policy lets browsers run and apply only our own
script and style, known by their hashes, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from ...names.errors import DestinationError
from ...names.wording import as_json, printable
from ...store.io.new_file import write_synced
from ...store.verify.diagnosis import Diagnosis

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


class HtmlPage(ABC):
    """A page with a ``name``, data, a diagnosis and scripts (names of assets)."""

    __slots__ = ()
    diagnosis: Diagnosis
    scripts: ClassVar[Sequence[str]]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the checkpoint or the run."""

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """The labelled lines that a browser without scripts shows besides the diagnosis."""
        yield from ()

    @property
    def table(self) -> Sequence[Sequence[str]]:
        """The rows of a table that such a browser shows, the header first; none if there is no table."""
        return ()

    @property
    def lines(self) -> Iterator[str]:
        """The lines for a terminal with the faults and the next step; none if there is no fault."""
        return self.diagnosis.lines

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, as docs/guide/report.md describes it."""

    def html(self) -> str:
        """Return the page, in ASCII."""
        style = _asset("page.css")
        script = "\n".join(_asset(f"{name}.js") for name in self.scripts)
        return Template(_asset("page.html")).substitute(
            title=_escaped(f"{self.name} - muonckpt report"),
            summary="\n".join(self._summary()),
            policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
            "form-action 'none'",
            style=style,
            script=script,
            data=json.dumps(self.to_json(), allow_nan=False, separators=(",", ":")).translate(_ESCAPED),
        )

    def _summary(self) -> Iterator[str]:
        """Yield the HTML that is there before the script has run, or where none does."""
        yield f"<h1>{_escaped(self.name)}</h1>"
        yield f"<h2>Verdict</h2>\n<p><b>{_escaped(self.diagnosis.sentence or 'Nothing is known to be lost')}.</b></p>"
        rows = [f"<dt>{_escaped(label)}</dt><dd>{_escaped(text)}</dd>" for label, text in self.facts]
        yield f'<dl class="facts">{"".join(rows)}</dl>'
        if self.table:
            cells = ("".join(f"<td>{_escaped(cell)}</td>" for cell in row) for row in self.table)
            yield f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        if self.diagnosis.remedies:
            yield '<h3>What to do</h3>\n<ol type="a" class="remedies">'
            for remedy in self.diagnosis.remedies:
                yield f"<li><code>{_escaped(remedy.command)}</code><p>{_escaped(remedy.gives)}</p></li>"
            yield "</ol>"

    def write(self, file: str | os.PathLike[str]) -> int:
        """Write the page into a local file, which appears whole and replaces an earlier one; return its bytes.

        Raises:
            DestinationError: it cannot be written.
        """
        place, text = Path(file), self.html().encode("ascii")
        draft = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
        try:
            write_synced(draft, text)
            draft.replace(place)
        except OSError as error:
            raise DestinationError(f"the report cannot be written to {place}: {error}") from error
        finally:
            with suppress(OSError):  # it has its name, or was never made
                draft.unlink()
        return len(text)


_NONFINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


def plain(result: Any) -> Any:
    """Convert a result to JSON data; infinite and NaN numbers become text, because browsers read none."""
    return json.loads(json.dumps(result, default=as_json), parse_constant=_NONFINITE.get)


def rounded(value: Any) -> Any:
    """Round the floats in data to five significant digits."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case Mapping():
            return {name: rounded(entry) for name, entry in value.items()}
        case list() | tuple():
            return [rounded(entry) for entry in value]
        case _:
            return value


def rounded_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the columns of a table with these names, rounded."""
    columns = {}
    for name in names:
        columns[name] = [rounded(row[name]) for row in rows]
    return columns


def _escaped(text: str) -> str:
    """Return text as HTML in ASCII that shows it and does nothing else."""
    return escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode()


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
