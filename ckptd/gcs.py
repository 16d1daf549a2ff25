"""GCS in its own words (its JSON API), over gcsfs's connection.

gcsfs's interface of a file system would look for credentials when it is made, for 16 seconds where
there are none, and then go on without; publish files that are collected before they are closed;
and cut an upload short that contains its fixed separator.

Promises: credentials are looked for at the first call, and missing ones are an error; a part that
is not the last is a multiple of 256 KiB long; what a part's answer does not confirm is sent again;
a missing bucket is told from a missing object. Speaks of keys in the bucket, and raises what gcsfs
raises: the caller translates.
"""

from __future__ import annotations

import email.parser
import email.policy
import io
import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from ckptd.foreign import Refused, code_of
from ckptd.store import ABSENT, Object

#: GCS takes parts in multiples of 256 KiB, as many as there are.
_PART_NBYTES: Final = 64 * 256 * 1024
_PAGE_COUNT: Final = 1000
_FIELDS: Final = "kind,nextPageToken,prefixes,items(name,size,updated,timeCreated,generation)"
_BINARY: Final = {"Content-Type": "application/octet-stream"}
_BOUNDARY: Final = "ckptd-batch"


class Bucket:
    """The bucket that `path` begins with, as gcsfs's file system `fs` reaches it. `fs` itself was made without credentials.

    `token`: what gcsfs calls so (a file, an access token, ``anon``, ``cloud``, …); None looks where Google's own tools do.
    """

    #: GCS takes at most so many calls per batch.
    most_deletes: Final = 100
    #: GCS knows conditions of a put.
    conditional: Final = True

    def __init__(self, fs: Any, path: str, token: Any) -> None:
        self._fs = fs
        self._token = token
        self._project = fs.credentials.project
        self._connected = False
        self._lock = threading.Lock()
        self.name, self.key, _ = fs.split_path(path)

    def part_nbytes(self, nbytes_hint: int | None) -> int:
        """Bytes per part of an upload."""
        return _PART_NBYTES

    def get(self, key: str, start: int, end: int | None) -> bytes:
        """The bytes [start, end) of an object, fewer if it ends before."""
        wanted = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            _, data = self.call("GET", self._path(key), alt="media", headers=wanted)
        except FileNotFoundError:
            self._check()
            raise
        except Exception as exc:
            if code_of(exc) == "416":  # of which not one byte exists
                return b""
            raise
        return data

    def put(self, key: str, data: io.BytesIO, replacing: str | None) -> None:
        """Stores an object in one request, over the generation `replacing` (or ABSENT); None: over anything."""
        body = _Body(data.getbuffer())
        only = _condition(replacing)
        _, told = self.call("POST", self._uploads, uploadType="media", name=key, headers=_BINARY, data=body, **only)
        _check_size(told, body.getbuffer().nbytes)

    def upload(self, key: str, replacing: str | None) -> Upload:
        """Begins an object of several parts; `replacing` as for `put`: GCS looks when it begins and when it ends."""
        wanted = {"X-Upload-Content-Type": _BINARY["Content-Type"]}
        only = _condition(replacing)
        headers, _ = self.call("POST", self._uploads, uploadType="resumable", name=key, headers=wanted, **only)
        return Upload(self, headers["Location"])

    def page(self, prefix: str, delimiter: str, token: str | None) -> tuple[list[Object], list[str], str | None]:
        """One page of a listing: objects by their keys in the bucket, what `delimiter` cut short, and how to go on, if there is more."""
        named = {"prefix": prefix or None, "delimiter": delimiter or None, "pageToken": token}
        _, told = self.call("GET", self._path(), **named, maxResults=_PAGE_COUNT, fields=_FIELDS)
        answer = _parsed(told)
        if answer.get("kind") != "storage#objects":
            raise Refused("502", "the answer is no listing")
        objects = [
            Object(found["name"], int(found.get("size", 0)), _written(found), version=str(found.get("generation", "")))
            for found in answer.get("items", [])
        ]
        return objects, answer.get("prefixes", []), answer.get("nextPageToken") or None

    def delete(self, key: str, version: str | None = None) -> None:
        """Deletes an object, of the generation `version` or else any; a missing one is fine."""
        try:
            self.call("DELETE", self._path(key), **_condition(version))
        except FileNotFoundError:
            self._check()

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes up to `most_deletes` objects in one request; missing ones are fine."""
        billed = self._fs._get_params({})  # noqa: SLF001 - who pays, which gcsfs adds to the outer request only
        query = f"?{urlencode(billed)}" if billed else ""
        calls = "".join(
            f"--{_BOUNDARY}\r\nContent-Type: application/http\r\nContent-ID: <{number}>\r\n\r\n"
            f"DELETE /storage/v1/{self._path(key)}{query} HTTP/1.1\r\nContent-Length: 0\r\n\r\n\r\n"
            for number, key in enumerate(keys)
        )
        wanted = {"Content-Type": f"multipart/mixed; boundary={_BOUNDARY}"}
        body = _Body(f"{calls}--{_BOUNDARY}--\r\n".encode())
        headers, told = self.call("POST", self._beside("batch"), headers=wanted, data=body)
        statuses = _statuses(headers["Content-Type"], told)
        if len(statuses) != len(keys):
            raise Refused("502", f"{len(keys)} deletes were asked for, {len(statuses)} were answered")
        for key, status in zip(keys, statuses, strict=True):
            if status >= 300 and status != 404:
                raise Refused(str(status), key)
        if 404 in statuses:
            self._check()

    def abort_uploads(self, prefix: str, older_than_seconds: float) -> int:
        """Nothing to do: GCS does not list uploads, and forgets them after a week."""
        return 0

    def renew(self) -> None:
        """Has the next call look for credentials anew."""
        self._connected = False

    def call(self, method: str, path: str, **arguments: Any) -> tuple[Mapping[str, str], bytes]:
        """One request, tried again by gcsfs while it may pass: headers and body of the answer."""
        with self._lock:
            if not self._connected:
                self._connect()
                self._connected = True
        answer: tuple[Mapping[str, str], bytes] = self._fs.call(method, path, **arguments)
        return answer

    def _connect(self) -> None:
        """Finds the credentials; raises what google-auth raises, within seconds."""
        token = self._token
        if token is None:
            # Not gcsfs's own order, which goes on to ask a metadata server again and again, and in the end does without.
            token = "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else "google_default"
        elif isinstance(token, str) and "/" in token and not os.path.exists(token):
            raise ValueError(f"token: there is no file {token}")  # gcsfs would ask Google whether the name is an access token
        credentials = self._fs.credentials
        credentials.project = ""  # else the credentials' own project must be the same
        credentials.token = token
        credentials.connect(token)
        credentials.project = self._project or credentials.project

    def _check(self) -> None:
        """Raises if what was not found is the bucket: the JSON API answers 404 for both, and gcsfs drops the words."""
        try:
            self.call("GET", self._path(), maxResults=1, fields="nextPageToken")
        except FileNotFoundError as exc:
            raise Refused("NoSuchBucket", self.name) from exc

    def _path(self, key: str = "") -> str:
        return f"b/{quote(self.name, safe='')}/o" + (f"/{quote(key, safe='')}" if key else "")

    @property
    def _uploads(self) -> str:
        return f"{self._beside('upload')}/{self._path()}"

    def _beside(self, name: str) -> str:
        """Where the API has what is not below its own root."""
        return f"{str(self._fs.base).removesuffix('/storage/v1/')}/{name}/storage/v1"


class Upload:
    """An object on its way in parts. It appears at `finish`, or never."""

    def __init__(self, bucket: Bucket, location: str) -> None:
        self._bucket = bucket
        self._location = location
        self._there = 0

    def send(self, data: io.BytesIO) -> None:
        """The next part, as long as `part_nbytes` said."""
        end = self._there + data.getbuffer().nbytes
        while self._there < end:
            self._put(data, end, "*")

    def finish(self, data: io.BytesIO) -> None:
        """The last part, which is not empty; then the object is there."""
        end = self._there + data.getbuffer().nbytes
        told = b""
        while self._there < end:
            told = self._put(data, end, str(end))
        _check_size(told, end)

    def abort(self) -> None:
        """Gives up: GCS forgets the parts."""
        self._bucket.call("DELETE", self._location)

    def _put(self, data: io.BytesIO, end: int, total: str) -> bytes:
        """Sends what is not there yet of `data`, which ends at `end`; a part sent twice is stored once. Returns the answer's body."""
        rest = data.getbuffer()[self._there - end :]
        wanted = {**_BINARY, "Content-Range": f"bytes {self._there}-{end - 1}/{total}"}
        try:
            headers, told = self._bucket.call("PUT", self._location, headers=wanted, data=_Body(rest))
        except FileNotFoundError as exc:
            raise Refused("410", "GCS has forgotten the upload") from exc
        # "Range: bytes=0-N" while there is more to come; without it, nothing is there, or all of it.
        there = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else end if total != "*" else 0
        last = end if total == "*" else end + 1  # the emulator counts one too many when the object is complete
        if not self._there < there <= last:
            raise Refused("503", f"GCS holds {there} bytes of the upload, after {self._there}, when {end} were sent")
        self._there = min(there, end)
        return told


class _Body(io.BytesIO):
    """Bytes that can be sent again: aiohttp closes what it has sent, and warns of large bodies that are no files."""

    def close(self) -> None:
        self.seek(0)


def _condition(replacing: str | None) -> dict[str, str]:
    """The parameter of a call that takes place only over `replacing`."""
    return {} if replacing is None else {"ifGenerationMatch": "0" if replacing == ABSENT else replacing}


def _parsed(told: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(told))
    except (TypeError, ValueError) as exc:
        raise Refused("502", "the answer is no JSON object") from exc


def _check_size(told: bytes, nbytes: int) -> None:
    """Raises unless an answer tells of an object of `nbytes` bytes."""
    stored = int(_parsed(told).get("size", -1))
    if stored != nbytes:
        raise Refused("IncompleteBody", f"GCS stored {stored} of {nbytes} bytes")


def _statuses(content_type: str, body: bytes) -> list[int]:
    """The HTTP status of each answer in a batch, in order."""
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    # "HTTP/1.1 204 No Content"
    return [int(str(part.get_payload()).split(None, 2)[1]) for part in message.iter_parts()]


def _written(found: dict[str, Any]) -> float:
    """When an object was written, in seconds since the epoch; `updated` also tells of changes to what is said of it."""
    told = found.get("timeCreated") or found.get("updated")
    return datetime.fromisoformat(told).timestamp() if told else 0.0
