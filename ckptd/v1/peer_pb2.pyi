from ckptd.v1 import daemon_pb2 as _daemon_pb2
from ckptd.v1 import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("id", "shards", "metadata", "durable", "witness")
    ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    shards: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Receipt]
    metadata: _manifest_pb2.Receipt
    durable: bool
    witness: str
    def __init__(self, id: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_manifest_pb2.Receipt, _Mapping]]] = ..., metadata: _Optional[_Union[_manifest_pb2.Receipt, _Mapping]] = ..., durable: bool = ..., witness: _Optional[str] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("newest", "store", "node_local")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    NODE_LOCAL_FIELD_NUMBER: _ClassVar[int]
    newest: str
    store: str
    node_local: bool
    def __init__(self, newest: _Optional[str] = ..., store: _Optional[str] = ..., node_local: bool = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: _manifest_pb2.Record
    def __init__(self, record: _Optional[_Union[_manifest_pb2.Record, _Mapping]] = ...) -> None: ...

class AdoptReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("attempt", "reason", "deleted")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    reason: str
    deleted: bool
    def __init__(self, attempt: _Optional[str] = ..., reason: _Optional[str] = ..., deleted: bool = ...) -> None: ...

class AbandonReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("fates",)
    class Fate(_message.Message):
        __slots__ = ("attempt", "state", "reason", "held", "adopted")
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        HELD_FIELD_NUMBER: _ClassVar[int]
        ADOPTED_FIELD_NUMBER: _ClassVar[int]
        attempt: str
        state: _daemon_pb2.Checkpoint.State
        reason: str
        held: _containers.RepeatedScalarFieldContainer[str]
        adopted: bool
        def __init__(self, attempt: _Optional[str] = ..., state: _Optional[_Union[_daemon_pb2.Checkpoint.State, str]] = ..., reason: _Optional[str] = ..., held: _Optional[_Iterable[str]] = ..., adopted: bool = ...) -> None: ...
    FATES_FIELD_NUMBER: _ClassVar[int]
    fates: _containers.RepeatedCompositeFieldContainer[WatchReply.Fate]
    def __init__(self, fates: _Optional[_Iterable[_Union[WatchReply.Fate, _Mapping]]] = ...) -> None: ...

class TellRequest(_message.Message):
    __slots__ = ("attempt", "accepted", "again")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    accepted: bool
    again: bool
    def __init__(self, attempt: _Optional[str] = ..., accepted: bool = ..., again: bool = ...) -> None: ...

class TellReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldingsRequest(_message.Message):
    __slots__ = ("run", "id", "attempt", "with_record")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WITH_RECORD_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: str
    attempt: str
    with_record: bool
    def __init__(self, run: _Optional[str] = ..., id: _Optional[str] = ..., attempt: _Optional[str] = ..., with_record: bool = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("summary", "state", "held", "record", "reason", "adopted")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    summary: _manifest_pb2.Summary
    state: _daemon_pb2.Checkpoint.State
    held: _containers.RepeatedScalarFieldContainer[str]
    record: _manifest_pb2.Record
    reason: str
    adopted: bool
    def __init__(self, summary: _Optional[_Union[_manifest_pb2.Summary, _Mapping]] = ..., state: _Optional[_Union[_daemon_pb2.Checkpoint.State, str]] = ..., held: _Optional[_Iterable[str]] = ..., record: _Optional[_Union[_manifest_pb2.Record, _Mapping]] = ..., reason: _Optional[str] = ..., adopted: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("token", "ranges")
    class Range(_message.Message):
        __slots__ = ("at", "nbytes")
        AT_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        at: int
        nbytes: int
        def __init__(self, at: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    token: str
    ranges: _containers.RepeatedCompositeFieldContainer[PullRequest.Range]
    def __init__(self, token: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[PullRequest.Range, _Mapping]]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("id", "attempt", "shard", "items", "blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: str
    shard: int
    items: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[str] = ..., shard: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Bytes(_message.Message):
    __slots__ = ("at", "data", "hash")
    AT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    at: int
    data: bytes
    hash: bytes
    def __init__(self, at: _Optional[int] = ..., data: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...
