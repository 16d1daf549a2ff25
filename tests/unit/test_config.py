"""Settings: what texts mean, which source decides, and that a mistake names its source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd import addresses, config, options
from ckptd.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1073741824", 2**30),
        ("64MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        ("2G", 2 * 2**30),
        ("2 GiB", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("10KB", 10_000),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: str, nbytes: int) -> None:
    assert options.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1XB", "GiB", "1e9", "0x10", "1 2", "inf", "nan", "0.1B", "9" * 40, "\u0661GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        options.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0", 0.0),
        ("10s", 10.0),
        ("500ms", 0.5),
        ("1.5m", 90.0),
        ("1h", 3600.0),
        ("24H", 86400.0),
        ("2d", 172800.0),
        ("106000d", 36500 * 86400.0),
    ],
)
def test_a_duration_is_seconds_or_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert options.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "1 week", "s", "1h30m", "inf", "nan", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a duration"):
        options.parse_duration(text)


def test_defaults_are_what_the_documentation_says() -> None:
    settings = config.load({"store": "/data"}, {})
    assert settings.store == "/data"
    assert settings.store_options == {}
    assert settings.listen == (f"unix:/tmp/ckptd-{os.getuid()}/ckptd.sock",) == (addresses.default_address(),)
    assert settings.address == addresses.default_address()
    assert settings.memory is None
    assert settings.shm_dir == Path(f"/dev/shm/ckptd-{os.getuid()}")
    assert settings.codec == "zstd:1"
    assert settings.open_timeout_seconds == 60.0
    assert settings.grace_seconds == 10.0
    assert settings.log_level == "info"
    assert (settings.advertise, settings.peers, settings.replicas, settings.shared_store) == ("", (), 0, False)
    assert (settings.tls_cert, settings.tls_key, settings.tls_ca, settings.insecure) == (None, None, None, False)


def test_no_store_is_refused_with_all_ways_to_give_one() -> None:
    with pytest.raises(InvalidRequest, match=r"--store URL, CKPTD_STORE, or store in"):
        config.load({}, {})


def test_flags_go_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text('store = "/file"\nmemory = "1GiB"\ncodec = "none"\ngrace = 3\n')
    environ = {"CKPTD_MEMORY": "2GiB", "CKPTD_CODEC": "zstd:3", "CKPTD_CONFIG": str(file)}
    settings = config.load({"codec": "zstd:5", "store": None}, environ)
    assert (settings.store, settings.memory, settings.codec, settings.grace_seconds) == ("/file", 2 * 2**30, "zstd:5", 3.0)


def test_an_empty_variable_counts_as_absent() -> None:
    assert config.load({"store": "/data"}, {"CKPTD_MEMORY": "", "CKPTD_CONFIG": ""}).memory is None


def test_repeated_options_come_as_flags_as_a_comma_separated_variable_and_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text(
        'store = "s3://bucket"\nlisten = ["unix:/a.sock", "127.0.0.1:7070"]\n[store-option]\nendpoint_url = "http://localhost:9000"\n'
    )
    settings = config.load({"config": str(file)}, {})
    assert settings.listen == ("unix:/a.sock", "127.0.0.1:7070")
    assert settings.store_options == {"endpoint_url": "http://localhost:9000"}
    settings = config.load({"config": str(file)}, {"CKPTD_LISTEN": "unix:/b.sock,unix:/c.sock", "CKPTD_STORE_OPTION": "key=a=b,anon=false"})
    assert settings.listen == ("unix:/b.sock", "unix:/c.sock")
    assert settings.store_options == {"key": "a=b", "anon": "false"}
    settings = config.load({"config": str(file), "listen": ["unix:/d.sock"], "store-option": []}, {})
    assert settings.listen == ("unix:/d.sock",)
    assert settings.store_options == {"endpoint_url": "http://localhost:9000"}


@pytest.mark.parametrize("spelling", ["shm-dir", "shm_dir", "open-timeout", "open_timeout"])
def test_a_key_of_the_file_may_be_spelled_with_either_dash(tmp_path: Path, spelling: str) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text(f'store = "/data"\n{spelling} = "/5s"\n' if spelling.startswith("shm") else f'store = "/data"\n{spelling} = "5s"\n')
    settings = config.load({"config": str(file)}, {})
    assert settings.shm_dir == Path("/5s") or settings.open_timeout_seconds == 5.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('store = "/d"\nmemmory = 5\n', "unknown key 'memmory'"),
        ('store = "/d"\nshm-dir = "/a"\nshm_dir = "/b"\n', "shm-dir stands there twice"),
        ('store = "/d\n', "is not TOML"),
        ('store = "/d"\nmemory = "12Q"\n', "memory: '12Q' is not a size"),
        ('store = "/d"\nmemory = true\n', "memory: 'true' is not a size"),
        ('store = "/d"\nmemory = [1]\n', "memory: a string or a number is needed"),
        ('store = "/d"\nshared-store = "on"\n', "shared-store: 'on' is neither true nor false"),
        ('store = "/d"\nreplicas = true\n', "replicas: 'true' is not a number of nodes"),
        ('store = "/d"\nlisten = []\n', "listen: it must name at least one address"),
        ("store = 1979-05-27\n", "store: a string or a number is needed"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_key(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        config.load({"config": str(file)}, {})
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        config.load({"config": str(tmp_path / "none.toml")}, {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="is not TOML"):
        config.load({"config": str(tmp_path / "bytes.toml")}, {})


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"memory": "lots"}, {}, "--memory: 'lots' is not a size"),
        ({}, {"CKPTD_MEMORY": "lots"}, "CKPTD_MEMORY: 'lots' is not a size"),
        ({"codec": "gzip"}, {}, "--codec: 'gzip' is not a codec"),
        ({"open-timeout": "0"}, {}, "--open-timeout: '0' is too short"),
        ({"grace": "soon"}, {}, "--grace: 'soon' is not a duration"),
        ({"log-level": "loud"}, {}, "--log-level: 'loud' is not a log level"),
        ({"listen": ["0.0.0.0:1"]}, {}, "--listen: '0.0.0.0:1' can be reached"),
        ({}, {"CKPTD_INSECURE": "maybe"}, "CKPTD_INSECURE: 'maybe' is neither true nor false"),
        ({"replicas": "-1"}, {}, "--replicas: '-1' is not a number of nodes"),
        ({"replicas": "some"}, {}, "--replicas: 'some' is not a number of nodes"),
        ({"peer": ["node-2"]}, {}, "--peer: 'node-2' is no address"),
        ({"peer": ["unix:/a.sock"]}, {}, "--peer: 'unix:/a.sock' is of one machine only"),
        ({"advertise": "0.0.0.0:7070"}, {}, "--advertise: '0.0.0.0:7070' can be listened on, not called"),
        ({"advertise": "unix:/a.sock"}, {}, "--advertise: 'unix:/a.sock' is of one machine only"),
        ({"tls-key": ""}, {}, "--tls-key: it must name a PEM file"),
        ({"store-option": ["key"]}, {}, "--store-option: a store option has the form K=V"),
        ({"shm-dir": ""}, {}, "--shm-dir: it must name a directory"),
    ],
)
def test_a_mistake_names_the_flag_or_the_variable(flags: dict[str, str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load({"store": "/data", **flags}, environ)
    assert str(caught.value).startswith(message)


def test_an_empty_store_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--store: a store is a URL"):
        config.load({"store": " "}, {})


def test_secrets_are_not_in_messages_nor_in_the_settings_repr() -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load({"store": "/data", "store-option": ["=hunter2"]}, {})
    assert "hunter2" not in str(caught.value)
    settings = config.load({"store": "/data", "store-option": ["secret=hunter2"]}, {})
    assert "hunter2" not in repr(settings)


def test_settings_cannot_be_changed() -> None:
    settings = config.load({"store": "/data"}, {})
    with pytest.raises(AttributeError):
        settings.codec = "none"  # type: ignore[misc]


TLS = {"tls-cert": "/tls/node.pem", "tls-key": "/tls/node.key", "tls-ca": "/tls/ca.pem"}
SOCKET = "unix:/tmp/x.sock"


def settings_of(listen: list[str], **flags: str | bool | list[str]) -> config.Settings:
    return config.load({"store": "/data", "listen": listen, **flags}, {})


@pytest.mark.parametrize("text", ["0.0.0.0:7070", "10.0.0.5:7070", "[::]:7070", "[::ffff:10.0.0.5]:7070", "node-3:7070", "192.168.1.1:80"])
def test_listening_beyond_this_machine_needs_tls_or_the_word_of_the_operator(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"needs TLS: give --tls-cert, --tls-key and --tls-ca, or --insecure") as caught:
        settings_of([SOCKET, "127.0.0.1:7070", text], advertise="node-3:7070")
    assert f"--listen: '{text}'" in str(caught.value)
    assert settings_of([SOCKET, text], advertise="node-3:7070", insecure=True).insecure
    assert settings_of([SOCKET, text], advertise="node-3:7070", **TLS).tls_ca == Path("/tls/ca.pem")


@pytest.mark.parametrize("text", ["127.0.0.1:7070", "127.5.5.5:7070", "localhost:7070", "[::1]:7070", "unix:/tmp/x.sock"])
def test_listening_on_this_machine_needs_nothing(text: str) -> None:
    assert settings_of([text]).listen == (text,)


@pytest.mark.parametrize("left_out", TLS)
def test_some_of_the_tls_files_are_not_enough(left_out: str) -> None:
    given = {name: file for name, file in TLS.items() if name != left_out}
    with pytest.raises(InvalidRequest, match=f"and --{left_out} is not given"):
        settings_of([SOCKET, "127.0.0.1:7070"], **given)


def test_tls_and_insecure_contradict_each_other() -> None:
    with pytest.raises(InvalidRequest, match="--insecure goes without TLS"):
        settings_of([SOCKET, "10.0.0.5:7070"], insecure=True, **TLS)


def test_with_tls_there_must_be_a_socket_for_those_who_call_without() -> None:
    with pytest.raises(InvalidRequest, match=f"add --listen {addresses.default_address()}"):
        settings_of(["10.0.0.5:7070"], **TLS)


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [
        ([SOCKET], ""),
        ([SOCKET, "127.0.0.1:7070"], "127.0.0.1:7070"),
        ([SOCKET, "10.0.0.5:7070", "10.1.0.5:7070"], "10.0.0.5:7070"),
        # Other nodes cannot call a loopback address.
        (["127.0.0.1:7070", "10.0.0.5:7070"], "10.0.0.5:7070"),
    ],
)
def test_other_nodes_call_the_first_address_that_they_can(listen: list[str], advertise: str) -> None:
    assert settings_of(listen, insecure=True).advertise == advertise


def test_what_other_nodes_call_is_as_told() -> None:
    assert settings_of([SOCKET, "0.0.0.0:7070"], insecure=True, advertise="node-3:7071").advertise == "node-3:7071"


@pytest.mark.parametrize("listen", [["0.0.0.0:7070"], ["[::]:7070"], ["[::ffff:0.0.0.0]:7070"], ["127.0.0.1:7070", "0.0.0.0:7070"]])
def test_a_wildcard_cannot_be_called_so_the_address_must_be_told(listen: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="say with --advertise HOST:PORT"):
        settings_of(listen, insecure=True)


@pytest.mark.parametrize("flags", [{"advertise": "node-3:7070"}, {"peer": ["node-2:7070"]}, {"replicas": "1"}])
def test_what_needs_other_nodes_needs_an_address_that_they_can_call(flags: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config.load({"store": "/data", **flags}, {})
    assert f"--{next(iter(flags))} needs an address that other nodes can call" in str(caught.value)
    assert f"--listen {addresses.default_address()} --listen HOST:PORT" in str(caught.value)
    settings_of([SOCKET, "127.0.0.1:7070"], **flags)


def test_no_replicas_need_no_other_nodes() -> None:
    assert config.load({"store": "/data", "replicas": "0"}, {}).replicas == 0


def test_trainers_and_commands_use_the_socket_if_there_is_one() -> None:
    assert settings_of(["127.0.0.1:7070", SOCKET]).address == SOCKET
    assert settings_of(["127.0.0.1:7070"]).address == "127.0.0.1:7070"


def test_peers_are_repeated_and_each_counts_once() -> None:
    environ = {
        "CKPTD_PEER": "node-2:7070,ckptd.jobs.svc:7070,node-2:7070",
        "CKPTD_LISTEN": f"{SOCKET},127.0.0.1:7070",
        "CKPTD_REPLICAS": "2",
    }
    settings = config.load({"store": "/data"}, environ)
    assert (settings.peers, settings.replicas) == (("node-2:7070", "ckptd.jobs.svc:7070"), 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("1", True), ("yes", True), ("false", False), ("0", False), ("no", False), ("", False)],
)
def test_a_switch_in_the_environment_is_true_or_false(text: str, value: bool) -> None:
    assert config.load({"store": "/data"}, {"CKPTD_SHARED_STORE": text}).shared_store is value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ('"yes"', True), ("false", False), ("0", False)])
def test_a_switch_in_the_file_is_true_or_false_and_a_flag_turns_it_on(tmp_path: Path, text: str, value: bool) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text(f'store = "/d"\nshared-store = {text}\n')
    assert config.load({"config": str(file), "shared-store": None}, {}).shared_store is value
    assert config.load({"config": str(file), "shared-store": True}, {}).shared_store is True


def test_who_only_looks_is_not_asked_whether_the_daemons_addresses_go_together() -> None:
    assert config.load({}, {"CKPTD_LISTEN": f"{SOCKET},0.0.0.0:7070"}, storeless=True).address == SOCKET


def test_two_tls_files_that_are_missing_are_both_named() -> None:
    with pytest.raises(InvalidRequest, match="--tls-key and --tls-ca are not given"):
        settings_of([SOCKET], **{"tls-cert": "/tls/node.pem"})
