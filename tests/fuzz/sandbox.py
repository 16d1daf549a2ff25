"""Runs parsers on hostile bytes, one process each, under limits that a parser which believes its input would break.

`run` is for tests; the rest is the program that it starts. In there every case gets a fork with a bound on memory (an
amount, and a hundred times the input) and on processor time, and an audit hook: what a parser would import, compile,
open or start is told by Python itself.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
#: Memory for a parser, whatever its input is, and for each byte of its input.
ALLOWED_NBYTES = 48 * MIB
ALLOWED_PER_BYTE = 100
#: A stack for calls; what goes as deep as its input does needs more.
ALLOWED_STACK_NBYTES = 2 * MIB
#: Seconds of processor time after which a case is killed. What is quadratic in its input takes longer, or will at ten times the size.
ALLOWED_SECONDS = 20
#: What no parser may do, as Python's audit events name it.
FORBIDDEN = ("import", "exec", "compile", "open", "os.", "subprocess.", "pickle.", "marshal.", "ctypes.", "socket.", "shutil.")

#: So much of a stream of zstd frames is read.
STREAM_NBYTES = 256 * MIB

RETURNED = "returned"


def exactly(data: bytes) -> Callable[[int, int], bytes]:
    """Reads bytes [start, end), and nothing that is not there."""

    def read(start: int, end: int) -> bytes:
        if not 0 <= start <= end <= len(data):
            raise IndexError(f"bytes {start} to {end} of {len(data)} were asked for")
        return data[start:end]

    return read


def run(
    target: str, cases: Mapping[str, bytes], directory: Path, *, audited: bool = True, seconds: int = ALLOWED_SECONDS
) -> dict[str, str]:
    """What each case came to: `RETURNED`, the name of the error's class, or what else happened, in words.

    Cases run with `directory` as their current directory.
    """
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as corpus:
        names = list(cases)
        for number, name in enumerate(names):
            (Path(corpus) / str(number)).write_bytes(cases[name])
        done = subprocess.run(
            [sys.executable, __file__, target, corpus, str(len(names)), str(int(audited)), str(seconds)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])},
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(names, json.loads(done.stdout), strict=True))


def _targets() -> dict[str, Callable[[bytes], object]]:
    import pickle

    from ckptd import codec, container, contents, manifest, metadata, table, tombstone, zstream
    from ckptd.v1.manifest_pb2 import Manifest

    def show(data: bytes) -> object:
        found = metadata.read(data)
        return list(contents.replies(contents.Checkpoint(), contents.stock_lines(found), contents.stock_files(found)))

    def manifest_of(data: bytes) -> Manifest:
        found = manifest.decode(data)
        contents.lines(shard.table for shard in found.shards)
        return found

    def frame(data: bytes) -> bytes:
        return codec.Zstd(1).decode(data[8:], int.from_bytes(data[:8], "little"))

    def records(data: bytes) -> None:
        reads = exactly(data)
        container.check(reads, len(data))
        for _ in container.sizes(reads, len(data)):
            pass

    def stream(data: bytes) -> int:
        nbytes = 0
        for piece in zstream.plain(exactly(data), 0, len(data)):
            nbytes += len(piece)
            if nbytes > STREAM_NBYTES:  # as those who read streams do
                break
        return nbytes

    return {
        "container": records,
        "stream": stream,
        "metadata": show,
        "save_id": metadata.save_id,
        "manifest": manifest_of,
        "summary": manifest.read_summary,
        "table": lambda data: table.parse_table(data, len(data)),
        "frame": frame,
        "tombstone": tombstone.decode,
        "pickle": pickle.loads,
    }


def _tried(parse: Callable[[bytes], object], data: bytes, *, audited: bool) -> str:
    seen: list[str] = []
    if audited:

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event.startswith(FORBIDDEN):
                seen.append(f"{event} {str(arguments)[:80]}")

        sys.addaudithook(hook)
    outcome = RETURNED
    try:
        found = parse(data)
        del found
    except BaseException as exc:  # noqa: BLE001 - whatever it is, it is told
        outcome = type(exc).__name__
        cause: BaseException | None = exc
        while cause is not None:
            if isinstance(cause, MemoryError):
                outcome = f"{outcome} for want of memory"
                break
            cause = cause.__cause__
        del exc, cause
    return f"{outcome}, and did {'; '.join(seen[:3])}" if seen else outcome


def _in_a_fork(parse: Callable[[bytes], object], data: bytes, *, audited: bool, seconds: int) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + ALLOWED_NBYTES + ALLOWED_PER_BYTE * len(data)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_STACK, (ALLOWED_STACK_NBYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writing, _tried(parse, data, audited=audited).encode(errors="backslashreplace"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return told if os.WIFEXITED(status) and told else f"was ended by signal {os.WTERMSIG(status)}"


def _main(arguments: Sequence[str]) -> None:
    target, corpus, count, audited, seconds = arguments
    parse = _targets()[target]
    outcomes = []
    for number in range(int(count)):
        data = (Path(corpus) / str(number)).read_bytes()
        outcomes.append(_in_a_fork(parse, data, audited=audited == "1", seconds=int(seconds)))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    _main(sys.argv[1:])
