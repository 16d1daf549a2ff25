"""What is in a checkpoint, and how checkpoints of a run stand to each other, for people.

Pure: takes what `metadata.read` found and the item tables, gives the lines that `show` prints,
whether a daemon or the CLI itself has read them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ckptd.metadata import Contents
from ckptd.model import CheckpointId
from ckptd.v1.daemon_pb2 import Checkpoint, ShowReply
from ckptd.v1.manifest_pb2 import Table


def lines(found: Contents, tables: Iterable[Table]) -> list[ShowReply.Tensor]:
    """Tensors and objects by key; without tables (stock checkpoints have none) a tensor's bytes follow from its dtype's name."""
    nbytes: Counter[bytes] = Counter()
    known = False
    for table in tables:
        known = True
        for item in table.items:
            nbytes[item.fqn] += item.nbytes
    shown = [
        ShowReply.Tensor(
            fqn=tensor.fqn,
            dtype=tensor.dtype,
            shape=tensor.shape,
            raw_bytes=nbytes[tensor.fqn] if known else expected_nbytes(tensor.dtype, [sizes for _, sizes in tensor.chunks]),
            chunks=len(tensor.chunks),
        )
        for tensor in found.tensors
    ]
    shown += [ShowReply.Tensor(fqn=fqn, raw_bytes=nbytes[fqn]) for fqn in found.objects]
    return sorted(shown, key=lambda line: line.fqn)


def files(found: Contents) -> list[str]:
    """Names of the data files that a stock ``.metadata`` leads to."""
    return sorted({place.file for place in found.storage.values()})


def expected_nbytes(dtype: str, chunks: Sequence[Sequence[int]]) -> int:
    """Bytes of chunks of these shapes: elements times the width that the dtype's name says (one byte if it says none)."""
    bits = re.search(r"\d+", dtype)
    width = max(1, int(bits.group()) // 8) if bits else 1
    return width * sum(math.prod(sizes) for sizes in chunks)


def mark_abandoned(lines: Sequence[Checkpoint]) -> None:
    """Marks checkpoints of a branch that a rollback left: one of the run with no higher step was accepted later."""
    stepped = []
    for line in lines:
        checkpoint = CheckpointId.parse(line.summary.id)
        step = line.summary.step if line.summary.HasField("step") else checkpoint.step
        if step is not None and line.summary.attempt:
            stepped.append((checkpoint.run, step, line.summary.attempt, line))
    newest = ("", "")  # run, and the newest attempt at lower steps of it
    for run, _, attempt, line in sorted(stepped, key=lambda found: found[:3]):
        before = newest[1] if newest[0] == run else ""
        line.abandoned = before > attempt
        newest = run, max(before, attempt)
