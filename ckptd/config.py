"""The daemon's settings: flags over environment over file over defaults, parsed once.

`OPTIONS` is the only list of them: the CLI makes its flags from it, and every
option is also ``CKPTD_<NAME>`` (repeated ones comma-separated; an empty variable
counts as absent) and a key of the TOML file, spelled as the flag with ``-`` or
``_``. Whatever is wrong raises InvalidRequest that names where the value came
from. This room reads the environment and the file once and touches nothing else:
whether a store or a directory is any good is found out by those who use it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ckptd.errors import InvalidRequest

#: A Unix socket's path has at most this many bytes (sun_path without its NUL).
SOCKET_PATH_NBYTES: Final = 107
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
DELETE_GRACE_SECONDS: Final = 3600.0
ORPHAN_AGE_SECONDS: Final = 86400.0

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for name, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``ckptd serve`` was asked to do."""

    #: URL of the store, as given: may hold credentials, so it is not for logs.
    store: str
    #: Options of the store's filesystem, as fsspec takes them.
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Where to accept calls: ``unix:PATH`` or ``HOST:PORT`` with a loopback host.
    listen: tuple[str, ...]
    #: Budget for all segments in bytes; None: half of what the shm-dir's filesystem can hold.
    memory: int | None = None
    #: Directory on tmpfs that holds the segments.
    shm_dir: Path
    #: ``zstd:LEVEL`` or ``none``.
    codec: str = "zstd:1"
    #: Sealed shards of a save that never committed are dropped after this time.
    open_timeout_seconds: float = 60.0
    #: How long an orderly end may take to flush what is accepted.
    grace_seconds: float = 10.0
    #: Of each run: this many checkpoints, those accepted last, stay; None: no such rule.
    keep_last: int | None = None
    #: Of each run: those whose step is a multiple of this stay; None: no such rule.
    keep_every: int | None = None
    #: Of each run: those accepted so recently stay; None: no such rule. Without any rule nothing is deleted.
    keep_within_seconds: float | None = None
    #: Files of a deleted checkpoint stay so long: a load may be reading them.
    delete_grace_seconds: float = DELETE_GRACE_SECONDS
    #: Files that belong to no checkpoint stay so long: an upload may be on its way.
    orphan_age_seconds: float = ORPHAN_AGE_SECONDS
    #: One of LOG_LEVELS.
    log_level: str = "info"


def parse_size(text: str) -> int:
    """Reads bytes from ``64MiB``, ``2G`` or ``1073741824``.

    K, M, G, T, P and KiB, MiB, … are powers of 1024; KB, MB, … powers of 1000.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found.group(2) not in _UNITS:
        raise InvalidRequest(f"{_shown(text)} is not a size: give bytes, or a number with a unit, such as 64MiB or 2G")
    nbytes = int(float(found.group(1)) * _UNITS[found.group(2)]) if "." in found.group(1) else int(found.group(1)) * _UNITS[found.group(2)]
    if nbytes <= 0:
        raise InvalidRequest(f"{_shown(text)} is not a size: it must be more than nothing")
    return nbytes


def parse_duration(text: str) -> float:
    """Reads seconds from ``500ms``, ``10s``, ``5m``, ``1h``, ``2d`` or ``90``."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{_shown(text)} is not a duration: give seconds, or a number with ms, s, m, h or d, such as 90s or 24h")
    return float(found.group(1)) * _SECONDS[found.group(2)]


def default_address() -> str:
    """Where a daemon of this user listens, and clients look, unless told otherwise."""
    return f"unix:/tmp/ckptd-{os.getuid()}/ckptd.sock"  # the daemon makes the directory, mode 0700


def parse_address(text: str) -> str:
    """Reads an address to call: ``unix:PATH`` or ``HOST:PORT``; returns it as gRPC takes it."""
    if text.startswith("unix:"):
        # gRPC knows unix:/path and unix:///path; one spelling is enough for messages and comparisons.
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if not text.startswith("unix:/") or path == "/" or "\0" in path:
            raise InvalidRequest(f"{_shown(text)} names no socket: give unix:/absolute/path")
        if len(os.fsencode(path)) > SOCKET_PATH_NBYTES:
            raise InvalidRequest(
                f"{_shown(text)} is too long: a socket's path has at most {SOCKET_PATH_NBYTES} bytes; choose a shorter directory"
            )
        return f"unix:{path}"
    host, colon, port = text.rpartition(":")
    named = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    if not colon or not named or (":" in named and named == host) or re.search(r"[\s/\[\]]", named):
        raise InvalidRequest(f"{_shown(text)} is no address: give unix:PATH or HOST:PORT")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{_shown(text)} has no port between 1 and 65535")
    return text


def parse_listen(text: str) -> str:
    """Reads an address to listen on: as parse_address, and a TCP host must be this machine alone."""
    address = parse_address(text)
    if not address.startswith("unix:") and not _is_loopback(address.rpartition(":")[0]):
        raise InvalidRequest(
            f"{_shown(text)} can be reached from other machines, which needs TLS, and this version has none: "
            "listen on unix:PATH or 127.0.0.1:PORT"
        )
    return address


def parse_store_options(pairs: Sequence[str]) -> dict[str, str]:
    """Reads ``K=V`` pairs. Messages never show a value: it may be a secret."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidRequest("a store option has the form K=V" + (f", and {_shown(key)} has no '='" if key and not equals else ""))
        options[key] = value
    return options


def load(flags: Mapping[str, str | Sequence[str] | None], environ: Mapping[str, str], *, storeless: bool = False) -> Settings:
    """Merges all sources into Settings; the first source that has an option decides it as a whole.

    `flags` maps an option's name (and ``config``, the TOML file) to what the command line gave, None where it gave nothing.
    `storeless`: where no store is given, `store` is "", which is an error otherwise.
    """
    config = flags.get("config") or environ.get("CKPTD_CONFIG")
    filed = _read_file(Path(str(config))) if config else {}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = flags.get(option.name)
        variable = environ.get(option.variable)
        if given is not None and given != []:
            source, texts = f"--{option.name}", [given] if isinstance(given, str) else list(given)
        elif variable:
            source, texts = option.variable, [part for part in variable.split(",") if part] if option.repeated else [variable]
        elif option.name in filed:
            source, texts = f"{config}: {option.name}", _filed_texts(filed[option.name], option, f"{config}: {option.name}")
        else:
            continue
        try:
            values[option.target] = option.parse(texts) if option.repeated else option.parse(texts[-1])
        except InvalidRequest as error:
            raise InvalidRequest(f"{source}: {error}") from None
    if storeless:
        values.setdefault("store", "")
    if "store" not in values:
        raise InvalidRequest(
            "no store given: --store URL, CKPTD_STORE, or store in the --config file says where checkpoints become durable"
        )
    values.setdefault("listen", (default_address(),))
    values.setdefault("shm_dir", Path(f"/dev/shm/ckptd-{os.getuid()}"))  # noqa: S108 - the arena makes it, mode 0700
    return Settings(**values)


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

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "CKPTD_" + self.name.replace("-", "_").upper()


def _parse_store(text: str) -> str:
    if not text.strip():
        raise InvalidRequest("a store is a URL that fsspec understands: /data/ckpts, s3://bucket/prefix")
    return text


def _parse_all_listens(texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise InvalidRequest("it must name at least one address")
    return tuple(dict.fromkeys(parse_listen(text) for text in texts))


def _parse_directory(text: str) -> Path:
    if not text or "\0" in text:
        raise InvalidRequest("it must name a directory on tmpfs")
    return Path(text).absolute()


def _parse_positive(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise InvalidRequest(f"{_shown(text)} is too short: it must be more than nothing")
    return seconds


def parse_count(text: str) -> int:
    """Reads a number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise InvalidRequest(f"{_shown(text)} is not a number of at least 1")
    return int(text)


def _parse_codec(text: str) -> str:
    if text != "none" and not (re.fullmatch(r"zstd:[0-9]{1,2}", text) and 1 <= int(text.removeprefix("zstd:")) <= 22):
        raise InvalidRequest(f"{_shown(text)} is not a codec: give none, or zstd:LEVEL with a level from 1 to 22")
    return text


def _parse_log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise InvalidRequest(f"{_shown(text)} is not a log level: give one of {', '.join(LOG_LEVELS)}")
    return text.lower()


OPTIONS: Final[tuple[Option, ...]] = (
    Option("store", "store", _parse_store, "URL", "where checkpoints become durable: a directory, s3://bucket/prefix, …"),
    Option(
        "store-option", "store_options", parse_store_options, "K=V", "option of the store's filesystem, as fsspec takes it", repeated=True
    ),
    Option("listen", "listen", _parse_all_listens, "ADDRESS", "unix:/absolute/path or HOST:PORT of this machine", repeated=True),
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


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(f"--config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--config: {path} is not TOML: {error}") from error
    known = {option.name for option in OPTIONS}
    filed: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("_", "-")
        if name not in known:
            raise InvalidRequest(f"{path}: unknown key {_shown(key)}; known are {', '.join(sorted(known))}")
        if name in filed:
            raise InvalidRequest(f"{path}: {name} stands there twice, with - and with _")
        filed[name] = value
    return filed


def _filed_texts(value: Any, option: Option, source: str) -> list[str]:
    """A TOML value as the texts that flags would have given."""
    if option.repeated and isinstance(value, dict):
        entries = [f"{key}={_filed_text(entry, source)}" for key, entry in value.items()]
    elif option.repeated and isinstance(value, list):
        entries = [_filed_text(entry, source) for entry in value]
    else:
        entries = [_filed_text(value, source)]
    return entries


def _filed_text(value: Any, source: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidRequest(f"{source}: a string or a number is needed there")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")
