"""From a URL and its options to a file system of fsspec's: which class, with what arguments.

Promises: touches neither disk nor network; imports the package for a scheme when a URL asks for
it, and no other; what an option gets wrong is InvalidRequest as far as that can be told before
the store is asked; credentials in a URL are never shown.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import fsspec
from fsspec.registry import known_implementations

from ckptd.errors import InvalidRequest

#: Schemes whose service ckptd knows; also the extra that brings the package.
SERVICES: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Options that stay text even if they would parse as JSON: an access key may be all digits.
_TEXT: Final = frozenset({"endpoint_url", "key", "secret", "token", "username", "password", "profile", "region_name", "project"})
#: Arguments of the classes that are ours to choose, or objects that no text can be.
_NOT_OPTIONS: Final = frozenset(
    {"self", "args", "kwargs", "storage_options", "loop", "asynchronous", "session", "session_vars", "event_hooks", "use_listings_cache"}
)
#: What s3fs hands to botocore. Its default of 10 connections is fewer than the daemon's upload and fetch threads.
_S3_CONFIG: Final = {"max_pool_connections": 32, "retries": {"mode": "standard", "total_max_attempts": 3}}
#: Many stores that speak S3 refuse the checksum trailers which botocore adds to every upload since 1.36. TLS guards the way,
#: and each block has its own checksum.
_NO_TRAILERS: Final = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
#: One request of gcsfs, its body included: without it, one that is never answered would never end.
_GCS_REQUEST_SECONDS: Final = 300.0


def open_filesystem(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """The file system for a URL, and its root there, without a slash at the end.

    Raises InvalidRequest: unknown scheme, missing package, options that are not known or not taken.
    That of GCS has no credentials yet: gcs.Bucket finds them.
    """
    scheme = url.partition("://")[0].lower()
    shown = masked(url)
    kind = _filesystem_class(scheme, shown)
    with _as_invalid(shown):
        # fsspec's own way from a URL to a file system (url_to_fs) caches instances and expands patterns; these are its parts.
        arguments = {**kind._get_kwargs_from_urls(url), **values(options)}  # noqa: SLF001
        service = SERVICES.get(scheme)
        if service == "s3":
            arguments = _s3_arguments(kind, arguments)
        elif service == "gcs":
            arguments = _gcs_arguments(kind, arguments)
        fs = kind(**arguments, use_listings_cache=False, skip_instance_cache=True)
        return fs, str(kind._strip_protocol(url)).rstrip("/")  # noqa: SLF001


def values(options: Mapping[str, str]) -> dict[str, Any]:
    """What `KEY=VALUE` options say: JSON where it parses, else text."""
    return {name: _value(name, text) for name, text in options.items()}


def masked(url: str) -> str:
    """The URL without what stands before an @ in its first part."""
    scheme, _, rest = url.partition("://")
    first, slash, path = rest.partition("/")
    _, at, host = first.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}{(slash + path).rstrip('/')}"


def _filesystem_class(scheme: str, shown: str) -> Any:
    try:
        kind = fsspec.get_filesystem_class(scheme)
        if SERVICES.get(scheme) == "gcs":
            # The plain JSON API. What gcsfs offers instead asks each bucket over gRPC what kind it is before anything else, which
            # needs a permission of its own and takes minutes where that port leads nowhere.
            from gcsfs.core import GCSFileSystem as kind  # type: ignore[no-redef]  # noqa: N813

            # What it gives up is raised, and told once, as an error of ours.
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    except ImportError as exc:
        known = known_implementations.get(scheme, {}).get("err", "")
        extra = SERVICES.get(scheme)
        advice = f"pip install 'ckptd[{extra}]'" if extra else known or f"install the package that serves {scheme}://"
        raise InvalidRequest(f"store {shown!r} needs a package that is not installed: {advice}") from exc
    except ValueError as exc:
        raise InvalidRequest(
            f"store {shown!r}: the scheme {scheme!r} is unknown; known are a directory, file, s3, gs, memory and fsspec's other schemes"
        ) from exc
    return kind


def _s3_arguments(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession
    from botocore.session import Session

    # s3fs hands what it does not know to the session.
    _check_names(options, kind.__init__, AioSession.__init__, also=("region_name",))
    client = dict(options.pop("client_kwargs", {}))
    _check_names(client, Session.create_client, within="client_kwargs")
    region = options.pop("region_name", None)
    if region is not None:
        client = {"region_name": region, **client}
    custom = any(
        (options.get("endpoint_url"), client.get("endpoint_url"), *map(os.environ.get, ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")))
    )
    plain = {name: value for name, value in _NO_TRAILERS.items() if custom and name in AioConfig.OPTION_DEFAULTS}
    config = {**_S3_CONFIG, **plain, **options.pop("config_kwargs", {})}
    AioConfig(**config)  # refuses what it does not know; s3fs would ask only when it connects
    return {**options, "client_kwargs": client, "config_kwargs": config}


def _gcs_arguments(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    _check_names(options, *(base.__init__ for base in kind.__mro__ if base is not object))
    return {"requests_timeout": _GCS_REQUEST_SECONDS, **options, "token": "anon"}


def _check_names(given: Mapping[str, Any], *takers: Callable[..., Any], also: tuple[str, ...] = (), within: str = "") -> None:
    """Raises ValueError if `given` has a name that none of `takers` has a parameter for."""
    known = {*also, *(name for taker in takers for name in inspect.signature(taker).parameters)} - _NOT_OPTIONS
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"{f'{within}: ' if within else ''}{name!r} is unknown{meant}")


def _value(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if name in _TEXT and not isinstance(value, dict) else value


@contextlib.contextmanager
def _as_invalid(shown: str) -> Iterator[None]:
    """Whatever a constructor does not like is the caller's to fix."""
    try:
        yield
    except Exception as exc:
        raise InvalidRequest(f"store {shown!r}: {exc}; look at its --store-option values") from exc
