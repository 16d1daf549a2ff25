"""What storage packages raise, told as what the caller should do: the edge where their errors enter.

Promises: every exception of fsspec, s3fs, gcsfs, botocore and aiohttp comes out as one of
ours, `from exc`; a missing bucket is never mistaken for a missing object; what is not known
to be final counts as passing, because giving up an accepted checkpoint costs more than
another try. Imports none of those packages: they are told apart by error codes, HTTP
statuses and the names of their classes.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, Final

from ckptd.errors import CkptdError, NotFound, StoreError, Unavailable

_DENIED: Final = "check the credentials and what they permit"
_EXPIRED: Final = "the credentials have expired or the clock is wrong"
_NO_BUCKET: Final = "create the bucket, or correct the name"

#: Codes of S3 for which the HTTP status alone would say the wrong thing or is not told, with what to tell (StoreError) …
_FINAL: Final = {
    "AccessDenied": _DENIED,
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": "correct the bucket's name",
    "PermanentRedirect": "the bucket is in another region: set --store-option region_name=…",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --store-option region_name=…",
    "IllegalLocationConstraintException": "the bucket is in another region: set --store-option region_name=…",
    "NotImplemented": "the store does not offer this operation",
}
#: … or which pass (Unavailable): a fresh token, a quieter minute, an intact transmission.
_PASSING: Final = {
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "RequestTimeTooSkewed": _EXPIRED,
    "SlowDown": "",
    "Throttling": "",
    "ThrottlingException": "",
    "RequestTimeout": "",
    "BadDigest": "",
    "IncompleteBody": "",
    "XAmzContentSHA256Mismatch": "",
    "NoSuchUpload": "",
}
#: 410 is the word for an upload that GCS has forgotten.
_PASSING_STATUSES: Final = frozenset({408, 409, 410, 425, 429})
#: What a service says of credentials that it does not take, whatever they permit.
_NOT_TAKEN: Final = frozenset(
    {"401", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "SignatureDoesNotMatch", "Unauthorized"}
)
_NO_AWS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role, or give --store-option key=… and secret=…"
_NO_GOOGLE: Final = (
    "set GOOGLE_APPLICATION_CREDENTIALS, log in with gcloud auth application-default login, or give --store-option token=FILE"
)
#: Classes of botocore and google-auth that mean a wrong setup, with what to do about it.
_SETUP: Final = {
    "NoCredentialsError": _NO_AWS,
    "PartialCredentialsError": _NO_AWS,
    "ProfileNotFound": "correct the profile's name or its file",
    "ConfigNotFound": "correct the profile's file",
    "ConfigParseError": "correct the profile's file",
    "NoRegionError": "set --store-option region_name=…",
    "InvalidRegionError": "set --store-option region_name=…",
    "ParamValidationError": "correct the bucket's name",
    "DefaultCredentialsError": _NO_GOOGLE,
}
#: errno by which s3fs passes on what S3 answered without a body, and others the operating system's word.
_FINAL_ERRNOS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.ENAMETOOLONG, errno.EFBIG}
)


class Refused(OSError):
    """A refusal inside an answer that was good as a whole; shaped as botocore shapes its errors."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.response = {"Error": {"Code": code, "Message": message}}


@contextlib.contextmanager
def translated(what: str, *, missing: type[NotFound | StoreError]) -> Iterator[None]:
    """Raises what happens inside as ours. `missing` is what a plain "not found" means for this call."""
    try:
        yield
    except CkptdError:
        raise
    except Exception as exc:
        raise _ours(what, exc, missing) from exc


def code_of(exc: BaseException) -> str:
    """The error code that the service gave (its HTTP status, as text, if it gave none); "" if it never answered."""
    answer = _answer(exc)
    return answer[0] if answer else ""


def credentials_refused(exc: BaseException | None) -> bool:
    """Whether the service did not take the credentials: they are wrong, or no longer right."""
    answer = _answer(exc)
    return answer is not None and (answer[0] in _NOT_TAKEN or _PASSING.get(answer[0]) == _EXPIRED)


def _answer(exc: BaseException | None) -> tuple[str, int] | None:
    """Error code and HTTP status behind an exception: botocore's ClientError, which s3fs wraps, or gcsfs's HttpError."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        response: Any = getattr(exc, "response", None)
        if isinstance(response, dict):
            status = _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
            code = str(response.get("Error", {}).get("Code") or status)
            return code, status or _number(code)
        if type(exc).__name__ == "HttpError":  # aiohttp's parser has a `code`, too, which is no answer of the service
            status = _number(getattr(exc, "code", None))
            return str(status), status
        exc = exc.__cause__
    return None


def _number(value: object) -> int:
    try:
        return int(value) if isinstance(value, int | str) else 0
    except ValueError:
        return 0


def _ours(what: str, exc: Exception, missing: type[NotFound | StoreError]) -> CkptdError:
    text = f"{what}: {_told(exc)}"
    answer = _answer(exc)
    if answer is not None:
        code, status = answer
        if code in _FINAL:
            return StoreError(f"{text}; {_FINAL[code]}")
        if code in _PASSING or status in _PASSING_STATUSES or (status >= 500 and status != 501):
            return Unavailable("; ".join(part for part in (text, _PASSING.get(code, "")) if part))
        if status in (401, 403):
            return StoreError(f"{text}; {_DENIED}")
        if status == 404:
            return _missing(text, missing)
        if 300 <= status < 600:
            return StoreError(text)
    if isinstance(exc, FileNotFoundError):
        return _missing(text, missing)
    if isinstance(exc, PermissionError) or (type(exc) is OSError and str(exc).startswith("Forbidden")):  # gcsfs's words for a 403
        return StoreError(f"{text}; {_DENIED}")
    for kind in type(exc).__mro__:
        if kind.__name__ in _SETUP:
            return StoreError(f"{text}; {_SETUP[kind.__name__]}")
    if isinstance(exc, OSError) and exc.errno in _FINAL_ERRNOS:
        return StoreError(text)
    if isinstance(exc, NotImplementedError):
        return StoreError(f"{what}: this kind of store does not offer the operation; use another one")
    if isinstance(exc, TypeError | ValueError | AttributeError | KeyError):
        return StoreError(f"{text}; look at the store's URL and its --store-option values")
    return Unavailable(text)


def _missing(text: str, missing: type[NotFound | StoreError]) -> CkptdError:
    return missing(f"{text}; {_NO_BUCKET}" if missing is StoreError else text)


def _told(exc: Exception) -> str:
    """One line of what an exception says of itself."""
    said = " ".join(str(exc).split()) or type(exc).__name__
    return said if len(said) <= 300 else said[:297] + "..."
