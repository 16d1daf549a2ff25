"""Ranks that stay up: one launch of a program serves many tests, each of which is one call on all ranks.

The program's functions run on every rank at once, as in a training script; smaller worlds
are subgroups. A rank that fails says why; ranks that hang are killed, and the next call
launches new ones.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: The program whose functions are in tests/conformance.
CONFORMANCE = Path(__file__).with_name("conformance") / "world_program.py"
#: Once a rank has failed, the others may wait for it in a collective for ever.
_GRACE_SECONDS = 45.0
#: Tells ranks that where they meet, MASTER_PORT, somebody serves already: none of them does.
MEETING = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def meeting_place() -> TCPStore:
    """Where the ranks of one launch meet, for as long as it is kept. It listens already: nobody can take its port before rank 0 does."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class World:
    """`size` ranks of a program that ends in `serve`. Use as a context manager; launched at the first call."""

    def __init__(self, program: Path, size: int) -> None:
        self.program = program
        self.size = size
        self.ranks: list[subprocess.Popen[str]] = []
        self._meeting: TCPStore | None = None
        self._home = tempfile.TemporaryDirectory(prefix="ckptd-test-")

    def call(self, function: str, *, seconds: float = 100.0, **arguments: Any) -> list[Any]:
        """Runs a function of the program on all ranks; what it returned, by rank. Fails with what failing ranks said."""
        answers = self.answers(function, seconds=seconds, **arguments)
        failed = {number: answer["error"] for number, answer in enumerate(answers) if "error" in answer}
        if failed:
            # What only follows from another rank's end says nothing.
            first = {number: error for number, error in failed.items() if "did not answer" not in error} or failed
            raise AssertionError("\n---\n".join(f"rank {number}:\n{error}" for number, error in first.items()))
        return [answer["value"] for answer in answers]

    def answers(
        self, function: str, *, seconds: float = 100.0, grace_seconds: float = _GRACE_SECONDS, **arguments: Any
    ) -> list[dict[str, Any]]:
        """The same for a function that some ranks do not survive: "value" or "error", by rank; after an error all ranks are gone.

        The others have `grace_seconds` from the first error on.
        """
        if any(rank.poll() is not None for rank in self.ranks):
            self.stop()
        if not self.ranks:
            self._launch()
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([function, arguments]) + "\n")
            rank.stdin.flush()
        return self._answers(time.monotonic() + seconds, grace_seconds)

    def stop(self) -> None:
        """Kills all ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            assert rank.stdin is not None
            assert rank.stdout is not None
            rank.stdin.close()
            rank.stdout.close()
        self.ranks = []
        self._meeting = None

    def _launch(self) -> None:
        self._meeting = meeting_place()
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        common = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._meeting.port), "PYTHONPATH": path}
        common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **MEETING}
        for rank in range(self.size):
            with self._log(rank).open("w") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(self.program)],
                        env=os.environ | common | {"RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )

    def _log(self, rank: int) -> Path:
        return Path(self._home.name) / f"rank{rank}"

    def _answers(self, deadline: float, grace_seconds: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        waiting = dict(enumerate(self.ranks))
        while waiting and time.monotonic() < deadline:
            readable, _, _ = select.select([rank.stdout for rank in waiting.values()], [], [], 0.5)
            for number, rank in list(waiting.items()):
                if rank.stdout in readable:
                    assert rank.stdout is not None
                    line = rank.stdout.readline()
                    answers[number] = json.loads(line) if line else {"error": f"ended:\n{self._said(number)}"}
                    if "error" in answers[number]:
                        deadline = min(deadline, time.monotonic() + grace_seconds)
                    del waiting[number]
        for number in waiting:
            answers[number] = {"error": f"did not answer:\n{self._said(number)}"}
        if any("error" in answer for answer in answers.values()):
            self.stop()
        return [answers[number] for number in range(self.size)]

    def _said(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-3000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._home.cleanup()


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """A rank's main loop: answers calls until its input ends."""
    # Whatever a library prints goes to the log; the answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": functions[name](**arguments)}
        except BaseException:  # noqa: BLE001 - DCP's exception is a BaseException; the test is told of all
            answer = {"error": traceback.format_exc()[-6000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
