"""Addresses: what is one, who can reach it."""

from __future__ import annotations

import pytest

from ckptd import config
from ckptd.addresses import HOST_LENGTH, host_of, is_peer, is_reachable, is_unix, is_wildcard, parse_address, parse_peer
from ckptd.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/ckptd.sock", "unix:/run/ckptd.sock"),
        ("unix:///run/ckptd.sock", "unix:/run/ckptd.sock"),
        ("127.0.0.1:7070", "127.0.0.1:7070"),
        ("[::1]:7070", "[::1]:7070"),
        ("node-3.cluster:7070", "node-3.cluster:7070"),
        ("ckptd_node.3.:7070", "ckptd_node.3.:7070"),
        ("xn--bcher-kva.example:7070", "xn--bcher-kva.example:7070"),
        ("[fe80::1%eth0.100]:7070", "[fe80::1%eth0.100]:7070"),
    ],
)
def test_an_address_is_a_socket_or_a_host_with_a_port(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "foo",
        ":7070",
        "host:",
        "host:port",
        "host:0",
        "host:65536",
        "::1:7070",
        "a b:1",
        "http://h:1",
        "unix:",
        "unix:/",
        "unix:a.sock",
        "unix:/a\0b",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_address(text)


def test_a_socket_path_longer_than_the_kernel_takes_is_refused_with_the_limit() -> None:
    parse_address("unix:/" + "a" * 106)
    with pytest.raises(InvalidRequest, match="at most 107 bytes"):
        parse_address("unix:/" + "a" * 107)


@pytest.mark.parametrize(
    ("address", "host", "reachable", "wildcard"),
    [
        ("127.0.0.1:7070", "127.0.0.1", False, False),
        ("127.5.5.5:7070", "127.5.5.5", False, False),
        ("localhost:7070", "localhost", False, False),
        ("LOCALHOST:7070", "LOCALHOST", False, False),
        ("[::1]:7070", "::1", False, False),
        ("[::ffff:127.0.0.1]:7070", "::ffff:127.0.0.1", False, False),
        ("10.0.0.5:7070", "10.0.0.5", True, False),
        ("node-3:7070", "node-3", True, False),
        ("localhost.example:7070", "localhost.example", True, False),
        # The resolver reads these as 127.0.0.1 and 0.0.0.0, but nobody writes them by mistake: the careful answer will do.
        ("127.1:7070", "127.1", True, False),
        ("0.0.0.0:7070", "0.0.0.0", True, True),
        ("[::]:7070", "::", True, True),
        ("[::ffff:0.0.0.0]:7070", "::ffff:0.0.0.0", True, True),
        ("[fe80::1%eth0]:7070", "fe80::1%eth0", True, False),
    ],
)
def test_only_loopback_addresses_are_out_of_reach_of_others(address: str, host: str, reachable: bool, wildcard: bool) -> None:
    assert parse_address(address) == address
    assert not is_unix(address)
    assert (host_of(address), is_reachable(address), is_wildcard(address)) == (host, reachable, wildcard)


def test_a_socket_is_of_this_machine() -> None:
    assert is_unix("unix:/run/ckptd.sock")
    assert not is_reachable("unix:/run/ckptd.sock")


@pytest.mark.parametrize("text", ["unix:/run/ckptd.sock", "0.0.0.0:7070", "[::]:7070", "node-3", ":7070"])
def test_what_other_nodes_cannot_call_is_no_peer(text: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        parse_peer(text)


def test_a_peer_is_a_host_with_a_port() -> None:
    assert parse_peer("ckptd.jobs.svc.cluster.local:7070") == "ckptd.jobs.svc.cluster.local:7070"


#: What a client, another node or a file may bring instead of an address. gRPC cannot write the first ones into a call's metadata.
NO_PEERS = [
    "a\nb:1",
    "a\x01b:1",
    "\x7f:1",
    "b\u00fccher.example:7070",
    "\udcfc:7070",
    "x" * (HOST_LENGTH + 1) + ":1",
    "a\0b:1",
    "a,b:1",
    "a:1,b:1",
    "%%%:1",
    "user@host:1",
    "dns:///x:1",
    "vsock:1:2",
    "[node-3]:1",
    "[127.0.0.1]:1",
    "[::zz]:1",
    "[fe80::1%\x01]:1",
    "[fe80::1%]:1",
    "[]:1",
    "",
    "unix:/run/ckptd.sock",
    "0.0.0.0:7070",
]


@pytest.mark.parametrize("text", NO_PEERS)
def test_nobody_is_called_by_what_is_no_address(text: str) -> None:
    assert not is_peer(text)
    with pytest.raises(InvalidRequest) as caught:
        parse_peer(text)
    assert str(caught.value).isprintable()


def test_an_address_that_nodes_are_called_by_is_taken_whoever_brings_it() -> None:
    for text in ("127.0.0.1:7070", "[::1]:7070", "[fe80::1%eth0]:7070", "node-3:1", "no..name:7070", "x" * HOST_LENGTH + ":1"):
        assert is_peer(text)


@pytest.mark.parametrize("option", ["listen", "advertise", "peer"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b\u00fccher.example:7070", "give an international name in its xn-- form"),
        ("a\x01b:7070", "a host's name has letters, digits, '-', '.' and '_' only"),
        ("\x7f:7070", "a host's name has letters, digits, '-', '.' and '_' only"),
        ("x" * 300 + ":7070", "a host's name has at most 253 characters"),
        ("[node-3]:7070", "NAME:PORT without them"),
    ],
)
def test_an_option_with_an_odd_address_is_refused_with_what_is_wrong(option: str, text: str, why: str) -> None:
    flags: dict[str, str | list[str]] = {"store": "/data", "listen": ["127.0.0.1:7070"], "insecure": "true"}
    flags[option] = text if option == "advertise" else [text]
    with pytest.raises(InvalidRequest) as caught:
        config.load(flags, {})
    assert str(caught.value).startswith(f"--{option}: ")
    assert why in str(caught.value)
