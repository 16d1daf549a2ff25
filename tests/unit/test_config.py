"""Settings: what texts mean, which source decides, and that a mistake names its source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd import config
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
    assert config.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1XB", "GiB", "1e9", "0x10", "1 2", "inf", "nan", "0.1B", "9" * 40, "\u0661GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        config.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0", 0.0), ("10s", 10.0), ("500ms", 0.5), ("1.5m", 90.0), ("1h", 3600.0), ("24H", 86400.0), ("2d", 172800.0)],
)
def test_a_duration_is_seconds_or_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert config.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "1 week", "s", "1h30m", "inf", "nan", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a duration"):
        config.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/ckptd.sock", "unix:/run/ckptd.sock"),
        ("unix:///run/ckptd.sock", "unix:/run/ckptd.sock"),
        ("127.0.0.1:7070", "127.0.0.1:7070"),
        ("[::1]:7070", "[::1]:7070"),
        ("node-3.cluster:7070", "node-3.cluster:7070"),
    ],
)
def test_an_address_is_a_socket_or_a_host_with_a_port(text: str, address: str) -> None:
    assert config.parse_address(text) == address


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
        config.parse_address(text)


def test_a_socket_path_longer_than_the_kernel_takes_is_refused_with_the_limit() -> None:
    config.parse_address("unix:/" + "a" * 106)
    with pytest.raises(InvalidRequest, match="at most 107 bytes"):
        config.parse_address("unix:/" + "a" * 107)


@pytest.mark.parametrize("text", ["0.0.0.0:7070", "10.0.0.5:7070", "[::]:7070", "node-3:7070", "192.168.1.1:80"])
def test_listening_beyond_this_machine_is_refused_because_it_needs_tls(text: str) -> None:
    with pytest.raises(InvalidRequest, match="needs TLS"):
        config.parse_listen(text)


@pytest.mark.parametrize("text", ["127.0.0.1:7070", "127.5.5.5:7070", "localhost:7070", "[::1]:7070", "unix:/tmp/x.sock"])
def test_listening_on_this_machine_is_fine(text: str) -> None:
    assert config.parse_listen(text) == text


def test_defaults_are_what_the_documentation_says() -> None:
    settings = config.load({"store": "/data"}, {})
    assert settings.store == "/data"
    assert settings.store_options == {}
    assert settings.listen == (f"unix:/tmp/ckptd-{os.getuid()}/ckptd.sock",) == (config.default_address(),)
    assert settings.memory is None
    assert settings.shm_dir == Path(f"/dev/shm/ckptd-{os.getuid()}")
    assert settings.codec == "zstd:1"
    assert settings.open_timeout_seconds == 60.0
    assert settings.grace_seconds == 10.0
    assert settings.log_level == "info"


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
