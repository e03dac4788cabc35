"""Reading a whole file in order: the same bytes whether they come past the system's cache or through it."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from muonckpt.store.io.regular import open_regular

SIZES = (0, 1, 4096, (2 << 20) - 1, 2 << 20, (4 << 20) + 5)


def refuses_to_switch(handle, request, argument=0, plain=fcntl.fcntl):
    if request == fcntl.F_SETFL and argument & os.O_DIRECT:
        raise OSError(errno.EINVAL, "not on this file system")
    return plain(handle, request, argument)


def refuses_to_read(handle, buffers, offset, plain=os.preadv):
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "blocks of another size")
    return plain(handle, buffers, offset)


@pytest.mark.parametrize("refused", [None, (fcntl, "fcntl", refuses_to_switch), (os, "preadv", refuses_to_read)])
@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_come_in_order_whatever_the_file_system_refuses(tmp_path, monkeypatch, size, refused):
    written = os.urandom(size)
    (tmp_path / "file").write_bytes(written)
    if refused:
        monkeypatch.setattr(*refused)
    with open_regular(tmp_path / "file") as file:
        assert b"".join(bytes(part) for part in file.in_order()) == written
