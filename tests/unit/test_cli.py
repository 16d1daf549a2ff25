"""The command line: what it prints, and the exit status of everything that can go wrong.

What the daemon says is played by a small gRPC server that answers with what a test
gives it; a real daemon behind the same commands is in tests/service.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from ckptd import __version__, errors
from ckptd.cli.main import main
from ckptd.v1 import daemon_pb2, daemon_pb2_grpc
from ckptd.v1.manifest_pb2 import Summary

_State = daemon_pb2.Checkpoint.State


class Played(daemon_pb2_grpc.DaemonServicer):
    """Answers with what it was given; an error is sent as the daemon's interceptor sends it."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"Hello": daemon_pb2.HelloReply(version=__version__, store="/data/ckpts")}
        self.asked: dict[str, Any] = {}
        self.address = ""
        self.over = threading.Event()
        #: When a drain was "too late": what was really left to its caller.
        self.remaining_seconds = 0.0

    def _answer(self, call: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked[call] = request
        answer = self.answers[call]
        if isinstance(answer, errors.CkptdError):
            context.set_trailing_metadata((("ckptd-kind", type(answer).__name__),))
            context.abort(getattr(grpc.StatusCode, answer.status), str(answer))
        if answer == "silence":
            self.over.wait()
        return answer

    def Hello(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Hello", request, context)

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        yield from self._answer("List", request, context)

    def Show(self, request: Any, context: grpc.ServicerContext) -> Any:
        yield from self._answer("Show", request, context)

    def Resolve(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Resolve", request, context)

    def Wait(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Wait", request, context)

    def Status(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Status", request, context)

    def Prune(self, request: Any, context: grpc.ServicerContext) -> Any:
        yield from self._answer("Prune", request, context)

    def Delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Delete", request, context)

    def Pin(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Pin", request, context)

    def Verify(self, request: Any, context: grpc.ServicerContext) -> Any:
        yield from self._answer("Verify", request, context)

    def Drain(self, request: Any, context: grpc.ServicerContext) -> Any:
        for reply in self._answer("Drain", request, context):
            if reply == "silence":
                self.over.wait()
            elif reply == "too late":
                self.remaining_seconds = context.time_remaining()
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "as if the caller's time were over")
            else:
                yield reply


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    played = Played()
    server = grpc.server(ThreadPoolExecutor(4))
    daemon_pb2_grpc.add_DaemonServicer_to_server(played, server)
    played.address = f"unix:{tmp_path}/d.sock"
    server.add_insecure_port(played.address)
    server.start()
    monkeypatch.setenv("CKPTD_ADDRESS", played.address)
    yield played
    played.over.set()
    server.stop(None).wait()


def _checkpoint(id_: str, state: int = _State.DURABLE, **more: Any) -> daemon_pb2.Checkpoint:
    summary = Summary(id=id_, accepted_us=1_700_000_000_123_456, world_size=2, raw_bytes=3 * 2**20, stored_bytes=2**20, codec="zstd:1")
    return daemon_pb2.Checkpoint(summary=summary, state=state, **more)


def _complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ckptd: ")
    assert err.count("\n") == 1
    return err


# --- list --------------------------------------------------------------------------------------------------------


def test_list_json_is_an_array_by_run_and_step_with_the_promised_fields(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    tagged = _checkpoint("step-9")
    tagged.summary.tags["loss"] = "2.5"
    given = _checkpoint("best", pinned=True)
    given.summary.step = 50
    daemon.answers["List"] = [
        _checkpoint("run-a/step-3", _State.FAILED, reason="access denied"),
        _checkpoint("step-10", _State.ACCEPTED),
        tagged,
        given,
        _checkpoint("first"),
    ]
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in listed] == ["first", "step-9", "step-10", "best", "run-a/step-3"]
    assert listed[1] == {
        "id": "step-9",
        "run": "",
        "step": 9,
        "state": "durable",
        "created": "2023-11-14T22:13:20.123456Z",
        "raw_bytes": 3 * 2**20,
        "stored_bytes": 2**20,
        "world_size": 2,
        "pinned": False,
        "tags": {"loss": "2.5"},
    }
    assert [one["step"] for one in listed] == [None, 9, 10, 50, 3]
    assert (listed[4]["run"], listed[4]["state"], listed[4]["reason"]) == ("run-a", "failed", "access denied")
    assert listed[3]["pinned"] is True


def test_list_for_people_is_a_table_that_no_pipe_cuts(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    long = "r" * 128 + "/step-" + "1" * 100
    daemon.answers["List"] = [_checkpoint(long, reason="[bold]why[/bold]\n" + "because " * 40), _checkpoint("step-1", abandoned=True)]
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    heading, _, row, *_ = out.splitlines()
    assert heading.split() == ["ID", "STEP", "STATE", "CREATED", "(UTC)", "RAW", "STORED", "WORLD", "NOTE"]
    assert "step-1 " in row
    assert "abandoned" in row
    assert long in out
    assert "3.0 MiB" in out
    assert "[bold]why[/bold]\\n" + "because " * 39 in out


def test_an_empty_list_is_a_friendly_line_for_people_and_an_empty_array_for_programs(
    daemon: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answers["List"] = []
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "no checkpoints in /data/ckpts yet\n"
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_list_asks_for_one_run_and_tells_the_nameless_run_from_all(daemon: Played) -> None:
    daemon.answers["List"] = []
    asked = []
    for arguments in ([], ["--run", ""], ["--run", "run-a"]):
        assert main(["list", "--json", *arguments]) == 0
        asked.append(daemon.asked["List"].run if daemon.asked["List"].HasField("run") else None)
    assert asked == [None, "", "run-a"]


# --- show, status, wait ------------------------------------------------------------------------------------------


def _replies() -> list[daemon_pb2.ShowReply]:
    tensor = daemon_pb2.ShowReply.Tensor
    return [
        daemon_pb2.ShowReply(
            checkpoint=_checkpoint("step-9"), tensors=[tensor(fqn=b"w", dtype="float32", shape=[2, 3], raw_bytes=24, chunks=2)], files=["a"]
        ),
        daemon_pb2.ShowReply(tensors=[tensor(fqn="\ud800\x1b[31m".encode("utf-8", "surrogatepass"), raw_bytes=5)], files=["b"]),
    ]


def test_show_json_has_the_fields_of_list_and_what_is_in_it(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Show"] = _replies()
    assert main(["show", "step-9", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["id"] == "step-9"
    assert whole["tensors"] == [{"name": "w", "dtype": "float32", "shape": [2, 3], "raw_bytes": 24, "chunks": 2, "shards": 0}]
    assert whole["objects"] == [{"name": "\ud800\x1b[31m", "raw_bytes": 5}]
    assert whole["files"] == ["a", "b"]


def test_show_for_people_writes_out_what_a_terminal_would_act_upon(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Show"] = _replies()
    assert main(["show", "step-9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\ud800\\x1b[31m" in out
    assert "[2, 3]" in out


def test_latest_is_what_the_daemon_says_it_is(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers |= {"Resolve": _checkpoint("run-a/step-9"), "Show": _replies(), "Wait": _checkpoint("run-a/step-9")}
    assert main(["show", "run-a/latest", "--json"]) == 0
    assert daemon.asked["Show"].id == "run-a/latest"
    assert main(["wait", "run-a/latest"]) == 0
    assert daemon.asked["Resolve"].id == "run-a/latest"
    assert daemon.asked["Wait"].id == "run-a/step-9"
    assert "run-a/step-9 is durable" in capsys.readouterr().out


def test_status_json_names_every_source_of_bytes(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Status"] = daemon_pb2.StatusReply(node="n", memory=2**30, used=2**20, pid=7, bytes_from={"store": 5})
    assert main(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["bytes_from"] == {"memory": 0, "peer": 0, "store": 5}
    assert (status["node"], status["memory"], status["used"], status["pid"]) == ("n", 2**30, 2**20, 7)
    assert main(["status"]) == 0
    assert "1.0 MiB of 1.0 GiB" in capsys.readouterr().out


def test_wait_gives_up_with_1_after_its_timeout(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Wait"] = "silence"
    assert main(["wait", "step-9", "--timeout", "300ms"]) == 1
    assert "step-9 is not durable after 0.3 s" in _complaint(capsys)
    daemon.answers["Resolve"] = _checkpoint("step-9", _State.ACCEPTED, reason="2 tries failed:\nno space")
    assert main(["wait", "step-9", "--timeout", "300ms"]) == 1
    assert _complaint(capsys) == "ckptd: step-9 is not durable after 0.3 s: 2 tries failed: no space\n"
    assert main(["wait", "step-9", "--timeout", "300ms", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"id": "step-9", "durable": False, "reason": "2 tries failed:\nno space"}


def test_wait_json_names_what_is_durable(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers |= {"Resolve": _checkpoint("run-a/step-9"), "Wait": _checkpoint("run-a/step-9")}
    assert main(["wait", "run-a/latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "run-a/step-9", "durable": True}


# --- prune, delete, pin, unpin -----------------------------------------------------------------------------------


def _pruned() -> list[daemon_pb2.PruneReply]:
    verdict = daemon_pb2.PruneReply.Verdict
    return [
        daemon_pb2.PruneReply(verdicts=[verdict(id="step-1", reason="deleted: no rule keeps it", stored_bytes=2**20)]),
        daemon_pb2.PruneReply(verdicts=[verdict(id="step-2", kept=True, reason="kept: the last one", stored_bytes=2**21)]),
        daemon_pb2.PruneReply(swept=daemon_pb2.PruneReply.Swept(files=1, nbytes=2**20, later_files=4, later_nbytes=2**22)),
    ]


def test_prune_json_is_one_document_of_verdicts_and_what_was_swept(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Prune"] = _pruned()
    assert main(["prune", "--keep-last", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "dry_run": False,
        "verdicts": [
            {"id": "step-1", "kept": False, "reason": "deleted: no rule keeps it", "stored_bytes": 2**20},
            {"id": "step-2", "kept": True, "reason": "kept: the last one", "stored_bytes": 2**21},
        ],
        "swept": {"files": 1, "bytes": 2**20, "later_files": 4, "later_bytes": 2**22},
    }


def test_prune_tells_people_each_reason_and_what_waits(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Prune"] = _pruned()
    assert main(["prune", "--keep-last", "1"]) == 0
    out = capsys.readouterr().out
    assert "kept: the last one" in out
    assert "deleted 1 checkpoint (1.0 MiB), kept 1\nswept 1 file (1.0 MiB); 4 files (4.0 MiB) wait for their time\n" in out
    assert main(["prune", "--keep-last", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would delete 1 checkpoint (1.0 MiB), would keep 1\nwould sweep 1 file" in out
    assert "would delete: no rule keeps it" in out
    assert "deleted" not in out
    assert daemon.asked["Prune"].dry_run is True


def test_prune_without_a_rule_says_that_it_takes_one(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    hint = "without a rule no checkpoint is deleted"
    verdict = daemon_pb2.PruneReply.Verdict(id="step-2", kept=True, reason="kept: no rule was given")
    daemon.answers["Prune"] = [daemon_pb2.PruneReply(verdicts=[verdict]), _pruned()[-1]]
    assert main(["prune"]) == 0
    assert hint in capsys.readouterr().out
    assert main(["prune", "--keep-last", "3"]) == 0
    assert hint not in capsys.readouterr().out
    daemon.answers["Prune"] = _pruned()[1:]  # the daemon has rules of its own
    assert main(["prune"]) == 0
    assert hint not in capsys.readouterr().out


def test_prune_asks_for_what_was_given_and_nothing_else(daemon: Played) -> None:
    daemon.answers["Prune"] = _pruned()
    assert main(["prune", "--json"]) == 0
    assert daemon.asked["Prune"] == daemon_pb2.PruneRequest()
    rules = ["--keep-last", "2", "--keep-every", "100", "--keep-within", "2d"]
    assert main(["prune", *rules, "--delete-grace", "0", "--orphan-age", "1h", "--run", "", "--json"]) == 0
    assert daemon.asked["Prune"] == daemon_pb2.PruneRequest(
        run="", keep_last=2, keep_every=100, keep_within_seconds=172800.0, delete_grace_seconds=0.0, orphan_age_seconds=3600.0
    )
    assert main(["prune", "--keep-every", "5", "--json"]) == 0
    assert daemon.asked["Prune"] == daemon_pb2.PruneRequest(keep_every=5)


def test_a_prune_that_breaks_off_is_no_success(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Prune"] = _pruned()[:2]
    assert main(["prune"]) == 3
    assert "ended its answer early" in _complaint(capsys)


def test_delete_says_when_the_files_go(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Delete"] = daemon_pb2.Deleted(id="run-a/step-1", files=3, nbytes=2**20, grace_seconds=5400)
    assert main(["delete", "run-a/step-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run-a/step-1 is deleted; 3 files (1.0 MiB) go ")
    assert "after 1 h 30 min" in out
    assert main(["delete", "run-a/step-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "run-a/step-1", "files": 3, "bytes": 2**20, "grace_seconds": 5400.0}


def test_pin_resolves_latest_and_says_what_it_pinned(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers |= {"Resolve": _checkpoint("run-a/step-9"), "Pin": _checkpoint("run-a/step-9", pinned=True)}
    assert main(["pin", "run-a/latest"]) == 0
    assert capsys.readouterr().out == "run-a/step-9 is pinned\n"
    assert (daemon.asked["Resolve"].id, daemon.asked["Pin"]) == ("run-a/latest", daemon_pb2.PinRequest(id="run-a/step-9", pinned=True))
    daemon.answers["Pin"] = _checkpoint("run-a/step-9")
    assert main(["unpin", "run-a/step-9"]) == 0
    assert capsys.readouterr().out == "run-a/step-9 is no longer pinned\n"
    assert daemon.asked["Pin"] == daemon_pb2.PinRequest(id="run-a/step-9")
    assert main(["unpin", "run-a/step-9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pinned"] is False


# --- verify and drain --------------------------------------------------------------------------------------------


def _read_back(id_: str, *damage: str, note: str = "") -> list[daemon_pb2.VerifyReply]:
    reply = daemon_pb2.VerifyReply
    return [
        reply(id=id_, total_nbytes=2**21),
        reply(id=id_, nbytes=2**20, total_nbytes=2**21, damage=damage[:1]),
        reply(id=id_, nbytes=2**21, total_nbytes=2**21, damage=damage[1:], note=note, ended=True),
    ]


def test_verify_tells_each_checkpoint_and_what_is_none(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["List"] = [
        *(_checkpoint(f"step-{step}") for step in (1, 2)),
        _checkpoint("step-3", _State.INCOMPLETE, reason="no manifest"),
        _checkpoint("step-4", _State.ACCEPTED),
    ]
    unstored = daemon_pb2.VerifyReply(id="step-4", note="accepted: nothing in the store yet", ended=True)
    daemon.answers["Verify"] = [*_read_back("step-1", note="no checksums"), *_read_back("step-2"), unstored]
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step-1: ok, 2.0 MiB read; no checksums",
        "step-2: ok, 2.0 MiB read",
        "step-4: unstored; accepted: nothing in the store yet",
        "step-3: incomplete; no manifest",
        "2 ok, 1 incomplete, 1 unstored",
    ]
    assert daemon.asked["Verify"] == daemon_pb2.VerifyRequest()
    assert main(["verify", "--all", "--run", "run-a", "--json"]) == 0
    assert (daemon.asked["Verify"], daemon.asked["List"].run) == (daemon_pb2.VerifyRequest(run="run-a"), "run-a")


def test_damage_is_1_with_every_place(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    # A damaged manifest makes a checkpoint that is listed as incomplete: it is told once.
    daemon.answers["List"] = [_checkpoint("step-1"), _checkpoint("step-2", _State.INCOMPLETE, reason="damaged")]
    daemon.answers["Verify"] = [*_read_back("step-1"), *_read_back("step-2", "a.distcp, block 3", "[b]b\x1b.distcp: too short")]
    assert main(["verify", "--all"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step-1: ok, 2.0 MiB read",
        "step-2: damaged, 2.0 MiB read",
        "    a.distcp, block 3",
        "    [b]b\\x1b.distcp: too short",
        "1 ok, 1 damaged",
    ]
    assert main(["verify", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["damaged"] == 1
    assert document["checkpoints"][1] == {
        "id": "step-2",
        "verdict": "damaged",
        "read_bytes": 2**21,
        "damage": ["a.distcp, block 3", "[b]b\x1b.distcp: too short"],
        "note": "",
    }


def test_verify_of_one_asks_for_one(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Verify"] = _read_back("run-a/step-9")
    assert main(["verify", "run-a/latest"]) == 0
    assert capsys.readouterr().out == "run-a/step-9: ok, 2.0 MiB read\n"
    assert daemon.asked["Verify"] == daemon_pb2.VerifyRequest(id="run-a/latest")
    assert "List" not in daemon.asked


def test_verify_of_what_is_incomplete_unstored_or_not_there_is_1(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers |= {"List": [_checkpoint("step-3", _State.INCOMPLETE, reason="no manifest")], "Verify": errors.NotFound("no such")}
    assert main(["verify", "step-3"]) == 1
    assert capsys.readouterr().out == "step-3: incomplete; no manifest\n"
    for missing in ("step-4", "latest"):
        assert main(["verify", missing]) == 1
        assert _complaint(capsys) == "ckptd: no such\n"
    daemon.answers["Verify"] = [daemon_pb2.VerifyReply(id="step-5", note="accepted", ended=True)]
    assert main(["verify", "step-5"]) == 1
    assert capsys.readouterr().out == "step-5: unstored; accepted\n"


def test_a_verification_that_breaks_off_is_no_success(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Verify"] = _read_back("step-1")[:2]
    assert main(["verify", "step-1"]) == 3
    assert "ended early" in _complaint(capsys)


def test_verify_of_an_empty_store_is_0(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers |= {"List": [], "Verify": []}
    assert main(["verify"]) == 0
    assert capsys.readouterr().out == "no checkpoints in /data/ckpts yet\n"


def test_drain_is_0_when_all_is_durable(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(accepted=2, nbytes=2**21), daemon_pb2.DrainReply()]
    assert main(["drain"]) == 0
    assert capsys.readouterr().out.startswith("all that was accepted is durable")
    assert daemon.asked["Drain"] == daemon_pb2.DrainRequest()
    assert main(["drain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "draining": True,
        "accepted": 0,
        "raw_bytes": 0,
        "failed": [],
        "memory_only": [],
        "begun": [],
    }


def test_drain_names_what_stays_in_memory_only(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(memory_only=["step-3"])]
    assert main(["drain"]) == 0
    told, all_else = capsys.readouterr().out.splitlines()
    assert told == "step-3, saved with durable=False: it stays in memory only"
    assert all_else.startswith("all else that was accepted is durable")
    assert main(["drain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_only"] == ["step-3"]


def test_drain_is_1_with_what_never_will_be_durable(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(failed=["step-1: access denied"])]
    assert main(["drain"]) == 1
    assert capsys.readouterr().out.startswith("step-1: access denied\n")


def test_drain_gives_up_with_1_after_its_timeout_and_says_how_far_it_came(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(accepted=2, nbytes=2**21), "too late"]
    assert main(["drain", "--timeout", "3600s"]) == 1
    assert 1800 < daemon.remaining_seconds < 7200  # gRPC rounds what is left
    out, err = capsys.readouterr()
    assert out == "still on the way: 2 checkpoints (2.0 MiB)\n"
    assert err == "ckptd: not everything is durable after 3600 s; the daemon goes on, and takes no new saves\n"
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(begun=["run/step-7"]), "too late"]
    assert main(["drain", "--timeout", "3600s"]) == 1
    out, err = capsys.readouterr()
    assert out == "run/step-7 has begun to be saved, and is not accepted yet\nall that was accepted is durable\n"
    assert err.startswith("ckptd: not everything is durable after 3600 s")
    daemon.answers["Drain"] = ["silence"]
    assert main(["drain", "--timeout", "300ms"]) == 1
    assert "did not say" in _complaint(capsys)


def test_a_drain_can_be_ended(daemon: Played, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers["Drain"] = [daemon_pb2.DrainReply(accepted=2, nbytes=2**21)]
    assert main(["drain", "--cancel"]) == 0
    assert capsys.readouterr().out == "the daemon takes new saves again\n"
    assert daemon.asked["Drain"].cancel is True


def test_the_bar_is_for_terminals_and_leaves_the_output_alone(daemon: Played) -> None:
    daemon.answers |= {"List": [_checkpoint("step-1")], "Verify": _read_back("step-1", "a.distcp, block 3")}
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ckptd", "verify"]
    plain = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert (plain.returncode, plain.stderr) == (1, "")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environ) as running:
        os.close(theirs)
        out, _ = running.communicate(timeout=60)
    shown = b""
    with contextlib.suppress(OSError):  # a pseudo-terminal without a writer
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert (running.returncode, out) == (1, plain.stdout)
    assert b"[1 of 1] step-1" in shown


# --- doctor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "verdict", "words"),
    [
        (daemon_pb2.StatusReply(version=__version__, pid=7), "ok", "pid 7"),
        (daemon_pb2.StatusReply(version="0.0.1"), "warn", "restart the daemon"),
        (daemon_pb2.StatusReply(version=__version__, draining=True), "warn", "drain --cancel"),
        (daemon_pb2.StatusReply(version=__version__, warning="step-1 failed: access denied"), "warn", "access denied"),
        (errors.Unavailable("it is starting: try again"), "fail", "try again"),
    ],
)
def test_doctor_looks_at_the_daemon(
    daemon: Played, capsys: pytest.CaptureFixture[str], shm_dir: Path, status: Any, verdict: str, words: str
) -> None:
    daemon.answers["Status"] = status
    assert main(["doctor", "--codec", "none", "--shm-dir", str(shm_dir), "--json"]) == (3 if verdict == "fail" else 0)
    first = json.loads(capsys.readouterr().out)["checks"][0]
    assert (first["name"], first["verdict"]) == ("daemon", verdict)
    assert words in f"{first['found']} {first['advice']}"


def test_doctor_takes_the_budget_of_the_daemon_that_has_the_shm_dir(
    daemon: Played, capsys: pytest.CaptureFixture[str], shm_dir: Path
) -> None:
    daemon.answers["Status"] = daemon_pb2.StatusReply(version=__version__, shm_dir=str(shm_dir), memory=48 * 2**20)
    assert main(["doctor", "--codec", "none", "--shm-dir", str(shm_dir), "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["memory budget"]["figures"]["budget"] == 48 * 2**20


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", errors.TABLE.values(), ids=errors.TABLE.keys())
def test_a_daemons_error_is_one_line_with_the_exit_status_of_its_kind(
    daemon: Played, capsys: pytest.CaptureFixture[str], kind: type[errors.CkptdError]
) -> None:
    commands = {
        "Wait": "wait step-9",
        "Show": "show step-9",
        "List": "list",
        "Status": "status",
        "Prune": "prune",
        "Delete": "delete step-9",
    }
    commands |= {"Pin": "pin step-9", "Drain": "drain"}
    for call, command in commands.items():
        daemon.answers[call] = kind("it went\nwrong: do this")
        assert main(command.split()) == kind.exit_status
        assert _complaint(capsys) == "ckptd: it went wrong: do this\n"


@pytest.mark.parametrize("command", [["list"], ["show", "step-9"], ["status"], ["wait", "step-9"], ["prune"], ["verify"], ["drain"]])
def test_no_daemon_is_3_and_says_both_ways_out(command: list[str], tmp_path: Path) -> None:
    environ = {**os.environ, "CKPTD_ADDRESS": f"unix:{tmp_path}/none.sock"}
    found = subprocess.run([sys.executable, "-m", "ckptd", *command], capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr.count("\n") == 1
    assert "ckptd serve --store URL" in found.stderr
    assert "--store URL" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["lisst"], "invalid choice"),
        (["list", "--jsonn"], "unrecognized arguments"),
        (["list", "--js"], "unrecognized arguments"),
        (["list", "--address", "unix:/a", "--store", "/b"], "not both"),
        (["list", "--store-option", "a=b"], "goes with --store"),
        (["list", "--store", ""], "names no store"),
        (["list", "--store", "nosuch://x"], "nosuch"),
        (["list", "--store", "ftp:///x"], "store 'ftp:///x'"),
        (["list", "--store", "ftp://127.0.0.1:1/x"], "store 'ftp://127.0.0.1:1/x'"),
        (["list", "--store", "sftp://h/x"], "store 'sftp://h/x'"),
        (["list", "--store", "/b", "--store-option", "a"], "K=V"),
        (["list", "--address", "nonsense"], "--address: 'nonsense' is no address"),
        (["list", "--run", "../x"], "'../x' is not a checkpoint id"),
        (["show", "../x"], "'../x' is not a checkpoint id"),
        (["show", ""], "'' is not a checkpoint id"),
        (["show", "a/b/c"], "'a/b/c' is not a checkpoint id"),
        (["wait", "x" * 300], "is not a checkpoint id"),
        (["wait", "step-9", "--timeout", "soon"], "--timeout: 'soon' is not a duration"),
        (["prune", "--keep-last", "0"], "--keep-last: '0' is not a number of at least 1"),
        (["prune", "--keep-every", "-1"], "--keep-every: '-1' is not a number of at least 1"),
        (["prune", "--keep-every", "1.5"], "--keep-every: '1.5'"),
        (["prune", "--keep-within", "0s"], "--keep-within: '0s' is too short"),
        (["prune", "--delete-grace", "soon"], "--delete-grace: 'soon' is not a duration"),
        (["prune", "--run", "a/b"], "'a/b' is not a checkpoint id"),
        (["prune", "step-1"], "unrecognized arguments"),
        (["delete"], "required: ID"),
        (["delete", "latest"], "`ckptd show latest` tells its id"),
        (["delete", "run-a/latest"], "`ckptd show run-a/latest` tells its id"),
        (["unpin", "latest"], "`ckptd show latest` tells its id"),
        (["pin", "../x"], "'../x' is not a checkpoint id"),
        (["verify", "../x"], "'../x' is not a checkpoint id"),
        (["verify", "step-1", "--all"], "give an ID, or --all"),
        (["verify", "step-1", "--run", "run-a"], "give an ID, or --all"),
        (["drain", "--cancel", "--timeout", "1s"], "--cancel does not wait"),
        (["drain", "--store", "/d"], "unrecognized arguments"),
        (["serve"], "no store given"),
        (["serve", "--store", "/d", "--memory", "lots"], "--memory: 'lots'"),
        (["serve", "--store", "/d", "--listen", "0.0.0.0:7070"], "needs TLS"),
        (["serve", "--store", "/d", "--replicas", "2"], "--listen HOST:PORT"),
        (["serve", "--store", "/d", "--replica", "2"], "unrecognized arguments"),
        (["serve", "--store", "/d", "--insecure=no"], "ignored explicit argument"),
        (["status", "--store", "/d"], "unrecognized arguments"),
    ],
)
def test_wrong_use_is_2_and_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in _complaint(capsys)


def test_a_wrong_address_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CKPTD_ADDRESS", "nonsense")
    assert main(["status"]) == 2
    assert _complaint(capsys).startswith("ckptd: CKPTD_ADDRESS: 'nonsense'")


def test_a_defect_is_one_line_and_debug_shows_where(
    daemon: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ckptd.cli.documents.status", lambda _: 1 / 0)
    daemon.answers["Status"] = daemon_pb2.StatusReply()
    assert main(["status", "--json"]) == 1
    assert "ZeroDivisionError" in (line := _complaint(capsys))
    assert "--log-level debug" in line
    assert main(["status", "--json", "--log-level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130_without_a_word(daemon: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptd.cli.documents.status", interrupted)
    daemon.answers["Status"] = daemon_pb2.StatusReply()
    assert main(["status", "--json"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_error(daemon: Played) -> None:
    daemon.answers["List"] = [_checkpoint(f"step-{step}") for step in range(5000)]
    # Unbuffered, Python itself does not notice that a write was cut short.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["list"], ["list", "--json"]):
        command = subprocess.Popen([sys.executable, "-m", "ckptd", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        assert command.stdout is not None
        command.stdout.read(10)
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == b""
        command.stderr.close()
        assert command.wait(60) == 141


def ended(arguments: list[str], *, env: dict[str, str], stdout: str = "/dev/full", stderr: str = "") -> subprocess.CompletedProcess[str]:
    """A command whose standard output, or error output, is redirected as a shell does it ("-" closes it)."""
    redirected = "".join(f" {fd}>&-" if to == "-" else f" {fd}>{to}" for fd, to in ((1, stdout), (2, stderr)) if to)
    shell = f'exec "$@"{redirected}'
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "ckptd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


@pytest.fixture(params=["buffered", "unbuffered"])
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return found if request.param == "buffered" else {**found, "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(("stdout", "reason"), [("/dev/full", "No space left on device"), ("-", "it is closed")])
@pytest.mark.parametrize(
    "command",
    [["list"], ["list", "--json"], ["show", "latest", "--json"], ["status"], ["wait", "step-1"], ["prune"], ["verify"], ["drain"]],
)
def test_an_output_that_cannot_be_written_is_one_line_and_1(
    daemon: Played, environ: dict[str, str], command: list[str], stdout: str, reason: str
) -> None:
    daemon.answers["List"] = [_checkpoint(f"step-{step}") for step in range(500)]
    daemon.answers["Show"] = [daemon_pb2.ShowReply(checkpoint=_checkpoint("step-1"))]
    daemon.answers["Status"] = daemon_pb2.StatusReply()
    daemon.answers["Wait"] = _checkpoint("step-1")
    daemon.answers |= {"Prune": _pruned(), "Verify": _read_back("step-1"), "Drain": [daemon_pb2.DrainReply()]}
    done = ended(command, env=environ, stdout=stdout)
    assert (done.returncode, done.stderr) == (1, f"ckptd: cannot write to standard output: {reason}\n")


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["list", "--help"]])
def test_help_that_cannot_be_written_is_one_line_and_1(environ: dict[str, str], command: list[str]) -> None:
    done = ended(command, env=environ)
    assert (done.returncode, done.stderr) == (1, "ckptd: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("stderr", ["-", "/dev/full"])
def test_an_error_that_cannot_be_written_keeps_its_exit_status_and_the_output_clean(environ: dict[str, str], stderr: str) -> None:
    done = ended(["list", "--store", "nosuch://x"], env=environ, stdout="", stderr=stderr)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_store_package_that_fails_twice_is_one_line_and_debug_shows_both(environ: dict[str, str]) -> None:
    done = ended(["list", "--store", "ftp:///x"], env=environ, stdout="")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    shown = ended(["list", "--store", "ftp:///x", "--log-level", "debug"], env=environ, stdout="")
    assert "Exception ignored in" in shown.stderr


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ckptd {__version__}\n"
