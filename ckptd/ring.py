"""What an attempt's record alone decides: who commits it, who keeps copies of whose shards, and what its nodes make of each other.

Pure: every participant comes to the same answers without asking anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record
from ckptd.v1.peer_pb2 import WatchReply

#: A participant that has not been reached for so long is done without: others upload what they hold of its shards, and commit.
TAKEOVER_SECONDS: Final = 10.0
#: What only a node holds that has not been reached for so long is lost.
LOST_SECONDS: Final = 60.0


def participants(record: Record) -> dict[str, str]:
    """Address by node, in the order in which they become committer: the coordinator's first, then by rank."""
    found = {record.metadata.node: record.metadata.address}
    for receipt in record.shards:
        found.setdefault(receipt.node, receipt.address)
    return found


def keepers(record: Record, node: str) -> list[str]:
    """The nodes that keep copies of what `node` holds: the next ones in the order, those on another host first."""
    nodes = participants(record)
    order = list(nodes)
    at = order.index(node)
    following = order[at + 1 :] + order[:at]
    following.sort(key=lambda other: _host(nodes[other]) == _host(nodes[node]))
    return following[: record.replicas]


def copies(record: Record, node: str) -> list[Receipt]:
    """The shards of others of which `node` keeps copies."""
    kept_for = {other for other in participants(record) if other != node and node in keepers(record, other)}
    return [receipt for receipt in record.shards if receipt.node in kept_for]


@dataclass(frozen=True, slots=True)
class View:
    """What a participant knows of another: its last answer, and for how long there was none (or one that knows nothing of the attempt)."""

    fate: WatchReply.Fate | None = None
    absent_seconds: float = 0.0

    @property
    def held(self) -> Collection[str]:
        """Tokens of what it holds, as far as it can be reached."""
        return self.fate.held if self.fate is not None and not self.absent_seconds else ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows for this node."""

    commits: bool = False
    for_others: frozenset[str] = frozenset()
    replicated: bool = False
    durable: bool = False
    """Somebody says so: the store is to be asked."""
    failed: str = ""
    missing: dict[str, list[Receipt]] = field(default_factory=dict)
    """Shards that nobody has who can be reached, by node, and that are not in the store."""
    missing_seconds: float = 0.0


def judge(record: Record, own: str, held: Collection[str], views: Mapping[str, View], uncovered: Collection[int] | None) -> Judgement:
    """What a participant makes of the others.

    `held`: tokens of what it holds; `uncovered`: ranks whose shards are not in the store (None: unknown).
    """
    order = list(participants(record))
    before = order[: order.index(own)] if own in order else order
    live = {own: held, **{node: view.held for node, view in views.items()}}
    holders: dict[str, list[str]] = {receipt.token: [] for receipt in record.shards}
    for node in order:
        for token in live.get(node, ()):
            if token in holders:
                holders[token].append(node)
    away = {node for node in order if node != own and views.get(node, View()).absent_seconds >= TAKEOVER_SECONDS}
    lacking = [r for r in record.shards if not holders[r.token] and (uncovered is None or r.rank in uncovered)]
    missing: dict[str, list[Receipt]] = {}
    for receipt in lacking:
        missing.setdefault(receipt.node, []).append(receipt)
    said = [view.fate for view in views.values() if view.fate is not None]
    enough = 1 + min(record.replicas, len(order) - 1)
    return Judgement(
        commits=all(node in away for node in before),
        # The first that holds a shard uploads it: as a rule only one node does.
        for_others=frozenset(receipt.token for receipt in record.shards if receipt.node in away and holders[receipt.token][:1] == [own]),
        replicated=record.replicas > 0 and all(len(nodes) >= enough for nodes in holders.values()),
        durable=any(fate.state == Checkpoint.DURABLE for fate in said),
        failed=next((fate.reason for fate in said if fate.state == Checkpoint.FAILED), ""),
        missing=missing,
        missing_seconds=min((views.get(node, View()).absent_seconds for node in missing), default=0.0),
    )


def _host(address: str) -> str:
    return address.rpartition(":")[0]
