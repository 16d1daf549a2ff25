"""The daemon's settings: flags over environment over file over defaults, parsed once.

`OPTIONS` is the only list of them: the CLI makes its flags from it, and every
option is also ``CKPTD_<NAME>`` (repeated ones comma-separated; an empty variable
counts as absent) and a key of the TOML file, spelled as the flag with ``-`` or
``_``. Whatever is wrong raises InvalidRequest that names where the value came
from. This room reads the environment and the file once and touches nothing else:
whether a store or a directory is any good is found out by those who use it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ckptd.addresses import advertised, default_address, is_reachable, is_unix, parse_address, parse_peer, shown
from ckptd.errors import InvalidRequest

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
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``ckptd serve`` was asked to do."""

    #: URL of the store, as given: may hold credentials, so it is not for logs.
    store: str
    #: Options of the store's filesystem, as fsspec takes them.
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Where to accept calls: ``unix:PATH`` or ``HOST:PORT``.
    listen: tuple[str, ...]
    #: ``HOST:PORT`` that other nodes call; "": this node has no TCP address.
    advertise: str = ""
    #: Other nodes that are known from the start, as ``HOST:PORT``; a name may lead to many.
    peers: tuple[str, ...] = ()
    #: So many other nodes hold a copy of each sealed shard in their memory.
    replicas: int = 0
    #: The operator's word that all nodes see the same directory under `store`.
    shared_store: bool = False
    #: PEM files: this node's certificate, its key, and who must have signed whoever calls. All three or none.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    #: Other machines may call without TLS.
    insecure: bool = False
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

    @property
    def address(self) -> str:
        """Where trainers and commands of this node call: a Unix socket if there is one, for it never needs TLS."""
        return next(filter(is_unix, self.listen), self.listen[0])


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
    """Reads seconds from ``500ms``, ``10s``, ``5m``, ``1h``, ``2d`` or ``90``."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{shown(text)} is not a duration: give seconds, or a number with ms, s, m, h or d, such as 90s or 24h")
    return float(found.group(1)) * _SECONDS[found.group(2)]


def parse_store_options(pairs: Sequence[str]) -> dict[str, str]:
    """Reads ``K=V`` pairs. Messages never show a value: it may be a secret."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidRequest("a store option has the form K=V" + (f", and {shown(key)} has no '='" if key and not equals else ""))
        options[key] = value
    return options


def load(flags: Mapping[str, str | bool | Sequence[str] | None], environ: Mapping[str, str], *, storeless: bool = False) -> Settings:
    """Merges all sources into Settings; the first source that has an option decides it as a whole.

    `flags` maps an option's name (and ``config``, the TOML file) to what the command line gave, None where it gave nothing.
    `storeless`: for those who look without serving. Where no store is given, `store` is "", which is an error otherwise;
    and whether the addresses go together is not asked, because the daemon's flags may say more.
    """
    config = flags.get("config") or environ.get("CKPTD_CONFIG")
    filed = _read_file(Path(str(config))) if config else {}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = flags.get(option.name)
        variable = environ.get(option.variable)
        if given is not None and given != []:
            source = f"--{option.name}"
            texts = [str(given).lower()] if isinstance(given, bool) else [given] if isinstance(given, str) else list(given)
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
    settings = Settings(**values)
    return settings if storeless else _together(settings)


def _together(settings: Settings) -> Settings:
    """Checks what options mean for each other, and fills in the address that other nodes call."""
    tcp = [address for address in settings.listen if not is_unix(address)]
    files = {"--tls-cert": settings.tls_cert, "--tls-key": settings.tls_key, "--tls-ca": settings.tls_ca}
    missing = [name for name, file in files.items() if file is None]
    if missing and len(missing) < len(files):
        verb = "is" if len(missing) == 1 else "are"
        raise InvalidRequest(f"TLS needs all of --tls-cert, --tls-key and --tls-ca, and {' and '.join(missing)} {verb} not given")
    if not missing and settings.insecure:
        raise InvalidRequest("--insecure goes without TLS, and --tls-cert asks for it: leave one of them out")
    if missing and not settings.insecure:
        for address in filter(is_reachable, tcp):
            raise InvalidRequest(
                f"--listen: {shown(address)} can be reached from other machines, which needs TLS: give --tls-cert, --tls-key and "
                "--tls-ca, or --insecure on a network where every machine is trusted; unix:PATH and 127.0.0.1:PORT need neither"
            )
    if not missing and len(tcp) == len(settings.listen):
        raise InvalidRequest(
            "--listen: with TLS, trainers and commands of this node call through a Unix socket: "
            f"add --listen {default_address()}, or another unix:PATH"
        )
    if not tcp:
        wanting = {"--advertise": settings.advertise, "--peer": settings.peers, "--replicas": settings.replicas}
        for name in (name for name, value in wanting.items() if value):
            raise InvalidRequest(f"{name} needs an address that other nodes can call: give --listen {settings.address} --listen HOST:PORT")
    return replace(settings, advertise=settings.advertise or advertised(settings.listen))


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
            raise InvalidRequest(f"{path}: unknown key {shown(key)}; known are {', '.join(sorted(known))}")
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
