"""What a `list` costs: requests to the store grow with its checkpoints, not with their files; thousands are listed at once."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.cli.main import main
from ckptd.localstore import LocalStore
from ckptd.stores import open_store
from daemons import DaemonProcess
from faulty_proxy import FaultyProxy
from s3 import S3Server
from saved import Watched, save

CHECKPOINTS = 2000


@pytest.fixture
def root() -> Iterator[Path]:
    """A store on tmpfs: what is measured is the listing, not a disk's fsync."""
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("many", [100, pytest.param(CHECKPOINTS, marks=pytest.mark.slow)])
def test_thousands_of_checkpoints_of_four_ranks_are_listed_with_a_few_calls_each(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    store = LocalStore(root)
    for number in range(many):
        save(store, f"run-{number % 4}/step-{number}", 1_000_000 + number, ranks=4)
    calls: Counter[str] = Counter()
    watched = Watched(store, before=lambda call, _key: calls.update([call]))
    monkeypatch.setattr("ckptd.cli.direct.open_store", lambda _url, _options: watched)
    began = time.monotonic()
    assert main(["list", "--store", str(root), "--json"]) == 0
    direct = time.monotonic() - began
    lines = json.loads(capsys.readouterr().out)
    assert [line["id"] for line in lines] == [f"run-{run}/step-{number}" for run in range(4) for number in range(run, many, 4)]
    assert {line["state"] for line in lines} == {"durable"}
    assert {line["world_size"] for line in lines} == {4}
    # A listing of its marks, the tail of .metadata and the head of the manifest; and one look at each directory above.
    assert calls["list"] + calls["get"] <= 3 * many
    assert calls["children"] <= 1 + 4
    assert not calls.keys() - {"list", "get", "children"}
    with DaemonProcess(str(root)) as daemon:
        took = []
        for _ in range(2):
            began = time.monotonic()
            listed = daemon.list()
            took.append(time.monotonic() - began)
            assert len(listed) == many
    print(f"{many} checkpoints: {direct:.2f} s from the store, {took[0]:.2f} and {took[1]:.2f} s from a daemon; {dict(calls)}")


def test_requests_to_s3_grow_with_checkpoints_and_not_with_their_files(s3_server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    requests: dict[tuple[int, int], int] = {}
    with FaultyProxy(s3_server.endpoint) as proxy:
        for checkpoints, ranks in ((4, 1), (4, 12), (8, 1)):
            prefix = f"listing-{checkpoints}-{ranks}"
            store = open_store(s3_server.url(prefix), s3_server.options)
            for number in range(checkpoints):
                save(store, f"run/step-{number}", 1_000_000 + number, ranks)
            through = {**s3_server.options, "endpoint_url": proxy.endpoint}
            options = [part for name, value in through.items() for part in ("--store-option", f"{name}={value}")]
            before = len(proxy.lines)
            assert main(["list", "--store", s3_server.url(prefix), "--json", *options]) == 0
            assert len(json.loads(capsys.readouterr().out)) == checkpoints
            requests[checkpoints, ranks] = len(proxy.lines) - before
    print(requests)
    assert requests[4, 12] == requests[4, 1]
    assert requests[8, 1] - requests[4, 1] <= 4 * 3
