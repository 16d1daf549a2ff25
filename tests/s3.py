"""A real S3 server for tests: moto in a process of its own, spoken to over HTTP."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3  # type: ignore[import-untyped]
import botocore.config  # type: ignore[import-untyped]

REGION = "us-east-1"


class S3Server:
    """``python -m moto.server`` on a free port of the loopback, with one empty bucket. Use as a context manager."""

    bucket = "bucket"

    def __init__(self) -> None:
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout: float = 60.0) -> Self:
        """Returns when it answers and the bucket is there; raises with its log if it ends or is too slow."""
        with tempfile.TemporaryDirectory(prefix="ckptd-test-") as home:
            path = Path(home) / "log"
            with path.open("wb") as log:
                # Port 0: the kernel picks a free one, and the server says which.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=subprocess.STDOUT
                )
            deadline = time.monotonic() + timeout
            while not self.endpoint:
                found = re.search(r"Running on (http://127\.0\.0\.1:\d+)\D", path.read_text(errors="replace"))
                if found:
                    self.endpoint = found.group(1)
                elif self._process.poll() is not None or time.monotonic() > deadline:
                    text = path.read_text(errors="replace")
                    self.stop()
                    raise RuntimeError(f"the S3 server did not start:\n{text}")
                else:
                    time.sleep(0.05)
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def url(self, prefix: str = "") -> str:
        """The store's URL; give each test a prefix of its own."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    @property
    def options(self) -> dict[str, str]:
        """The store options, as `open_store` takes them."""
        return {"endpoint_url": self.endpoint, "key": "test-key", "secret": "test-secret", "region_name": REGION}

    @property
    def arguments(self) -> list[str]:
        """The same as arguments of the command line: --store-option KEY=VALUE, repeated."""
        return [part for name, value in self.options.items() for part in ("--store-option", f"{name}={value}")]

    @functools.cache  # noqa: B019 - a server lives as long as its tests, and a client takes longer to make than to use
    def client(self) -> Any:
        """boto3's own client: the witness that knows nothing of ckptd and fsspec."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test-key",
            aws_secret_access_key="test-secret",
            region_name=REGION,
            config=botocore.config.Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Key to size of every object whose key starts with `prefix`."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", [])}

    def read(self, key: str) -> bytes:
        body: bytes = self.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return body

    def unfinished_uploads(self, prefix: str = "") -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted; those of other tests begin with other prefixes."""
        found = self.client().list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [upload["Key"] for upload in found if upload["Key"].startswith(prefix)]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
