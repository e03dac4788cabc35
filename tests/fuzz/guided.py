"""A parser's inputs guided by coverage, with atheris: ``python tests/fuzz/guided.py PARSER [options of libFuzzer]``.

It is no dependency: ``pip install atheris`` first.  What it finds belongs into ``tests/data/fuzz/PARSER/``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["muonckpt"]):
    from support import fuzzed


def main() -> None:
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as folder:
        parser = fuzzed.parsers(Path(folder))[name]
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for data in parser.seeds:
            parser.parse(data)  # whatever is imported on first use is imported now
        for number, data in enumerate(parser.inputs(name)):
            (corpus / str(number)).write_bytes(data)
        atheris.Setup([*sys.argv, str(corpus)], lambda data: fuzzed.check(parser, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
