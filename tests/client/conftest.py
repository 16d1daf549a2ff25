"""The daemons that the client's tests share, one pair per file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.pairs import Pair
from daemons import DaemonProcess


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store)) as saving, DaemonProcess(str(store), memory="64MiB") as other:
        yield Pair(store, saving, other)
