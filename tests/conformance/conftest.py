"""Daemons that the conformance suite shares: a pair per codec on a directory, started when first needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from client.pairs import Pair
from conformance.ways import Ways
from daemons import DaemonProcess


@pytest.fixture(scope="session")
def ways_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ways]]:
    """The ways over a store with this codec."""
    made: dict[str, Ways] = {}
    with contextlib.ExitStack() as stack:

        def of(codec: str) -> Ways:
            if codec not in made:
                store = tmp_path_factory.mktemp("store")
                saving = stack.enter_context(DaemonProcess(str(store), "--codec", codec))
                other = stack.enter_context(DaemonProcess(str(store), memory="64MiB"))
                made[codec] = Ways(Pair(store, saving, other))
            return made[codec]

        yield of
