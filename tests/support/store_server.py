"""An S3 server on loopback, in this process: moto's, with a record of what it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import fsspec
import pytest

BUCKET = "bucket"


@dataclass(frozen=True)
class Request:
    """``sent`` and ``answered`` in bytes of the bodies."""

    method: str
    key: str
    query: dict[str, list[str]]
    sent_bytes: int
    answered_bytes: int


@dataclass
class Server:
    """A WSGI application around moto's."""

    app: object
    requests: list[Request] = field(default_factory=list)
    refuses: Callable[[dict[str, list[str]]], bool] = lambda query: False

    def __call__(self, environ, start_response):
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        answer = denied if self.refuses(query) else self.app
        body = b"".join(answer(environ, start_response))
        sent_bytes, key = int(environ.get("CONTENT_LENGTH") or 0), environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        self.requests.append(Request(environ["REQUEST_METHOD"], key, query, sent_bytes, len(body)))
        return [body]

    @contextmanager
    def refusing(self, refuses: Callable[[dict[str, list[str]]], bool]) -> Iterator[None]:
        """Meanwhile requests with such queries are denied."""
        before, self.refuses = self.refuses, refuses
        try:
            yield
        finally:
            self.refuses = before

    def read(self, suffix: str = "") -> int:
        """Bytes of objects that were fetched whose keys end so."""
        return sum(
            r.answered_bytes for r in self.requests if r.method == "GET" and not r.query and r.key.endswith(suffix)
        )

    def parts(self, suffix: str) -> list[int]:
        """Bytes of the parts of multipart uploads."""
        return [r.sent_bytes for r in self.requests if "partNumber" in r.query and r.key.endswith(suffix)]


def denied(environ, start_response):
    start_response("403 Forbidden", [("Content-Type", "application/xml")])
    return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]


def environment(address: str) -> dict[str, str]:
    """Variables by which a process finds the server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "of-a-test",
        "AWS_SECRET_ACCESS_KEY": "of-a-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def running() -> Iterator[tuple[Server, str]]:
    """The server and its address; it ends with the block."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, kind, message, *arguments):
            """The record says it."""

    server = Server(DomainDispatcherApplication(create_backend_app))
    serving = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{serving.port}"
    finally:
        serving.shutdown()
        thread.join()
        serving.server_close()


@contextmanager
def served() -> Iterator[tuple[Server, str]]:
    """A server with a bucket, and its address: this process and those that it starts find it by their environment.

    One for the session: processes keep the file systems that they have made, with the address.
    """
    for name in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(name, reason=f"a real S3 server needs {name}: pip install -e '.[dev]'")
    with running() as (server, address), pytest.MonkeyPatch.context() as patch:
        for name, value in environment(address).items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", use_listings_cache=False).makedirs(BUCKET, exist_ok=True)
        yield server, address
