"""Memory -> store: turns a sealed attempt into data files and commits them.

Promises: a data file gets a fresh name at each try, so a retry never touches what an
earlier try may have left; at most a few blocks per thread are in memory; nothing is
visible as a checkpoint before the ledger has put `.metadata`. Never decides which
attempt to flush, never retries: the daemon does, by the kind of the error.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path

from ckptd import archive, errors, manifest
from ckptd.codec import Codec, block_hash, parse
from ckptd.ledger import Ledger
from ckptd.model import BLOCK_NBYTES, CheckpointId, data_key, mint_token
from ckptd.store import Store
from ckptd.table import read_exactly, read_range, read_table
from ckptd.v1.manifest_pb2 import Item, Manifest, Receipt, Record, Stored, StoredShard, Table


class Stopped(errors.CkptdError):
    """The flush was told to stop: the attempt was superseded, or the daemon ends."""


@dataclass(frozen=True, slots=True)
class Span:
    """A block to read from the segment: item number, where it starts, how long it is."""

    item: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Flusher:
    """Uploads attempts, each in the codec that its record names: an earlier daemon may have accepted it with another one.

    All calls block; `compute` runs the codec, `uploads` the puts of several shards.
    """

    store: Store
    ledger: Ledger
    compute: Executor
    uploads: Executor
    window: int = 8

    def flush(self, record: Record, paths: Mapping[str, Path], done: dict[str, StoredShard], stop: threading.Event) -> Manifest:
        """Makes the attempt durable: data files, then the manifest, then `.metadata`.

        `paths` leads from each receipt's token to its segment; `done` keeps what is uploaded, so that
        the next try goes on from there. Returns the manifest that was committed. Raises Stopped, or a
        kind from ckptd.errors that says whether to try again.
        """
        self.upload(record, record.shards, paths, done, stop)
        return self.commit(record, [done[receipt.token] for receipt in record.shards], paths, stop)

    def upload(
        self, record: Record, receipts: Sequence[Receipt], paths: Mapping[str, Path], done: dict[str, StoredShard], stop: threading.Event
    ) -> None:
        """Puts the data files of some of its shards; see `flush`."""
        checkpoint = CheckpointId.parse(record.summary.id)
        running = {
            self.uploads.submit(self._upload, checkpoint, receipt, paths[receipt.token], parse(record.summary.codec), stop): receipt.token
            for receipt in receipts
            if receipt.token not in done
        }
        wait(running)
        failures = []
        for upload, token in running.items():
            try:
                done[token] = upload.result()
            except errors.CkptdError as exc:
                failures.append(exc)
        if failures:  # what can never work outweighs what may pass
            raise min(failures, key=lambda exc: isinstance(exc, errors.Unavailable))

    def commit(self, record: Record, shards: Sequence[StoredShard], paths: Mapping[str, Path], stop: threading.Event) -> Manifest:
        """Commits what is uploaded, all shards in the order of the record; see `flush`."""
        checkpoint = CheckpointId.parse(record.summary.id)
        committed = Manifest(summary=record.summary, block_nbytes=BLOCK_NBYTES, shards=shards)
        pickle = read_range(paths[record.metadata.token], 0, record.metadata.nbytes)
        if stop.is_set():
            raise Stopped(f"{checkpoint}: the flush was stopped")
        self.ledger.commit(checkpoint, committed, pickle, only_new=record.only_new)
        return committed

    def _upload(self, checkpoint: CheckpointId, receipt: Receipt, path: Path, codec: Codec, stop: threading.Event) -> StoredShard:
        table = read_table(path, receipt)
        if not table.items:
            return StoredShard(rank=receipt.rank, table=table)
        name = f"__{receipt.rank}_{mint_token()}.distcp"
        stored: list[Stored] = []
        with open(path, "r+b", buffering=0) as segment:

            def source() -> Iterator[bytes]:
                stored[:] = []
                return self._blocks(segment.fileno(), table, stored, codec, stop)

            nbytes = self.store.put(data_key(checkpoint, name), source, nbytes_hint=receipt.nbytes)
        return StoredShard(rank=receipt.rank, file=name, nbytes=nbytes, table=table, stored=stored)

    def _blocks(self, fd: int, table: Table, stored: list[Stored], codec: Codec, stop: threading.Event) -> Iterator[bytes]:
        """Encodes the shard block by block, a few ahead of the upload, and notes where each lands."""
        offset = 0
        ahead: deque[tuple[list[Span], Future[list[tuple[bytes, bytes]]]]] = deque()

        def land() -> bytes:
            nonlocal offset
            spans, encoded = ahead.popleft()
            blocks = encoded.result()
            for span, (data, digest) in zip(spans, blocks, strict=True):
                while len(stored) <= span.item:
                    stored.append(Stored(offset=offset))
                stored[span.item].lengths.append(len(data))
                stored[span.item].hashes += digest
                offset += len(data)
            return blocks[0][0] if len(blocks) == 1 else b"".join(data for data, _ in blocks)

        try:
            for spans in batches(table):
                if stop.is_set():
                    raise Stopped("the flush was stopped")
                complete_containers(fd, table, spans)
                ahead.append((spans, self.compute.submit(encode_spans, fd, spans, codec)))
                if len(ahead) >= self.window:
                    yield land()
            while ahead:
                yield land()
            while len(stored) < len(table.items):  # the last items are empty: they have no block
                stored.append(Stored(offset=offset))
        finally:
            for _, encoded in ahead:  # the segment must not be closed under a running job
                if not encoded.cancel():
                    encoded.exception()


def batches(table: Table) -> Iterator[list[Span]]:
    """The blocks of all items in file order; small ones together, up to one block's size, to save overhead."""
    batch: list[Span] = []
    nbytes = 0
    for number, (item, end) in enumerate(zip(table.items, manifest.item_ends(table), strict=True)):
        for start, stop in manifest.block_spans(item.at, end, BLOCK_NBYTES):
            if batch and nbytes + stop - start > BLOCK_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(Span(number, item.at + start, stop - start))
            nbytes += stop - start
    if batch:
        yield batch


def complete_containers(fd: int, table: Table, spans: Sequence[Span]) -> None:
    """Fills the gaps around the raw bytes of every item that begins in `spans`. Doing it twice is harmless."""
    for span in spans:
        item = table.items[span.item]
        if item.kind == Item.RAW and span.at == item.at:
            head, tail = archive.gaps(item.at, table.forms[item.form].pkl, item.nbytes)
            os.pwrite(fd, head, item.at)
            os.pwrite(fd, tail, item.raw_at + item.nbytes)


def encode_spans(fd: int, spans: Sequence[Span], codec: Codec) -> list[tuple[bytes, bytes]]:
    """Stored bytes and hash of each block."""
    encoded = []
    for span in spans:
        block = read_exactly(fd, span.at, span.nbytes)
        encoded.append((bytes(codec.encode(block)), block_hash(block)))
    return encoded
