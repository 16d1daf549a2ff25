"""The daemon's settings: flags over environment over file over defaults, parsed once.

Every flag of `options` is also ``CKPTD_<NAME>`` (repeated ones comma-separated;
an empty variable counts as absent) and a key of the TOML file, spelled as the flag
with ``-`` or ``_``. Whatever is wrong raises InvalidRequest that names where the value came
from. This room reads the environment and the file once and touches nothing else:
whether a store or a directory is any good is found out by those who use it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ckptd.addresses import advertised, default_address, is_reachable, is_unix, shown
from ckptd.errors import InvalidRequest
from ckptd.options import OPTIONS, Option

DELETE_GRACE_SECONDS: Final = 3600.0
ORPHAN_AGE_SECONDS: Final = 86400.0


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
