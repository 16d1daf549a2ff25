"""One bench per kind of store: the store, and a witness that looks at it from outside, through nothing of ours."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from ckptd.store import Store
from ckptd.stores import open_store
from faulty_proxy import FaultyProxy
from gcs import GCSServer, only_over
from s3 import S3Server


class Witness(Protocol):
    """Sees and changes everything below the store's root, temporary names included."""

    def keys(self) -> dict[str, int]: ...
    def read(self, key: str) -> bytes: ...
    def plant(self, key: str, data: bytes) -> None: ...
    def remove(self, key: str) -> None: ...


@dataclass(frozen=True)
class Disk:
    root: Path

    def keys(self) -> dict[str, int]:
        return {str(path.relative_to(self.root)): path.stat().st_size for path in self.root.rglob("*") if path.is_file()}

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def plant(self, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()


@dataclass(frozen=True)
class Memory:
    root: str

    def keys(self) -> dict[str, int]:
        lead = f"{self.root}/"
        return {path.removeprefix(lead): file.size for path, file in [*MemoryFileSystem.store.items()] if path.startswith(lead)}

    def read(self, key: str) -> bytes:
        data: bytes = MemoryFileSystem.store[f"{self.root}/{key}"].getvalue()
        return data

    def plant(self, key: str, data: bytes) -> None:
        MemoryFileSystem.store[f"{self.root}/{key}"] = MemoryFile(None, f"{self.root}/{key}", data)

    def remove(self, key: str) -> None:
        del MemoryFileSystem.store[f"{self.root}/{key}"]


@dataclass(frozen=True)
class Bucket:
    server: S3Server
    root: str

    def keys(self) -> dict[str, int]:
        lead = f"{self.root}/"
        return {key.removeprefix(lead): nbytes for key, nbytes in self.server.keys(lead).items()}

    def read(self, key: str) -> bytes:
        return self.server.read(f"{self.root}/{key}")

    def plant(self, key: str, data: bytes) -> None:
        self.server.client().put_object(Bucket=self.server.bucket, Key=f"{self.root}/{key}", Body=data)

    def remove(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.server.bucket, Key=f"{self.root}/{key}")


@dataclass(frozen=True)
class GoogleBucket:
    server: GCSServer
    root: str

    def keys(self) -> dict[str, int]:
        lead = f"{self.root}/"
        return {key.removeprefix(lead): nbytes for key, nbytes in self.server.keys(lead).items()}

    def read(self, key: str) -> bytes:
        return self.server.read(f"{self.root}/{key}")

    def plant(self, key: str, data: bytes) -> None:
        self.server.write(f"{self.root}/{key}", data)

    def remove(self, key: str) -> None:
        self.server.delete(f"{self.root}/{key}")


@dataclass(frozen=True)
class Bench:
    kind: str
    url: str
    options: dict[str, str]
    witness: Witness

    def open(self) -> Store:
        """The store as another process would see it: nothing is shared between two of them."""
        return open_store(self.url, self.options)


@pytest.fixture(params=["local", "memory", "s3", "gcs"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    # Characters that mean something to fsspec's patterns, and some that are not ASCII.
    root = f"root [a-z]*?{{}} ünï {uuid.uuid4().hex[:8]}"
    if request.param == "local":
        (tmp_path / root).mkdir()
        yield Bench("local", os.fspath(tmp_path / root), {}, Disk(tmp_path / root))
    elif request.param == "memory":
        MemoryFileSystem().makedirs(f"/{root}")
        yield Bench("memory", f"memory://{root}", {}, Memory(f"/{root}"))
        for key in {**Memory(f"/{root}").keys()}:
            Memory(f"/{root}").remove(key)
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        yield Bench("s3", server.url(root), server.options, Bucket(server, root))
    else:
        google: GCSServer = request.getfixturevalue("gcs_server")
        yield Bench("gcs", google.url(root), google.options, GoogleBucket(google, root))


@pytest.fixture
def guarded(bench: Bench) -> Iterator[Bench]:
    """The same where conditions of a put are looked at: the emulator of GCS needs help with that."""
    if not isinstance(bench.witness, GoogleBucket):
        yield bench
        return
    with FaultyProxy(bench.witness.server.endpoint, only_over(bench.witness.server)) as proxy:
        yield replace(bench, options={**bench.options, "endpoint_url": proxy.endpoint})


@pytest.fixture
def store(bench: Bench) -> Store:
    return bench.open()
