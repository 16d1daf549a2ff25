"""What people are told who give a command an address of a daemon that is not for commands: the words that lead on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from ckptd.cli.main import main
from hosts import Host, Hosts


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A daemon on a socket and on TCP, there with TLS."""
    home = tmp_path_factory.mktemp("host")
    files = {name: home / name for name in ("cert", "key", "ca")}
    hosts = Hosts(1, home / "store", *(argument for name, path in files.items() for argument in (f"--tls-{name}", str(path))))
    ca = trustme.CA()
    made = ca.issue_cert(hosts[0].place.ip)
    files["cert"].write_bytes(made.cert_chain_pems[0].bytes())
    files["key"].write_bytes(made.private_key_pem.bytes())
    files["ca"].write_bytes(ca.cert_pem.bytes())
    with hosts:
        yield hosts[0]


def complaint(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line that a command ends with which cannot reach a daemon."""
    assert main(list(command)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_command_that_comes_over_tcp_to_a_daemon_with_tls_is_sent_to_the_socket(
    host: Host, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, command, "--address", host.peer)
    assert f"no daemon answers at {host.peer}" in said
    assert "or use its unix socket if it speaks TLS" in said
    assert main([command, "--address", host.address]) == 0


def test_a_daemon_without_tls_answers_commands_over_tcp_and_where_tls_cannot_be_the_reason_it_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Hosts(1, tmp_path / "store") as hosts:
        assert main(["list", "--address", hosts[0].peer]) == 0
        capsys.readouterr()
        hosts[0].kill()
        assert "TLS" in complaint(capsys, "list", "--address", hosts[0].peer)
        assert "TLS" not in complaint(capsys, "list", "--address", hosts[0].address)
