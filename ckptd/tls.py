"""Mutual TLS between nodes: the operator's PEM files as gRPC's credentials.

Promises: a file that cannot be used is InvalidRequest with its name, before anything listens, and
a certificate is tried in a handshake with itself: what the other nodes would refuse is refused at
the start. Reads the files when it is called, and never again: a new certificate needs a restart.
A key never gets into a message.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from ckptd.addresses import host_of
from ckptd.config import Settings
from ckptd.errors import InvalidRequest

log = logging.getLogger(__name__)


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """For listening: callers must have a certificate of the CA. None without TLS files; raises InvalidRequest."""
    files = _read(settings)
    if files is None:
        return None
    if settings.tls_key is not None and settings.tls_key.stat().st_mode & 0o044:
        log.warning("--tls-key: other users can read %s, and with it be this node: chmod 600 %s", settings.tls_key, settings.tls_key)
    return grpc.ssl_server_credentials([(files.key, files.cert)], root_certificates=files.ca, require_client_auth=True)


def channel_credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    """For calling: other nodes must have a certificate of the CA, for the host called. None without TLS files; raises InvalidRequest."""
    files = _read(settings)
    if files is None:
        return None
    return grpc.ssl_channel_credentials(root_certificates=files.ca, private_key=files.key, certificate_chain=files.cert)


def meaning(details: str, *, with_tls: bool) -> str:
    """What gRPC's words for a connection that failed mean, where TLS is the reason, to follow "the daemon at X"; else "".

    `with_tls`: whether this node calls with TLS.
    """
    if "WRONG_VERSION_NUMBER" in details:
        return "speaks no TLS, and this one does: give all nodes --tls-cert, --tls-key and --tls-ca"
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return "is not trusted: its certificate is not signed by this node's --tls-ca, is over, or names another host"
    if "failed to connect" in details and "Socket closed" in details:  # it does not tell whom it does not like
        if with_tls:
            return "ended the connection: is this node's certificate signed by that node's --tls-ca, and still valid?"
        return "ended the connection: it may speak TLS, and this one does not; give all nodes --tls-cert, --tls-key and --tls-ca"
    return ""


@dataclass(frozen=True, slots=True)
class _Files:
    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


def _read(settings: Settings) -> _Files | None:
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        return None
    cert, key, ca = (
        _bytes(name, path)
        for name, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key), ("--tls-ca", settings.tls_ca))
    )
    _try(settings.tls_cert, settings.tls_key, settings.tls_ca, cert, ca, host_of(settings.advertise))
    return _Files(cert, key, ca)


def _bytes(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"{name}: cannot read {path}: {exc.strerror}") from exc


def _try(cert_file: Path, key_file: Path, ca_file: Path, cert: bytes, ca: bytes, host: str) -> None:
    """Has the files serve and call at once, under the name that other nodes call; raises what is wrong with them."""
    serving, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.verify_mode = ssl.CERT_REQUIRED
    calling.check_hostname = bool(host)
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert, f"--tls-cert: {cert_file}")
    for context in (serving, calling):
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: a CA that another one signed is as good as a root
        _trust(context, ca, f"--tls-ca: {ca_file}")
        _identify(context, cert_file, key_file)
    try:
        _shake_hands(serving, calling, host or None)
    except (ssl.SSLError, ValueError) as exc:  # a name that cannot be a host's is a ValueError
        why = exc.verify_message.rstrip(".") if isinstance(exc, ssl.SSLCertVerificationError) else _reason(exc)
        raise InvalidRequest(
            f"--tls-cert: other nodes would refuse {cert_file}: {why}; it must be signed by the CA in {ca_file}, be valid now, "
            f"for servers and for clients, and name the host of --advertise{f' ({host})' if host else ''}"
        ) from exc


def _trust(context: ssl.SSLContext, pem: bytes, what: str) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))  # people write what they like between certificates
    except (ssl.SSLError, ValueError) as exc:
        raise InvalidRequest(f"{what} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----): {_reason(exc)}") from exc


def _identify(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    def locked() -> NoReturn:  # without it OpenSSL would ask at the terminal
        raise InvalidRequest(
            f"--tls-key: {key} is encrypted: give a key without a passphrase, in a file that only the daemon's user can read"
        )

    try:
        context.load_cert_chain(cert, key, password=locked)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequest(f"--tls-key: {key} is not the key of the certificate in {cert}") from exc
        raise InvalidRequest(f"--tls-key: {key} holds no key in PEM form that goes with {cert}: {_reason(exc)}") from exc


def _shake_hands(serving: ssl.SSLContext, calling: ssl.SSLContext, host: str | None) -> None:
    """A handshake in memory. Raises ssl.SSLError if either side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        calling.wrap_bio(to_client, to_server, server_hostname=host),
        serving.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        for side in tuple(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue  # the other one's turn
            sides.remove(side)


def _reason(exc: Exception) -> str:
    reason = exc.reason if isinstance(exc, ssl.SSLError) else None
    return (reason or str(exc)).replace("_", " ").lower()
