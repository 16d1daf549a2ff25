"""What all suites share: a clean environment and memory-backed directories that are removed again.

Markers, timeouts and warnings are in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# What the developer's shell says to the daemon or the client is not for the tests.
for _name in [name for name in os.environ if name.startswith("CKPTD_")]:
    del os.environ[_name]


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory on tmpfs, as a daemon's shm-dir is."""
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
