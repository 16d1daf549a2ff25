"""The house rules that a program can check: what is imported, what is generated, what is released."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ckptd

ROOT = Path(__file__).resolve().parents[2]


def _loaded(module: str, *, unwanted: list[str]) -> list[str]:
    """Which of the unwanted modules a fresh interpreter has loaded after importing `module`."""
    script = f"import {module}, sys; print(*[name for name in {unwanted!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("module", ["ckptd.daemon", "ckptd.cli.main", "ckptd.cli.direct", "ckptd.cli.dial"])
def test_the_daemon_and_the_cli_load_no_torch(module: str) -> None:
    assert _loaded(module, unwanted=["torch", "numpy", "ckptd_client"]) == []


def test_the_client_loads_neither_stores_nor_codecs() -> None:
    unwanted = ["fsspec", "s3fs", "ckptd.daemon", "ckptd.store", "ckptd.codec", "ckptd.cli"]
    # torch brings fsspec along for its own checkpoints where it is installed: what counts is what the client adds.
    brought = _loaded("torch.distributed.checkpoint", unwanted=unwanted)
    assert [name for name in _loaded("ckptd_client", unwanted=unwanted) if name not in brought] == []


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run([ROOT / "protos" / "generate", sys.executable, tmp_path], check=True, capture_output=True, text=True)
    generated = {path.name: path.read_text() for path in (tmp_path / "ckptd" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "ckptd" / "v1").glob("*_pb2*")}
    assert generated == committed, "run `make protos` and commit what it changes"


def test_the_changelog_knows_the_version() -> None:
    released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[:2] in (["Unreleased"], ["Unreleased", ckptd.__version__])


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "ckptd/__init__.py"
    printed = subprocess.run([sys.executable, "-m", "ckptd", "--version"], check=True, capture_output=True, text=True).stdout
    assert printed == f"ckptd {ckptd.__version__}\n"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    declared = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in declared} - {"ckptd"}
    assert {name for name in names if f"`{name}`" not in explained} == set()


def test_no_room_is_called_after_nothing_in_particular() -> None:
    nothing = re.compile(r"(^|_)(utils?|helpers?|manager|common|base|misc|handlers?)(_|$)")
    rooms = [path for folder in ("ckptd", "client", "worker", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in rooms if nothing.search(path.stem)] == []
