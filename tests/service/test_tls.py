"""TLS between nodes: who is let in, who is called, and files that cannot work are refused at the start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
import trustme

from ckptd import __version__, config, peers, tls
from ckptd.errors import InvalidRequest, Unavailable
from ckptd.peers import Peers
from ckptd.v1 import daemon_pb2, daemon_pb2_grpc, peer_pb2
from daemons import DaemonProcess
from hosts import free_port


@dataclass(frozen=True)
class Files:
    """One node's TLS files."""

    cert: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    def settings(self, advertise: str = "127.0.0.1:7070") -> config.Settings:
        flags = {"tls-cert": str(self.cert), "tls-key": str(self.key), "tls-ca": str(self.ca)}
        listen = ["unix:/tmp/x.sock", "127.0.0.1:7070"]
        return config.load({"store": "/data", "listen": listen, "advertise": advertise, **flags}, {})


def issue(directory: Path, ca: trustme.CA, *names: str, not_after: datetime | None = None) -> Files:
    """The files of a node with these names, whose certificate that CA signed."""
    directory.mkdir(parents=True, exist_ok=True)
    made = ca.issue_cert(*names, not_after=not_after)
    files = Files(directory / "node.pem", directory / "node.key", directory / "ca.pem")
    files.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    files.key.write_bytes(made.private_key_pem.bytes())
    files.ca.write_bytes(ca.cert_pem.bytes())
    return files


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(ca: trustme.CA, tmp_path: Path) -> Files:
    return issue(tmp_path, ca, "127.0.0.1", "node-3")


@dataclass(frozen=True)
class Node:
    """A daemon with TLS on two loopback addresses; its certificate names the first alone."""

    process: DaemonProcess
    address: str
    unnamed: str


@pytest.fixture(scope="module")
def node(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("node")
    files = issue(home / "tls", ca, "127.0.0.1")
    address, unnamed = f"127.0.0.1:{free_port()}", f"127.0.0.2:{free_port('127.0.0.2')}"
    with DaemonProcess(str(home / "store"), "--listen", address, "--listen", unnamed, *files.flags, memory="64MiB") as process:
        yield Node(process, address, unnamed)


def hello(address: str, credentials: grpc.ChannelCredentials | None, *, named: str = "") -> str:
    """The version that answers there; raises grpc.RpcError. `named`: the host that the certificate must name instead."""
    options = (("grpc.ssl_target_name_override", named),) if named else ()
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials, options=options)
    with channel:
        reply = daemon_pb2_grpc.DaemonStub(channel).Hello(daemon_pb2.HelloRequest(version=__version__), timeout=10)
    return str(reply.version)


def refused(address: str, credentials: grpc.ChannelCredentials | None) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        hello(address, credentials)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_node_with_a_certificate_of_the_ca_is_answered(node: Node, files: Files) -> None:
    assert hello(node.address, tls.channel_credentials(files.settings())) == __version__
    # The second address is served alike; only its name is missing in the certificate.
    assert hello(node.unnamed, tls.channel_credentials(files.settings()), named="127.0.0.1") == __version__


def test_without_a_certificate_nobody_is_answered(node: Node, files: Files) -> None:
    refused(node.address, grpc.ssl_channel_credentials(files.ca.read_bytes()))
    refused(node.unnamed, grpc.ssl_channel_credentials(files.ca.read_bytes()))


def test_with_a_certificate_of_another_ca_nobody_is_answered(node: Node, ca: trustme.CA, tmp_path: Path) -> None:
    other = issue(tmp_path, trustme.CA(), "127.0.0.1")
    # It trusts the node; the node does not trust it.
    refused(node.address, grpc.ssl_channel_credentials(ca.cert_pem.bytes(), other.key.read_bytes(), other.cert.read_bytes()))


def test_without_tls_nobody_is_answered_over_tcp_loopback_or_not(node: Node) -> None:
    refused(node.address, None)
    refused(node.unnamed, None)


def test_a_node_of_another_ca_is_not_called(node: Node, files: Files, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", trustme.CA(), "127.0.0.1")
    # The node would answer this certificate: it is the caller who does not trust the node.
    refused(node.address, grpc.ssl_channel_credentials(other.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()))


def test_a_node_whose_certificate_does_not_name_the_host_is_not_called(node: Node, files: Files) -> None:
    refused(node.unnamed, tls.channel_credentials(files.settings()))


def test_trainers_and_commands_go_through_the_socket_without_certificates(node: Node) -> None:
    assert node.process.cli("status").returncode == 0


def test_without_tls_files_there_are_no_credentials() -> None:
    settings = config.load({"store": "/data", "listen": ["unix:/tmp/x.sock", "10.0.0.5:7070"], "insecure": True}, {})
    assert tls.server_credentials(settings) is None
    assert tls.channel_credentials(settings) is None


def complaint(settings: config.Settings) -> str:
    """What is wrong with the files; the same for who serves and who calls."""
    with pytest.raises(InvalidRequest) as serving:
        tls.server_credentials(settings)
    with pytest.raises(InvalidRequest) as calling:
        tls.channel_credentials(settings)
    assert str(serving.value) == str(calling.value)
    return str(serving.value)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
@pytest.mark.parametrize(
    "content", [None, b"", b"nonsense", b"\xff\xfe\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_that_is_not_there_or_not_pem_is_named(files: Files, name: str, content: bytes | None) -> None:
    path: Path = getattr(files, name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    said = complaint(files.settings())
    assert said.startswith(f"--tls-{name}: ")
    assert str(path) in said
    assert ("cannot read" if content is None else "in PEM form") in said


def test_a_directory_in_a_files_place_is_named(files: Files) -> None:
    files.ca.unlink()
    files.ca.mkdir()
    assert complaint(files.settings()).startswith(f"--tls-ca: cannot read {files.ca}")


def test_another_certificates_key_is_refused(files: Files, ca: trustme.CA, tmp_path: Path) -> None:
    files.key.write_bytes(issue(tmp_path / "other", ca, "127.0.0.1").key.read_bytes())
    assert complaint(files.settings()) == f"--tls-key: {files.key} is not the key of the certificate in {files.cert}"


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_the_passphrase(files: Files) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"hunter2")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
    assert f"{files.key} is encrypted" in complaint(files.settings())


def test_a_certificate_of_another_ca_than_that_of_the_peers_is_refused(files: Files) -> None:
    files.ca.write_bytes(trustme.CA().cert_pem.bytes())
    said = complaint(files.settings())
    assert said.startswith(f"--tls-cert: other nodes would refuse {files.cert}: ")
    assert f"signed by the CA in {files.ca}" in said


def test_a_certificate_that_is_over_is_refused(ca: trustme.CA, tmp_path: Path) -> None:
    over = issue(tmp_path, ca, "127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    assert "expired" in complaint(over.settings())


def test_a_certificate_must_name_what_other_nodes_call(files: Files) -> None:
    assert tls.server_credentials(files.settings("node-3:7070")) is not None
    said = complaint(files.settings("node-4:7070"))
    assert "--advertise (node-4)" in said


def test_a_ca_that_another_one_signed_will_do(tmp_path: Path) -> None:
    files = issue(tmp_path, trustme.CA().create_child_ca(), "127.0.0.1")
    assert tls.server_credentials(files.settings()) is not None
    assert tls.channel_credentials(files.settings()) is not None


def test_text_between_certificates_is_nobodys_business(files: Files) -> None:
    for path in (files.ca, files.cert):
        path.write_text(f"Aussteller: Prüfstelle\n{path.read_text()}")
    assert tls.server_credentials(files.settings()) is not None


def test_the_key_is_never_shown(files: Files) -> None:
    secret = files.key.read_text().splitlines()[1]
    read = tls._read(files.settings())
    assert read is not None
    assert secret in read.key.decode()
    assert secret not in repr(read)


def test_a_daemon_with_files_that_cannot_work_ends_with_2_and_their_name(files: Files, tmp_path: Path, shm_dir: Path) -> None:
    files.key.write_text("nonsense")
    listen = ["--listen", f"unix:{tmp_path}/s", "--listen", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "ckptd", "serve", "--store", str(tmp_path / "store"), "--shm-dir", str(shm_dir), *listen, *files.flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"ckptd: --tls-key: {files.key} holds no key")


def told(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    """What a node says that cannot call the one at `address`."""

    async def call() -> str:
        calling = Peers("", credentials=credentials)
        try:
            with pytest.raises(Unavailable) as caught:
                await calling.call(address, "say something", lambda stub: stub.Watch(peer_pb2.WatchRequest()))
            return str(caught.value)
        finally:
            await calling.close()

    return asyncio.run(call())


def test_who_calls_without_tls_is_told_of_it(node: Node) -> None:
    assert f"the ckptd daemon at {node.address} ended the connection: it may speak TLS, and this one does not" in told(node.address, None)


def test_another_ca_or_host_is_told_in_our_words_and_the_original_ones_stay(node: Node, files: Files, tmp_path: Path) -> None:
    other = tls.channel_credentials(issue(tmp_path / "other", trustme.CA(), "127.0.0.1").settings())
    said = told(node.address, other)
    assert f"the ckptd daemon at {node.address} is not trusted: its certificate is not signed by this node's --tls-ca" in said
    assert "CERTIFICATE_VERIFY_FAILED" in said.partition("[")[2]
    assert "names another host" in told(node.unnamed, tls.channel_credentials(files.settings()))


def test_a_node_without_tls_is_told_of_it(files: Files, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with DaemonProcess(str(tmp_path / "store"), "--listen", address, memory="64MiB"):
        assert "speaks no TLS, and this one does: give all nodes" in told(address, tls.channel_credentials(files.settings()))


def test_of_a_node_that_a_shared_name_led_to_the_certificate_has_to_have_that_name(
    ca: trustme.CA, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = issue(tmp_path / "there", ca, "node-1.test", "cluster.test")
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]

    async def found(_: str) -> list[str]:
        return [address, f"127.0.0.9:{port}"]

    async def call() -> None:
        calling = Peers("", configured=[f"cluster.test:{port}"], credentials=tls.channel_credentials(files.settings()))
        looking = asyncio.create_task(calling.look_up_forever())
        try:
            while address not in calling.known:
                await asyncio.sleep(0.05)
                assert not looking.done()
            await calling.call(address, "say something", lambda stub: stub.Watch(peer_pb2.WatchRequest()))
        finally:
            looking.cancel()
            await calling.close()

    monkeypatch.setattr(peers, "behind", found)
    with DaemonProcess(str(tmp_path / "store"), "--listen", address, "--advertise", f"node-1.test:{port}", *there.flags, memory="64MiB"):
        with pytest.raises(grpc.RpcError):
            hello(address, tls.channel_credentials(files.settings()))
        asyncio.run(call())


def test_a_key_that_others_can_read_is_worth_a_warning(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.key.chmod(0o600)
    tls.server_credentials(files.settings())
    assert caplog.messages == []
    files.key.chmod(0o640)
    tls.server_credentials(files.settings())
    assert [f"chmod 600 {files.key}" in message for message in caplog.messages] == [True]


def test_a_load_that_finds_nothing_says_which_node_could_not_be_asked_because_of_tls(node: Node, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    where = ["--listen", address, "--peer", node.address, *issue(tmp_path, trustme.CA(), "127.0.0.1").flags]
    with DaemonProcess(str(tmp_path / "store"), *where, memory="64MiB") as daemon:
        done = daemon.cli("show", "run/latest")
        assert done.returncode == 1
        assert "no checkpoint in run 'run'" in done.stderr
        assert f"the ckptd daemon at {node.address}, which may hold one, is not trusted: its certificate is not signed by" in done.stderr
        # Of one that was there a moment ago the reason is the same, and nobody may start from nothing.
        with grpc.insecure_channel(daemon.address) as channel:
            opening = daemon_pb2.LoadRequest(open=daemon_pb2.LoadRequest.Open(peers=[node.address]))
            next(daemon_pb2_grpc.DaemonStub(channel).Load(iter([opening])))
        done = daemon.cli("show", "run/step-1")
        assert done.returncode == 3
        assert f"the ckptd daemon at {node.address} is not trusted: its certificate is not signed by" in done.stderr
