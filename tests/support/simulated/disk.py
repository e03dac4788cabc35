"""A disk that forgets: real files in memory whose changes are logged, and the states that a power loss may leave.

A change is on the disk when its file or folder was synced.  Of all others a power loss keeps any part: pages of bytes,
lengths, names in folders.  As ext4 orders them, names go in the order of the calls, and each sync takes all before it.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

PAGE = 4096

FSTAT, LSTAT = os.fstat, os.lstat
"""The calls of the system, before they are intercepted."""


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever names it has.

    Attributes:
        number: its inode, in the order of creation: the same in each run, and after a power loss.
        written, changed: its times.
        data, names: what the disk has of it, as far as the log was applied.
    """

    number: int
    is_folder: bool
    written: int
    changed: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)

    def resize(self, length: int) -> None:
        self.data[:] = self.data[:length].ljust(length, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        self.data.extend(bytes(max(offset - len(self.data), 0)))
        self.data[offset : offset + len(data)] = data

    def rename(self, source: tuple[Node, str] | None, target: tuple[Node, str] | None) -> None:
        if source is not None:
            folder, name = source
            if folder.names.get(name) is not self:  # what made this name was lost
                return
            del folder.names[name]
        if target is not None:
            folder, name = target
            folder.names[name] = self


@dataclass
class Change:
    """A page of a file was written, or a name of a folder changed: `apply` does it to what the disk has.

    It is safe once its place, the file or the folder, was synced.
    """

    place: Node
    apply: Callable[[], None]
    is_synced: bool = False


class Disk:
    """The folder ``root``, in memory; its methods say what calls have changed, after they have done it.

    Attributes:
        log: the changes that the disk may not have, and those after them.
        orders_names: whether it is as ext4 is.
    """

    def __init__(self, root: str) -> None:
        self.root, self.now = root, 1_700_000_000 * 10**9
        self.orders_names = False
        self.nodes: dict[int, Node] = {}
        self.log: list[Change] = []
        self.created_nodes = 0
        Path(root).mkdir()
        self.top = self._new(root)

    def _new(self, path: str) -> Node:
        self.created_nodes += 1
        status = LSTAT(path)
        node = Node(self.created_nodes, stat.S_ISDIR(status.st_mode), self.now, self.now)
        self.nodes[status.st_ino] = node
        return node

    def node(self, place: str | int) -> Node | None:
        """The node of a name or of an open file; None if there is none."""
        try:
            status = FSTAT(place) if isinstance(place, int) else LSTAT(place)
            return self.nodes.get(status.st_ino)
        except OSError:
            return None

    def touched(self, *nodes: Node) -> None:
        self.now += 1
        for node in nodes:
            node.written = node.changed = self.now

    def wrote(self, node: Node, offset: int, data: bytes) -> None:
        for page in range(offset - offset % PAGE, offset + len(data), PAGE):
            start, end = max(page, offset), min(page + PAGE, offset + len(data))
            self.log.append(Change(node, partial(node.write, start, data[start - offset : end - offset])))
        self.touched(node)

    def resized(self, node: Node, length: int) -> None:
        self.log.append(Change(node, partial(node.resize, length)))
        self.touched(node)

    def renamed(self, node: Node | None, source: str | None, target: str | None) -> None:
        """Note that a node, or a new one, has lost a name, got one, or both at once."""
        if node is None:
            assert target is not None
            node = self._new(target)
        old, new = [None if path is None else self._split(path) for path in (source, target)]
        folders = [place[0] for place in (old, new) if place is not None]
        self.log.append(Change(folders[-1], partial(node.rename, old, new)))
        self.touched(*folders)
        node.changed = self.now

    def _split(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        node = self.node(folder)
        assert node is not None
        return node, name

    def synced(self, node: Node) -> None:
        for change in self.log:
            change.is_synced |= change.place is node or (self.orders_names and change.place.is_folder)
        while self.log and self.log[0].is_synced:
            self.log.pop(0).apply()

    def lose_power(self, dice: random.Random) -> None:
        """Leave a state in which the disk may be after a power loss, as the only one."""
        keeps, is_over = dice.choice((0.0, 0.1, 0.5, 0.9, 1.0)), False
        for change in self.log:
            is_ordered = self.orders_names and change.place.is_folder
            is_kept = change.is_synced or (dice.random() < keeps and not (is_ordered and is_over))
            is_over |= is_ordered and not is_kept
            if is_kept:
                change.apply()
        # The same nodes in a new folder.
        shutil.rmtree(self.root)
        self.log, self.nodes = [], {}
        self._build(self.top, self.root, {})

    def _build(self, node: Node, path: str, places: dict[Node, str]) -> None:
        if node in places:
            os.link(places[node], path)
        elif node.is_folder:
            Path(path).mkdir()
            for name, child in node.names.items():
                self._build(child, f"{path}/{name}", places)
        else:
            Path(path).write_bytes(node.data)
            places[node] = path
        self.nodes[LSTAT(path).st_ino] = node
