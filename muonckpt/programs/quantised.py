"""Quantised weights: codes in a narrow dtype, with the scales that give them their values beside them.

Without their scales codes are no numbers: they are neither cast nor compared as such.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..names.wording import counted
from ..record.record import StateRecord

_CODE_DTYPES = re.compile("float8|float4|u?int[1-8]$")
_PACKED_WORDS = frozenset({"qweight", "packed"})
_CODE_WORDS = frozenset({"packed", "blocks", "data", "qdata", "codes", "int", "q"})
_SCALE_WORDS = frozenset({"scale", "scales", "qscale", "absmax", "scb"})
"""The beginnings of dtypes of codes, and words in the names of packed codes in int32, of any codes, and of scales."""


def scales_of_quantised(tensors: Iterable[StateRecord]) -> dict[str, str]:
    """Return the keys of quantised weights, each with the key of its scales.

    The scales of ``l.weight`` are ``l.weight_scale_inv``, ``l.weight.absmax``, ``l.scales`` or the like.
    """
    # The codes with their module and words, and by module the scales by the words before theirs.
    codes: dict[str, tuple[tuple[object, ...], str, tuple[str, ...]]] = {}
    scales: defaultdict[tuple[object, ...], dict[tuple[str, ...], str]] = defaultdict(dict)
    module: tuple[object, ...]
    for tensor in tensors:
        *modules, leaf = str(tensor.path[-1]).split(".")
        module, words = (*tensor.path[:-1], *modules), tuple(filter(None, re.split("[_:]", leaf.lower())))
        places = [place for place, word in enumerate(words) if word in _SCALE_WORDS]
        if places:
            former = scales[module].get(words[: places[0]], tensor.key)  # the scales of scales have longer names
            scales[module][words[: places[0]]] = min(former, tensor.key, key=len)
        elif not tensor.shape:
            continue  # a number beside them, which may say how they are coded
        elif _CODE_DTYPES.match(tensor.dtype) or (tensor.dtype == "int32" and not _PACKED_WORDS.isdisjoint(words)):
            codes[tensor.key] = module, leaf, words
    # Scales are beside the codes, under their name or alone in the module, or below the codes' name.
    quantised: dict[str, str] = {}
    for key, (module, leaf, words) in codes.items():
        stem = words
        while len(stem) > 1 and stem[-1] in _CODE_WORDS:
            stem = stem[:-1]
        is_weight = any("weight" in word or word in _CODE_WORDS for word in words)
        beside, below = scales.get(module, {}), scales.get((*module, leaf), {})
        found = [beside[name] for name in (words, stem, *[()] * is_weight) if name in beside] + [*below.values()]
        if found:
            quantised[key] = found[0]
    return quantised


def describe_quantised(quantised: Mapping[str, str]) -> str:
    """Return a description of the quantised tensors."""
    key, scales = next(iter(quantised.items()))
    return f"{counted(len(quantised), 'quantised weight')}, such as {key!r} with its scales in {scales!r}"
