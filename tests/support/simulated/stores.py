"""An object store in memory: puts are atomic, and a killed process's last deletion may come late."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import fsspec

from .ranks import Killed

PROTOCOL = "histories"


class Store:
    """The objects of a machine's store, by their paths: their bytes, and when they were written."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.late: list[Callable[[], object]] = []

    def ask(self, path: str) -> None:
        """Make a step before a question; a late request may arrive first."""
        if self.late and self.machine.dice.random() < 0.1:
            self.late.pop(0)()
        self.machine.step("ask", path)

    def change(self, kind: str, path: str, change: Callable[[], object], data: bytes = b"") -> None:
        try:
            self.machine.step(kind, path, data)
        except Killed:
            process = self.machine.process
            if process.calls == process.kill_at and self.machine.dice.random() < 0.7:
                if kind == "delete":
                    self.late.append(change)
                else:
                    change()
            raise
        change()

    def put(self, path: str, data: bytes) -> None:
        self.machine.disk.now += 1
        self.objects[path] = data, self.machine.disk.now


def refusal(number: int) -> Exception:
    """The error by which a library says what a store has answered."""
    if number == errno.ETIMEDOUT:
        return TimeoutError(number, "timed out")
    return PermissionError(errno.EACCES, "403") if number == 403 else OSError(errno.EIO, str(number))


class Files(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The store of the machine that runs now, as fsspec has it."""

    protocol = PROTOCOL
    machine: Callable[[], Any]

    @property
    def store(self) -> Store:
        return type(self).machine().store  # type: ignore[no-any-return]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self.store.ask(path)
        return self._info(path)

    def _info(self, path: str) -> dict[str, Any]:
        objects = self.store.objects
        if path in objects:
            data, written = objects[path]
            return {"name": path, "size": len(data), "type": "file", "mtime": written / 1e9, "ETag": str(written)}
        if any(name.startswith(f"{path}/") for name in objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "file":
            names = {path}
        else:
            below = [name[len(path) + 1 :] for name in self.store.objects if name.startswith(f"{path}/")]
            names = {f"{path}/{name.partition('/')[0]}" for name in below}
        return [self._info(name) if detail else name for name in sorted(names)]

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        self.store.ask(path)
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        return self.store.objects[path][0][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        store, path = self.store, self._strip_protocol(path)

        def put() -> None:
            if mode == "create" and path in store.objects:
                raise FileExistsError(path)
            store.put(path, bytes(value))

        store.change("put", path, put, bytes(value))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def rm_file(self, path: str) -> None:
        objects, path = self.store.objects, self._strip_protocol(path)
        self.store.change("delete", path, lambda: objects.pop(path, None))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Upload(self, path)


class _Upload:
    """An upload whose parts make an object when it is closed."""

    forced = False

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path, self._data = files, path, bytearray()

    def write(self, data: Any) -> int:
        self._data += bytes(data)
        return len(data)

    def discard(self) -> None:
        self._data.clear()

    def close(self) -> None:
        if not self.forced:
            self.forced = True
            self._files.pipe_file(self._path, bytes(self._data))


fsspec.register_implementation(PROTOCOL, Files)
