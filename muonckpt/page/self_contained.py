"""One HTML file of data, style and script.

Names in a checkpoint may be hostile.  They are in the page as JSON only, in which no ``<`` occurs, and the script shows
them as text; a policy lets browsers run and apply only our own script and style, known by their hashes, and load
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

_SCRIPTS = ("model", "table", "charts", "map", "tensor", "sections", "main")

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def html_of(title: str, data: Mapping[str, Any]) -> str:
    """Return the page, in ASCII; ``data`` is JSON data, as `plain` gives it."""
    style = _asset("page.css")
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return Template(_asset("page.html")).substitute(
        title=escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'",
        style=style,
        script=script,
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPED),
    )


def plain(value: Any) -> Any:
    """Convert data to what JSON can hold: infinite and NaN numbers, and whatever else it lacks, as text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return str(value)


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
