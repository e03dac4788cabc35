"""A disk that forgets: real files in memory whose changes are logged, and the states that a power loss may leave.

A change is on the disk when its file or folder was synced.  Of all others a power loss keeps any part: pages of bytes,
lengths, names in folders.  As ext4 orders them, names go in the order of the calls, and each sync takes all before it.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from dataclasses import dataclass, field

PAGE = 4096

OPEN, CLOSE, PREAD, LINK, MKDIR, STAT = os.open, os.close, os.pread, os.link, os.mkdir, os.stat
"""The calls of the system, before they are intercepted."""


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever names it has.

    Attributes:
        number: its inode, in the order of creation: the same in each run, and after a power loss.
        kept: bytes of a file that are on the disk.
        changes: later ones, as offset and bytes; zeros that may be missing where only the length changes.
        names: what is in a folder, as the last power loss left it.
        written, changed: its times.
    """

    number: int
    is_folder: bool
    written: int
    changed: int
    kept: bytes = b""
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    names: dict[str, Node] = field(default_factory=dict)


@dataclass
class Renaming:
    """A change of names: a node leaves a folder, comes into one, or both at once."""

    node: Node
    source: tuple[Node, str] | None
    target: tuple[Node, str] | None
    is_synced: bool = False


class Disk:
    """The folder ``root``, in memory."""

    def __init__(self, root: str) -> None:
        self.root, self.now = root, 1_700_000_000 * 10**9
        MKDIR(root)
        self.orders_names, self.created_nodes = False, 0
        self.nodes: dict[int, Node] = {}
        self.log: list[Renaming] = []
        self.top = self._new(root)

    def _new(self, path: str) -> Node:
        self.created_nodes += 1
        status = STAT(path)
        node = Node(self.created_nodes, stat.S_ISDIR(status.st_mode), self.now, self.now)
        self.nodes[status.st_ino] = node
        return node

    def node(self, place: str | int) -> Node | None:
        """The node of a name or of an open file; None if there is none."""
        try:
            return self.nodes.get(STAT(place, follow_symlinks=isinstance(place, int)).st_ino)
        except OSError:
            return None

    def shown(self, status: os.stat_result) -> os.stat_result:
        """The status of a file, with its number and the times of the simulation."""
        node = self.nodes[status.st_ino]
        values = [*status[:10]]
        values[1], values[7:10] = node.number, [node.written // 10**9, node.written // 10**9, node.changed // 10**9]
        times = {"st_mtime": node.written / 1e9, "st_mtime_ns": node.written, "st_ctime_ns": node.changed}
        return os.stat_result(values, {**times, "st_ctime": node.changed / 1e9, "st_blocks": status.st_blocks})

    # --- what calls have changed, after they have done it -----------------------------------------------------------

    def touched(self, *nodes: Node) -> None:
        self.now += 1
        for node in nodes:
            node.written = node.changed = self.now

    def wrote(self, node: Node, offset: int, data: bytes) -> None:
        node.changes.append((offset, data))
        self.touched(node)

    def renamed(self, node: Node | None, source: str | None, target: str | None) -> None:
        """Note that a node, or a new one, has lost a name, got one, or both at once."""
        if node is None:
            assert target is not None
            node = self._new(target)
        places = [None if path is None else self._split(path) for path in (source, target)]
        self.log.append(Renaming(node, *places))
        self.touched(*(place[0] for place in places if place is not None))
        node.changed = self.now

    def _split(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        node = self.node(folder)
        assert node is not None
        return node, name

    def synced(self, node: Node, handle: int) -> None:
        if not node.is_folder:
            readable = OPEN(f"/proc/self/fd/{handle}", os.O_RDONLY)
            node.kept, node.changes = PREAD(readable, 1 << 30, 0), []
            CLOSE(readable)
        for change in self.log:
            folder = (change.target or change.source or (None,))[0]
            change.is_synced |= self.orders_names or folder is node

    # --- power losses -----------------------------------------------------------------------------------------------

    def lose_power(self, dice: random.Random) -> None:
        """Leave a state in which the disk may be after a power loss, as the only one."""
        keeps = dice.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        last = max((at for at, change in enumerate(self.log) if change.is_synced), default=-1)
        cut = dice.randint(last + 1, len(self.log)) if keeps else last + 1
        for at, change in enumerate(self.log):
            if at < cut if self.orders_names else change.is_synced or dice.random() < keeps:
                _apply(change)
        # The same nodes in a new folder.
        shutil.rmtree(self.root)
        self.log, self.nodes = [], {}
        self._build(self.top, self.root, {}, dice, keeps)

    def _build(self, node: Node, path: str, places: dict[Node, str], dice: random.Random, keeps: float) -> None:
        if node in places:
            LINK(places[node], path)
        elif node.is_folder:
            MKDIR(path)
            for name, child in node.names.items():
                self._build(child, f"{path}/{name}", places, dice, keeps)
        else:
            node.kept, node.changes = _torn(node, dice, keeps), []
            handle = OPEN(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(handle, node.kept)
            CLOSE(handle)
            places[node] = path
        self.nodes[STAT(path).st_ino] = node


def _apply(change: Renaming) -> None:
    if change.source is not None:
        folder, name = change.source
        if folder.names.get(name) is not change.node:  # what made this name was lost
            return
        del folder.names[name]
    if change.target is not None:
        folder, name = change.target
        folder.names[name] = change.node


def _torn(node: Node, dice: random.Random, keeps: float) -> bytes:
    """The bytes of a file of whose last changes any pages were kept."""
    data = bytearray(node.kept)
    for offset, written in node.changes:
        end = offset + len(written)
        for start in range(offset - offset % PAGE, end, PAGE):
            lo, hi = max(start, offset), min(start + PAGE, end)
            if dice.random() < keeps:
                data.extend(bytes(max(hi - len(data), 0)))
                data[lo:hi] = written[lo - offset : hi - offset]
    return bytes(data)
