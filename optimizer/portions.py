"""Portions: what of many tensors is computed at once.

Few enough elements that each operation finds in the processor's cache what the one before it has left, and that
temporary tensors are of a portion and not of all parameters; and tensors enough that beginning an operation is shared.
Only for what is computed element by element, alike wherever an element lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .rounding import Tensors

ELEMENTS = 2**16
"""Of a portion, for each thread: five times as many float32 fit into the second cache of today's processors."""

LAUNCHED = 2**26
"""Of a portion on another device, where to launch an operation costs more than its cache would save."""


def in_portions(lists: Sequence[Tensors]) -> Iterator[list[Tensors]]:
    """Cut parallel lists of tensors of one device, of equal shapes at equal places, to portions of at most `ELEMENTS` a
    thread, or `LAUNCHED`.

    Yields:
        of each list the same tensors; or of one that is larger a flat part, or all of it where it is not contiguous in
        every list.
    """
    if not lists[0]:
        return
    most = ELEMENTS * torch.get_num_threads() if lists[0][0].device.type == "cpu" else LAUNCHED
    begin = size = 0
    for number, tensor in enumerate(lists[0]):
        numel = tensor.numel()
        if size + numel > most:
            if begin < number:
                yield [tensors[begin:number] for tensors in lists]
            begin, size = number, 0
            if numel > most:
                yield from _cut([tensors[number] for tensors in lists], most)
                begin = number + 1
                continue
        size += numel
    if begin < len(lists[0]):
        yield [tensors[begin:] for tensors in lists]


def _cut(parallel: Tensors, most: int) -> Iterator[list[Tensors]]:
    if all(tensor.is_contiguous() for tensor in parallel):
        for begin in range(0, parallel[0].numel(), most):
            yield [[tensor.view(-1)[begin : begin + most]] for tensor in parallel]
    else:
        yield [[tensor] for tensor in parallel]
