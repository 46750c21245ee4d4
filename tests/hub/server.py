"""The fake Hub on loopback: it speaks what `huggingface_hub` calls, and none of that is mocked.

In tests, the fixture `hub` starts it. By hand: `python -m tests.hub.server ROOT ORG/NAME=FOLDER …`.
"""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hub import lfs, reading, writing
from tests.hub.state import FakeHub
from tests.hub.wire import Server

NAME = r"(?P<name>[^/]+/[^/]+?)"
API = rf"/api/models/{NAME}"
REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
BLOB = r"/lfs-store/(?P<oid>[0-9a-f]{64})"

ROUTES = tuple(
    (method, re.compile(path), do)
    for method, path, do in (
        ("GET", r"/api/whoami-v2", reading.whoami),
        ("POST", r"/api/repos/create", writing.create_repo),
        ("DELETE", r"/api/repos/delete", writing.delete_repo),
        ("POST", r"/api/validate-yaml", writing.validate_yaml),
        ("GET", API, reading.info),
        ("GET", rf"{API}/revision/{REVISION}", reading.info),
        ("GET", rf"{API}/tree/{REVISION}(?:/(?P<folder>.+))?", reading.tree),
        ("POST", rf"{API}/paths-info/{REVISION}", reading.paths_info),
        ("GET", rf"{API}/commits/{REVISION}", reading.commits),
        ("GET", rf"{API}/refs", reading.refs),
        ("GET", rf"{API}/auth-check(?P<write>/write)?", reading.auth_check),
        ("GET", rf"{API}/xet-(?P<kind>read|write)-token/{REVISION}", reading.xet_token),
        ("POST", rf"{API}/preupload/{REVISION}", writing.preupload),
        ("POST", rf"{API}/commit/{REVISION}", writing.commit),
        ("POST", rf"{API}/branch/(?P<branch>.+)", writing.create_branch),
        ("DELETE", rf"{API}/branch/(?P<branch>.+)", writing.delete_branch),
        ("POST", rf"{API}/discussions", writing.create_discussion),
        ("GET", rf"{API}/discussions/(?P<number>\d+)", writing.discussion),
        ("POST", rf"{API}/lfs-files/duplicate", writing.duplicate),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", lfs.batch),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/verify", lfs.verify),
        ("PUT", BLOB, lfs.put),
        ("PUT", rf"{BLOB}/part/(?P<number>\d+)", lfs.put_part),
        ("POST", rf"{BLOB}/complete", lfs.complete),
        ("GET", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", reading.resolve),
        ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})/(?P<size>\d+)", reading.cdn),
    )
)


class Origins:
    """The Hub's address and the CDN's, from the start; who answers there may change.

    The client follows redirects that stay on the Hub's origin, and takes size and digest from the
    redirect itself, without the token, where they leave it. 1.x compares host names only, so the
    CDN is on another name of this machine.
    """

    def __init__(self, port: int = 0) -> None:
        self._servers = Server(port, ROUTES), Server(0, ROUTES)
        hub, cdn = (server.server_address[1] for server in self._servers)
        self.url, self.cdn_url = f"http://127.0.0.1:{hub}", f"http://localhost:{cdn}"

    def serve(self, hub: FakeHub) -> None:
        """Let a Hub answer from now on."""
        hub.url, hub.cdn_url = self.url, self.cdn_url
        for server in self._servers:
            server.hub = hub

    @contextmanager
    def running(self) -> Iterator[None]:
        """Listen while the block runs."""
        for server in self._servers:
            server.server_activate()
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield
        finally:
            for server in self._servers:
                server.shutdown()

    def close(self) -> None:
        """Give the addresses back."""
        for server in self._servers:
            server.server_close()


def main() -> None:
    """Serve folders as repositories, until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("repos", nargs="*", metavar="ORG/NAME=FOLDER")
    parser.add_argument("--port", type=int, default=0)
    wanted = parser.parse_args()
    origins, hub = Origins(wanted.port), FakeHub(wanted.root)
    for repo in wanted.repos:
        name, _, folder = repo.partition("=")
        hub.store.add_folder(name, Path(folder))
    origins.serve(hub)
    with origins.running():
        said = {**hub.settings(hub.url), "HF_TOKEN": hub.token}
        print(" ".join(f"{key}={value}" for key, value in said.items()), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
