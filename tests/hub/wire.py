"""One request to the fake Hub: its body in, an answer out, and the faults that were asked for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.state import FakeHub, Fault, Seen
from tests.hub.store import CHUNK_BYTES, Commit, Entry, Repo

Route = tuple[str, re.Pattern[str], Callable[..., None]]


class RefusedError(Exception):
    """A request that is answered with an error.

    The client tells errors apart by `X-Error-Code`; on http:// it looks at nothing else.
    """

    def __init__(
        self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **(headers or {})}
        if code:
            self.headers["X-Error-Code"] = code


class Server(ThreadingHTTPServer):
    """A server that is bound, and listens once there is a Hub to answer."""

    daemon_threads = True
    hub: FakeHub

    def __init__(self, port: int, routes: tuple[Route, ...]) -> None:
        super().__init__(("127.0.0.1", port), Call, bind_and_activate=False)
        self.routes = routes
        self.server_bind()


class Call(BaseHTTPRequestHandler):
    """A request and its answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer on a kept connection waits 40 ms
    wbufsize = 1 << 16
    server: Server

    def answer(self) -> None:
        """Find the route, do what it says, and note what was sent."""
        self.hub = self.server.hub
        with self.hub.lock:
            self.hub.running += 1
        self._is_read, self._status, self._sent = False, -1, 0
        self._cut: int | None = None
        self._stall_s = 0.0
        address = urlsplit(self.path)
        self.query = parse_qs(address.query, keep_blank_values=True)
        try:
            self._fail(self.hub.fault(self.command, self.path))
            self._route(unquote(address.path))
        except RefusedError as refused:
            self.json({"error": str(refused)}, refused.status, refused.headers)
        except OSError:
            self.close_connection = True
        finally:
            ranged, agent = self.headers.get("Range", ""), self.headers.get("User-Agent", "")
            seen = Seen(self.command, self.path, ranged, self._status, self._sent, agent)
            with self.hub.lock:
                self.hub.log.append(seen)
                self.hub.running -= 1

    def log_message(self, *args: object) -> None:
        """Stay quiet."""

    def _route(self, path: str) -> None:
        method = "GET" if self.command == "HEAD" else self.command
        for verb, pattern, do in self.server.routes:
            match = pattern.fullmatch(path)
            if verb == method and match:
                do(self, **match.groupdict())
                return
        raise RefusedError(404, f"no route for {self.command} {path}")

    def _fail(self, fault: Fault | None) -> None:
        if fault is None:
            return
        time.sleep(fault.delay_s)
        if fault.status is not None:
            raise RefusedError(fault.status, "injected", headers=fault.headers)
        self._cut, self._stall_s = fault.cut, fault.stall_s
        if fault.cut == 0:
            self._hang_up()
            raise ConnectionAbortedError

    def _hang_up(self) -> None:
        time.sleep(self._stall_s)
        self.close_connection = True
        self.connection.shutdown(2)

    # --- the body

    def chunks(self) -> Iterator[bytes]:
        """Yield the body, whether its length was said or not."""
        self._is_read = True
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield from self._exactly(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield from self._exactly(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _exactly(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self.rfile.read(min(size, CHUNK_BYTES))
            if not chunk:
                raise ConnectionAbortedError
            size -= len(chunk)
            yield chunk

    def read_json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(b"".join(self.chunks()) or b"{}")

    # --- the answer

    def json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None):
        """Answer with JSON."""
        data = json.dumps(value).encode()
        said = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        self.send(status, said, [data], len(data))

    def send(
        self, status: int, headers: Mapping[str, str], body: Iterable[bytes] = (), size: int = 0
    ) -> None:
        """Answer; a cut that was asked for ends the body and the connection."""
        if not self._is_read:
            for _ in self.chunks():
                pass
        self._status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()
        for chunk in body if self.command != "HEAD" else ():
            left = len(chunk) if self._cut is None else self._cut - self._sent
            self.wfile.write(chunk[:left])
            self._sent += min(left, len(chunk))
            if left < len(chunk):
                self.wfile.flush()
                self._hang_up()
                return
        self.wfile.flush()

    def send_entry(self, entry: Entry, headers: Mapping[str, str]) -> None:
        """Answer with a file, or the range of it that was asked for."""
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        said = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(said[1]), int(said[2] or entry.size) + 1) if said else (0, entry.size)
        end = min(end, entry.size)
        if said and begin >= entry.size:
            self.send(416, {**headers, "Content-Range": f"bytes */{entry.size}"})
            return
        if said:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{entry.size}"
        self.send(206 if said else 200, headers, self._bytes(entry, begin, end), end - begin)

    def _bytes(self, entry: Entry, begin: int, end: int) -> Iterator[bytes]:
        path = self.hub.store.blob(entry.oid)
        if not path.exists():
            yield from self.hub.cas.read(entry.oid, entry.size, begin, end)
            return
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end and (chunk := file.read(min(end - begin, CHUNK_BYTES))):
                begin += len(chunk)
                yield chunk

    # --- who asks, and for what

    @property
    def is_known(self) -> bool:
        """Whether the right token came with the request."""
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def check_known(self) -> None:
        """Refuse a request without the right token."""
        if not self.is_known:
            raise RefusedError(401, "Invalid credentials in Authorization header")

    def repo(self, name: str) -> Repo:
        """Return a repository that may be read."""
        found = self.hub.store.repos.get(name)
        if found is None or (found.private and not self.is_known):
            # The real one says 401 to strangers, whether there is such a repository or not.
            raise RefusedError(
                404 if self.is_known else 401, "Repository not found", "RepoNotFound"
            )
        return found

    def own_repo(self, name: str) -> Repo:
        """Return a repository that may be written."""
        self.check_known()
        found = self.repo(name)
        if found.foreign:
            raise RefusedError(403, "You don't have the rights to write here")
        return found

    def commit_of(self, repo: Repo, revision: str) -> Commit:
        """Return the commit that a revision names."""
        found = repo.find(revision)
        if found is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found


for _verb in ("GET", "HEAD", "POST", "PUT", "DELETE"):
    setattr(Call, f"do_{_verb}", Call.answer)
