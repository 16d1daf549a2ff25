"""File systems of a test's own: small ones, which are soon full."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(size: str) -> Iterator[Path]:
    """A tmpfs of that size, as ``mount -o size=`` takes it, mode 0700; skips the test where none can be mounted."""
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "ckptd-test", str(directory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command to make a small tmpfs with")
        if done.returncode != 0:
            pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
    finally:
        shutil.rmtree(directory)
