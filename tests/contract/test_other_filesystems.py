"""File systems of fsspec that ckptd knows nothing about: slower, and no less careful."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from ckptd.errors import CkptdError, StoreError, Unavailable
from ckptd.store import Store
from ckptd.stores import open_store


class Elsewhere(LocalFileSystem):
    """A directory behind another scheme, that cannot list some of what is in it."""

    protocol = "elsewhere"
    unreadable: OSError | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("elsewhere://")))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if path.endswith("/unreadable") and self.unreadable is not None:
            raise self.unreadable
        return super().ls(path, detail, **kwargs)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    store = open_store(f"elsewhere://{tmp_path}/root", retries=0)
    store.probe()
    yield store
    Elsewhere.unreadable = None


def test_a_file_grows_beside_its_name_and_is_moved_there(store: Store, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def source() -> Iterator[bytes]:
        yield b"some"
        seen.append([path.name for path in (tmp_path / "root" / "step-1").iterdir()])
        yield b"more"

    assert store.put("step-1/.metadata", source) == 8
    assert (tmp_path / "root" / "step-1" / ".metadata").read_bytes() == b"somemore"
    assert [name.endswith(".tmp") for (name,) in seen] == [True]
    assert [found.key for found in store.list()] == ["step-1/.metadata"]


def test_a_failed_put_leaves_nothing(store: Store, tmp_path: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"some"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.put("step-1/.metadata", source)
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (OSError(errno.EIO, "I/O error"), Unavailable),
        (TimeoutError("too slow"), Unavailable),
        (ConnectionResetError("gone"), Unavailable),
        (PermissionError("no"), StoreError),
    ],
)
def test_what_cannot_be_listed_is_an_error_and_never_left_out(store: Store, failure: OSError, kind: type[CkptdError]) -> None:
    store.put("readable/.metadata", lambda: [b"1"])
    store.put("unreadable/.metadata", lambda: [b"1"])
    Elsewhere.unreadable = failure
    with pytest.raises(kind):
        list(store.list())
    assert [found.key for found in store.list("readable/")] == ["readable/.metadata"]
