"""Each setting of the daemon, as it is spelled and read everywhere; and how sizes, durations and counts are written.

`OPTIONS` is the only list of them: the CLI makes its flags from it, and `config` reads environment and file by it.
Whatever is wrong raises InvalidRequest with what was given, but for what may be a secret. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.addresses import parse_address, parse_peer, shown
from ckptd.errors import InvalidRequest
from ckptd.model import LONGEST_SECONDS

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for name, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|)")
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting, as it is spelled and read everywhere."""

    #: The flag without its dashes.
    name: str
    #: Attribute of Settings.
    target: str
    #: Takes the text; all texts of a repeated one.
    parse: Callable[[Any], Any]
    metavar: str
    help: str
    repeated: bool = False
    #: A flag without a value; elsewhere true or false.
    switch: bool = False

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "CKPTD_" + self.name.replace("-", "_").upper()


def parse_size(text: str) -> int:
    """Reads bytes from ``64MiB``, ``2G`` or ``1073741824``.

    K, M, G, T, P and KiB, MiB, … are powers of 1024; KB, MB, … powers of 1000.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found.group(2) not in _UNITS:
        raise InvalidRequest(f"{shown(text)} is not a size: give bytes, or a number with a unit, such as 64MiB or 2G")
    nbytes = int(float(found.group(1)) * _UNITS[found.group(2)]) if "." in found.group(1) else int(found.group(1)) * _UNITS[found.group(2)]
    if nbytes <= 0:
        raise InvalidRequest(f"{shown(text)} is not a size: it must be more than nothing")
    return nbytes


def parse_duration(text: str) -> float:
    """Reads seconds from ``500ms``, ``10s``, ``5m``, ``1h``, ``2d`` or ``90``; more than a century is one."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{shown(text)} is not a duration: give seconds, or a number with ms, s, m, h or d, such as 90s or 24h")
    return min(float(found.group(1)) * _SECONDS[found.group(2)], LONGEST_SECONDS)


def parse_store_options(pairs: Sequence[str]) -> dict[str, str]:
    """Reads ``K=V`` pairs. Messages never show a value: it may be a secret."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidRequest("a store option has the form K=V" + (f", and {shown(key)} has no '='" if key and not equals else ""))
        options[key] = value
    return options


def _parse_store(text: str) -> str:
    if not text.strip():
        raise InvalidRequest("a store is a URL that fsspec understands: /data/ckpts, s3://bucket/prefix")
    return text


def _parse_all_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise InvalidRequest("it must name at least one address")
    return tuple(dict.fromkeys(parse_address(text) for text in texts))


def _parse_all_peers(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(parse_peer(text) for text in texts))


def _parse_switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise InvalidRequest(f"{shown(text)} is neither true nor false")
    return _SWITCH[text.lower()]


def _parse_pem(text: str) -> Path:
    if not text or "\0" in text:
        raise InvalidRequest("it must name a PEM file")
    return Path(text).absolute()


def _parse_replicas(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise InvalidRequest(f"{shown(text)} is not a number of nodes: give 0, 1, 2, …")
    return int(text)


def _parse_directory(text: str) -> Path:
    if not text or "\0" in text:
        raise InvalidRequest("it must name a directory on tmpfs")
    return Path(text).absolute()


def _parse_positive(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise InvalidRequest(f"{shown(text)} is too short: it must be more than nothing")
    return seconds


def parse_count(text: str) -> int:
    """Reads a number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise InvalidRequest(f"{shown(text)} is not a number of at least 1")
    return int(text)


def _parse_codec(text: str) -> str:
    if text != "none" and not (re.fullmatch(r"zstd:[0-9]{1,2}", text) and 1 <= int(text.removeprefix("zstd:")) <= 22):
        raise InvalidRequest(f"{shown(text)} is not a codec: give none, or zstd:LEVEL with a level from 1 to 22")
    return text


def _parse_log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise InvalidRequest(f"{shown(text)} is not a log level: give one of {', '.join(LOG_LEVELS)}")
    return text.lower()


OPTIONS: Final[tuple[Option, ...]] = (
    Option("store", "store", _parse_store, "URL", "where checkpoints become durable: a directory, s3://bucket/prefix, …"),
    Option(
        "store-option", "store_options", parse_store_options, "K=V", "option of the store's filesystem, as fsspec takes it", repeated=True
    ),
    Option("listen", "listen", _parse_all_addresses, "ADDRESS", "unix:/absolute/path, or HOST:PORT for other nodes", repeated=True),
    Option("advertise", "advertise", parse_peer, "HOST:PORT", "what other nodes call (the first --listen HOST:PORT)"),
    Option("peer", "peers", _parse_all_peers, "HOST:PORT", "another node; a name may lead to many", repeated=True),
    Option(
        "replicas",
        "replicas",
        _parse_replicas,
        "N",
        "so many other nodes of a save, or all, hold a copy of each shard (0)",
    ),
    Option("shared-store", "shared_store", _parse_switch, "", "all nodes see the same directory under --store", switch=True),
    Option("tls-cert", "tls_cert", _parse_pem, "FILE", "PEM file: this node's certificate, and those between it and the CA's"),
    Option("tls-key", "tls_key", _parse_pem, "FILE", "PEM file: the certificate's key, not encrypted"),
    Option("tls-ca", "tls_ca", _parse_pem, "FILE", "PEM file: the CA that must have signed every node's certificate"),
    Option("insecure", "insecure", _parse_switch, "", "let other machines call without TLS", switch=True),
    Option("memory", "memory", parse_size, "SIZE", "budget for all segments, such as 64GiB (half of what the shm-dir can hold)"),
    Option("shm-dir", "shm_dir", _parse_directory, "DIR", "directory on tmpfs for segments (/dev/shm/ckptd-<uid>)"),
    Option("codec", "codec", _parse_codec, "CODEC", "zstd:LEVEL or none (zstd:1)"),
    Option("open-timeout", "open_timeout_seconds", _parse_positive, "D", "drop the shards of an unfinished save after this time (60s)"),
    Option("grace", "grace_seconds", parse_duration, "D", "how long an orderly end may flush (10s)"),
    Option("keep-last", "keep_last", parse_count, "N", "of each run, keep the N checkpoints accepted last; delete what no rule keeps"),
    Option("keep-every", "keep_every", parse_count, "K", "of each run, keep those whose step is a multiple of K"),
    Option("keep-within", "keep_within_seconds", _parse_positive, "AGE", "of each run, keep those accepted within this time, such as 2d"),
    Option("delete-grace", "delete_grace_seconds", parse_duration, "D", "files of a deleted checkpoint go after this time (1h)"),
    Option("orphan-age", "orphan_age_seconds", parse_duration, "D", "files of uploads that were cut off go after this time (24h)"),
    Option("log-level", "log_level", _parse_log_level, "LEVEL", f"{', '.join(LOG_LEVELS)} (info)"),
)
