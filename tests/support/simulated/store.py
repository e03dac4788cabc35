"""An object store in memory: puts are atomic, and a killed process's last deletion may come late."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from .machine import Killed, Machine

PROTOCOL = "histories"


class Files(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The store of the machine that runs now, as fsspec has it."""

    protocol = PROTOCOL

    def _ask(self, path: str) -> dict[str, tuple[bytes, int]]:
        """Return the objects, before which a late deletion may arrive."""
        machine = Machine.current
        if machine.late and machine.dice.random() < 0.1:
            machine.late.pop(0)()
        if machine.step("ask", path):
            raise refusal(machine.fault.number)
        return machine.objects

    def _change(self, kind: str, path: str, change: Callable[[], object]) -> None:
        """Change an object; what a process asks for as it is killed may be done."""
        machine = Machine.current
        try:
            if machine.step(kind, path):
                raise refusal(machine.fault.number)
        except Killed:
            process = machine.task.process
            if process.calls == process.kill_at and machine.dice.random() < 0.7:
                if kind == "delete":
                    machine.late.append(change)
                else:
                    change()
            raise
        change()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return _described(self._ask(path), path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        objects = self._ask(path)
        _described(objects, path)
        below = [name[len(path) + 1 :] for name in objects if name.startswith(f"{path}/")]
        names = {f"{path}/{name.partition('/')[0]}" for name in below}
        return [_described(objects, name) if detail else name for name in sorted(names)]

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        objects = self._ask(path)
        if path not in objects:
            raise FileNotFoundError(path)
        return objects[path][0][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        machine, path = Machine.current, self._strip_protocol(path)

        def put() -> None:
            if mode == "create" and path in machine.objects:
                raise FileExistsError(path)
            machine.put(path, value)

        machine.note(value)
        self._change("put", path, put)

    def rm_file(self, path: str) -> None:
        objects, path = Machine.current.objects, self._strip_protocol(path)
        self._change("delete", path, lambda: objects.pop(path, None))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _Upload:
        return _Upload(self, path, mode)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    """An upload in parts, of which the last one makes the object."""

    def _upload_chunk(self, final: bool = False) -> None:
        assert final, "the objects of histories have one part"
        self.fs.pipe_file(self.path, self.buffer.getvalue())


def _described(objects: dict[str, tuple[bytes, int]], path: str) -> dict[str, Any]:
    if path in objects:
        data, written = objects[path]
        return {"name": path, "size": len(data), "type": "file", "mtime": written / 1e9, "ETag": str(written)}
    if any(name.startswith(f"{path}/") for name in objects):
        return {"name": path, "size": 0, "type": "directory"}
    raise FileNotFoundError(path)


def refusal(number: int) -> Exception:
    """The error by which a library says what a store has answered."""
    if number == errno.ETIMEDOUT:
        return TimeoutError(number, "timed out")
    return PermissionError(errno.EACCES, "403") if number == 403 else OSError(errno.EIO, str(number))


fsspec.register_implementation(PROTOCOL, Files)
