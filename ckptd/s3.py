"""S3 in its own words, over s3fs's connection.

s3fs's interface of a file system would read large objects in pieces that need not be of one
version, pad what came short with zeros, list in more requests than needed, say nothing of keys
that a bulk delete refused, and publish files that are collected before they are closed.

Promises: an object is read in one request; a listing asks for a prefix and nothing else; a bulk
delete raises what the answer says of any key; every call ends. Speaks of keys in the bucket,
and raises what s3fs and botocore raise: the caller translates.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import fsspec.asyn

from ckptd.foreign import Refused, code_of
from ckptd.store import ABSENT, Object

#: S3 refuses more parts per object than this.
_MOST_PARTS: Final = 10_000
_PART_GRAIN: Final = 1024 * 1024
#: S3 takes none below 5 MiB but the last.
_SMALLEST_PART: Final = 16 * 1024 * 1024
#: Of an object whose size nobody knows: enough for 625 GiB.
_BLIND_PART: Final = 64 * 1024 * 1024
#: One request with its body, its repetitions included. aiohttp's own timeout starts only when the body is sent, so that
#: a server which accepts a connection and then says nothing would hold an upload for ever.
_REQUEST_SECONDS: Final = 600.0
#: Credentials are not looked for more often than this.
_RENEWAL_SECONDS: Final = 1.0
#: What services answer to If-Match and If-None-Match when they do not know them.
_NO_CONDITIONS: Final = frozenset({"NotImplemented", "501"})

T = TypeVar("T")


def part_nbytes(nbytes_hint: int | None) -> int:
    """Bytes per part of an upload of about `nbytes_hint` bytes (a tenth more still fits)."""
    if nbytes_hint is None:
        return _BLIND_PART
    needed = math.ceil(nbytes_hint * 1.1 / _MOST_PARTS)
    return max(_SMALLEST_PART, math.ceil(needed / _PART_GRAIN) * _PART_GRAIN)


class Bucket:
    """The bucket that `path` begins with, as s3fs's file system `fs` reaches it."""

    #: S3 deletes at most so many objects per request.
    most_deletes: Final = 1000
    part_nbytes = staticmethod(part_nbytes)

    def __init__(self, fs: Any, path: str) -> None:
        # s3fs tries again around botocore, which tries again.
        fs.retries = 1
        self._fs = fs
        self._renewed = -math.inf
        #: Uploads under way here.
        self.uploading: set[str] = set()
        #: Whether the service knows conditions of a put; until it refuses one, it does.
        self.conditional = True
        self.name, self.key, _ = fs.split_path(path)

    def get(self, key: str, start: int, end: int | None) -> bytes:
        """The bytes [start, end) of an object, fewer if it ends before."""
        wanted = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}

        async def read() -> bytes:
            answer = await self._fs._call_s3("get_object", Bucket=self.name, Key=key, **wanted)  # noqa: SLF001 - call_s3 waits without end
            try:
                return bytes(await answer["Body"].read())
            finally:
                answer["Body"].close()

        try:
            return self._bounded(read())
        except Exception as exc:
            if code_of(exc) == "InvalidRange":  # of which not one byte exists
                return b""
            raise

    def put(self, key: str, data: io.BytesIO, replacing: str | None) -> None:
        """Stores an object in one request, over what has the ETag `replacing` (or ABSENT); None: over anything."""
        self.publish("put_object", replacing, Key=key, Body=data)

    def publish(self, operation: str, replacing: str | None, **arguments: Any) -> None:
        """Has an object appear; unconditionally after all where the service does not know conditions."""
        if replacing is None or not self.conditional:
            self.call(operation, **arguments)
            return
        try:
            self.call(operation, **arguments, **({"IfNoneMatch": "*"} if replacing == ABSENT else {"IfMatch": replacing}))
        except Exception as exc:
            if code_of(exc) not in _NO_CONDITIONS:
                raise
            self.call(operation, **arguments)
            self.conditional = False

    def upload(self, key: str, replacing: str | None) -> Upload:
        """Begins an object of several parts; `replacing` as for `put`."""
        return Upload(self, key, self.call("create_multipart_upload", Key=key)["UploadId"], replacing)

    def page(self, prefix: str, delimiter: str, token: str | None) -> tuple[list[Object], list[str], str | None]:
        """One page of a listing: objects by their keys in the bucket, what `delimiter` cut short, and how to go on, if there is more."""
        more = {"ContinuationToken": token} if token else {}
        answer = self.call("list_objects_v2", Prefix=prefix, Delimiter=delimiter, **more)
        if "IsTruncated" not in answer:  # botocore takes an empty answer for an empty listing
            raise Refused("IncompleteBody", "the answer is no listing")
        objects = [
            Object(found["Key"], int(found["Size"]), found["LastModified"].timestamp(), version=found.get("ETag", ""))
            for found in answer.get("Contents", [])
        ]
        token = str(answer["NextContinuationToken"]) if answer.get("IsTruncated") else None
        return objects, [found["Prefix"] for found in answer.get("CommonPrefixes", [])], token

    def delete(self, key: str, version: str | None = None) -> None:
        """Deletes an object, with the ETag `version`, or else any: then a missing one is fine."""
        if version is not None:
            try:
                self.call("delete_object", Key=key, IfMatch=version)
            except Exception as exc:
                if code_of(exc) not in _NO_CONDITIONS:
                    raise
            else:
                return
        self.call("delete_object", Key=key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes up to `most_deletes` objects in one request; missing ones are fine."""
        answer = self.call("delete_objects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
        for refused in answer.get("Errors", []):
            if refused.get("Code") != "NoSuchKey":
                raise Refused(refused.get("Code", ""), f"{refused.get('Key', '')}: {refused.get('Message', '')}")

    def abort_uploads(self, prefix: str, older_than_seconds: float) -> int:
        """Aborts uploads of keys that start with `prefix`; returns how many."""
        before = time.time() - older_than_seconds
        # Listed to the end first: what is aborted would shift the pages.
        old = [
            upload
            for upload in self._uploads(prefix)
            if upload["Initiated"].timestamp() < before and upload["UploadId"] not in self.uploading
        ]
        for upload in old:
            Upload(self, upload["Key"], upload["UploadId"]).abort()
        return len(old)

    def renew(self) -> None:
        """Looks for credentials anew where botocore finds them, unless they were given as options and are what they are."""
        now = time.monotonic()
        if self._fs.key is None and not self._fs.anon and now - self._renewed >= _RENEWAL_SECONDS:
            self._renewed = now
            with contextlib.suppress(Exception):  # then the old ones are tried again
                self._fs.session = None  # which has read the files; older versions of s3fs would keep it
                self._fs.connect(refresh=True)

    def call(self, operation: str, **arguments: Any) -> Any:
        """One of S3's operations on this bucket, with all of `Body`; ends."""
        if "Body" in arguments:
            arguments["Body"].seek(0)
        return self._bounded(self._fs._call_s3(operation, Bucket=self.name, **arguments))  # noqa: SLF001 - call_s3 waits without end

    def _bounded(self, call: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(_REQUEST_SECONDS):
                return await call

        return fsspec.asyn.sync(self._fs.loop, bounded)  # type: ignore[no-any-return]

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            answer = self.call("list_multipart_uploads", Prefix=prefix, **more)
            # Not every store looks at the prefix.
            yield from (upload for upload in answer.get("Uploads", []) if upload["Key"].startswith(prefix))
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


class Upload:
    """An object on its way in parts. It appears at `finish`, or never."""

    def __init__(self, bucket: Bucket, key: str, token: str, replacing: str | None = None) -> None:
        self._bucket = bucket
        self._token = token
        self._replacing = replacing
        self._named = {"Key": key, "UploadId": token}
        bucket.uploading.add(token)
        self._parts: list[dict[str, Any]] = []

    def send(self, data: io.BytesIO) -> None:
        """The next part, as long as `part_nbytes` said."""
        number = len(self._parts) + 1
        answer = self._bucket.call("upload_part", **self._named, PartNumber=number, Body=data)
        # Whatever checksum S3 answers is wanted back.
        sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"], **sums})

    def finish(self, data: io.BytesIO) -> None:
        """The last part, which is not empty; then the object is there."""
        self.send(data)
        self._bucket.publish("complete_multipart_upload", self._replacing, **self._named, MultipartUpload={"Parts": self._parts})
        self._bucket.uploading.discard(self._token)

    def abort(self) -> None:
        """Gives up: S3 forgets the parts. If that fails, `abort_uploads` does it later."""
        self._bucket.uploading.discard(self._token)
        self._bucket.call("abort_multipart_upload", **self._named)
