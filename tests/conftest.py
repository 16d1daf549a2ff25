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
from hypothesis import HealthCheck, settings

from gcs import GCSServer
from s3 import S3Server
from worlds import CONFORMANCE, World

# What the developer's shell says to the daemon or the client is not for the tests.
for _name in [name for name in os.environ if name.startswith("CKPTD_")]:
    del os.environ[_name]

# How long an example takes is the machine's affair.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Programs that tests start may import the tests' own modules, as pytest lets the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory on tmpfs, as a daemon's shm-dir is."""
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four ranks that run the conformance suite's program; launched by the first call."""
    with World(CONFORMANCE, 4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 for all tests; give each a prefix of its own."""
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GCSServer]:
    """One GCS for all tests; give each a prefix of its own."""
    with GCSServer() as server:
        yield server
