from ckptd.v1 import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("node", "version", "store", "memory", "warning", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    store: str
    memory: int
    warning: str
    address: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., store: _Optional[str] = ..., memory: _Optional[int] = ..., warning: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("owner", "pid")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    owner: str
    pid: int
    def __init__(self, owner: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class LeaseEvent(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("owner", "id", "rank", "nbytes", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SHARD: _ClassVar[AllocateRequest.Kind]
        METADATA: _ClassVar[AllocateRequest.Kind]
    SHARD: AllocateRequest.Kind
    METADATA: AllocateRequest.Kind
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    owner: str
    id: str
    rank: int
    nbytes: int
    kind: AllocateRequest.Kind
    def __init__(self, owner: _Optional[str] = ..., id: _Optional[str] = ..., rank: _Optional[int] = ..., nbytes: _Optional[int] = ..., kind: _Optional[_Union[AllocateRequest.Kind, str]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("token", "path", "inode", "nbytes", "keep", "warning")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    token: str
    path: str
    inode: int
    nbytes: int
    keep: _containers.RepeatedScalarFieldContainer[int]
    warning: str
    def __init__(self, token: _Optional[str] = ..., path: _Optional[str] = ..., inode: _Optional[int] = ..., nbytes: _Optional[int] = ..., keep: _Optional[_Iterable[int]] = ..., warning: _Optional[str] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("owner", "token", "nbytes", "table_nbytes")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    owner: str
    token: str
    nbytes: int
    table_nbytes: int
    def __init__(self, owner: _Optional[str] = ..., token: _Optional[str] = ..., nbytes: _Optional[int] = ..., table_nbytes: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("owner", "token")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    owner: str
    token: str
    def __init__(self, owner: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("id", "step", "shards", "metadata", "tags", "durable", "only_new")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    id: str
    step: int
    shards: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Receipt]
    metadata: _manifest_pb2.Receipt
    tags: _containers.ScalarMap[str, str]
    durable: bool
    only_new: bool
    def __init__(self, id: _Optional[str] = ..., step: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_manifest_pb2.Receipt, _Mapping]]] = ..., metadata: _Optional[_Union[_manifest_pb2.Receipt, _Mapping]] = ..., tags: _Optional[_Mapping[str, str]] = ..., durable: bool = ..., only_new: bool = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("summary", "state", "reason", "pinned", "stock", "abandoned", "skipped", "not_reached")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Checkpoint.State]
        ACCEPTED: _ClassVar[Checkpoint.State]
        REPLICATED: _ClassVar[Checkpoint.State]
        DURABLE: _ClassVar[Checkpoint.State]
        FAILED: _ClassVar[Checkpoint.State]
        LOST: _ClassVar[Checkpoint.State]
        ABORTED: _ClassVar[Checkpoint.State]
        INCOMPLETE: _ClassVar[Checkpoint.State]
    UNKNOWN: Checkpoint.State
    ACCEPTED: Checkpoint.State
    REPLICATED: Checkpoint.State
    DURABLE: Checkpoint.State
    FAILED: Checkpoint.State
    LOST: Checkpoint.State
    ABORTED: Checkpoint.State
    INCOMPLETE: Checkpoint.State
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    STOCK_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    NOT_REACHED_FIELD_NUMBER: _ClassVar[int]
    summary: _manifest_pb2.Summary
    state: Checkpoint.State
    reason: str
    pinned: bool
    stock: bool
    abandoned: bool
    skipped: _containers.RepeatedScalarFieldContainer[str]
    not_reached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, summary: _Optional[_Union[_manifest_pb2.Summary, _Mapping]] = ..., state: _Optional[_Union[Checkpoint.State, str]] = ..., reason: _Optional[str] = ..., pinned: bool = ..., stock: bool = ..., abandoned: bool = ..., skipped: _Optional[_Iterable[str]] = ..., not_reached: _Optional[_Iterable[str]] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("id", "token", "sealed_us")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEALED_US_FIELD_NUMBER: _ClassVar[int]
    id: str
    token: str
    sealed_us: int
    def __init__(self, id: _Optional[str] = ..., token: _Optional[str] = ..., sealed_us: _Optional[int] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("id", "fallback", "saving")
    ID_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    id: str
    fallback: bool
    saving: bool
    def __init__(self, id: _Optional[str] = ..., fallback: bool = ..., saving: bool = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("open", "want", "copied")
    class Open(_message.Message):
        __slots__ = ("id", "attempt", "peers")
        ID_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        PEERS_FIELD_NUMBER: _ClassVar[int]
        id: str
        attempt: str
        peers: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, id: _Optional[str] = ..., attempt: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...
    class Want(_message.Message):
        __slots__ = ("shard", "items", "starts", "ends")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        STARTS_FIELD_NUMBER: _ClassVar[int]
        ENDS_FIELD_NUMBER: _ClassVar[int]
        shard: int
        items: _containers.RepeatedScalarFieldContainer[int]
        starts: _containers.RepeatedScalarFieldContainer[int]
        ends: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, shard: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...
    class Copied(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    open: LoadRequest.Open
    want: LoadRequest.Want
    copied: LoadRequest.Copied
    def __init__(self, open: _Optional[_Union[LoadRequest.Open, _Mapping]] = ..., want: _Optional[_Union[LoadRequest.Want, _Mapping]] = ..., copied: _Optional[_Union[LoadRequest.Copied, _Mapping]] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("opened", "present")
    class Piece(_message.Message):
        __slots__ = ("segment", "at", "nbytes")
        SEGMENT_FIELD_NUMBER: _ClassVar[int]
        AT_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        segment: Segment
        at: int
        nbytes: int
        def __init__(self, segment: _Optional[_Union[Segment, _Mapping]] = ..., at: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...
    class Opened(_message.Message):
        __slots__ = ("metadata", "tables", "checkpoint")
        METADATA_FIELD_NUMBER: _ClassVar[int]
        TABLES_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
        metadata: LoadReply.Piece
        tables: _containers.RepeatedCompositeFieldContainer[LoadReply.Piece]
        checkpoint: Checkpoint
        def __init__(self, metadata: _Optional[_Union[LoadReply.Piece, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[LoadReply.Piece, _Mapping]]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...
    class Present(_message.Message):
        __slots__ = ("segment", "nbytes")
        SEGMENT_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        segment: Segment
        nbytes: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, segment: _Optional[_Union[Segment, _Mapping]] = ..., nbytes: _Optional[_Iterable[int]] = ...) -> None: ...
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    opened: LoadReply.Opened
    present: LoadReply.Present
    def __init__(self, opened: _Optional[_Union[LoadReply.Opened, _Mapping]] = ..., present: _Optional[_Union[LoadReply.Present, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ShowReply(_message.Message):
    __slots__ = ("checkpoint", "tensors", "files")
    class Tensor(_message.Message):
        __slots__ = ("fqn", "dtype", "shape", "raw_bytes", "chunks", "shards")
        FQN_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        fqn: bytes
        dtype: str
        shape: _containers.RepeatedScalarFieldContainer[int]
        raw_bytes: int
        chunks: int
        shards: int
        def __init__(self, fqn: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., raw_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    tensors: _containers.RepeatedCompositeFieldContainer[ShowReply.Tensor]
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[ShowReply.Tensor, _Mapping]]] = ..., files: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "version", "store", "memory", "used", "segments", "leases", "open_shards", "waiting", "accepted", "failed", "bytes_from", "uptime_seconds", "warning", "pid", "shm_dir", "draining", "replicated", "lost", "address", "peers")
    class BytesFromEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    OPEN_SHARDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROM_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SHM_DIR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    store: str
    memory: int
    used: int
    segments: int
    leases: int
    open_shards: int
    waiting: int
    accepted: int
    failed: int
    bytes_from: _containers.ScalarMap[str, int]
    uptime_seconds: float
    warning: str
    pid: int
    shm_dir: str
    draining: bool
    replicated: int
    lost: int
    address: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., store: _Optional[str] = ..., memory: _Optional[int] = ..., used: _Optional[int] = ..., segments: _Optional[int] = ..., leases: _Optional[int] = ..., open_shards: _Optional[int] = ..., waiting: _Optional[int] = ..., accepted: _Optional[int] = ..., failed: _Optional[int] = ..., bytes_from: _Optional[_Mapping[str, int]] = ..., uptime_seconds: _Optional[float] = ..., warning: _Optional[str] = ..., pid: _Optional[int] = ..., shm_dir: _Optional[str] = ..., draining: bool = ..., replicated: _Optional[int] = ..., lost: _Optional[int] = ..., address: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("address", "gone_seconds", "never_answered")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GONE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEVER_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    address: str
    gone_seconds: float
    never_answered: bool
    def __init__(self, address: _Optional[str] = ..., gone_seconds: _Optional[float] = ..., never_answered: bool = ...) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("run", "keep_last", "keep_every", "keep_within_seconds", "dry_run", "delete_grace_seconds", "orphan_age_seconds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    KEEP_EVERY_FIELD_NUMBER: _ClassVar[int]
    KEEP_WITHIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DELETE_GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    keep_last: int
    keep_every: int
    keep_within_seconds: float
    dry_run: bool
    delete_grace_seconds: float
    orphan_age_seconds: float
    def __init__(self, run: _Optional[str] = ..., keep_last: _Optional[int] = ..., keep_every: _Optional[int] = ..., keep_within_seconds: _Optional[float] = ..., dry_run: bool = ..., delete_grace_seconds: _Optional[float] = ..., orphan_age_seconds: _Optional[float] = ...) -> None: ...

class PruneReply(_message.Message):
    __slots__ = ("verdicts", "swept")
    class Verdict(_message.Message):
        __slots__ = ("id", "kept", "reason", "stored_bytes")
        ID_FIELD_NUMBER: _ClassVar[int]
        KEPT_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
        id: str
        kept: bool
        reason: str
        stored_bytes: int
        def __init__(self, id: _Optional[str] = ..., kept: bool = ..., reason: _Optional[str] = ..., stored_bytes: _Optional[int] = ...) -> None: ...
    class Swept(_message.Message):
        __slots__ = ("files", "nbytes", "later_files", "later_nbytes")
        FILES_FIELD_NUMBER: _ClassVar[int]
        NBYTES_FIELD_NUMBER: _ClassVar[int]
        LATER_FILES_FIELD_NUMBER: _ClassVar[int]
        LATER_NBYTES_FIELD_NUMBER: _ClassVar[int]
        files: int
        nbytes: int
        later_files: int
        later_nbytes: int
        def __init__(self, files: _Optional[int] = ..., nbytes: _Optional[int] = ..., later_files: _Optional[int] = ..., later_nbytes: _Optional[int] = ...) -> None: ...
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    SWEPT_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[PruneReply.Verdict]
    swept: PruneReply.Swept
    def __init__(self, verdicts: _Optional[_Iterable[_Union[PruneReply.Verdict, _Mapping]]] = ..., swept: _Optional[_Union[PruneReply.Swept, _Mapping]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Deleted(_message.Message):
    __slots__ = ("id", "files", "nbytes", "grace_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    files: int
    nbytes: int
    grace_seconds: float
    def __init__(self, id: _Optional[str] = ..., files: _Optional[int] = ..., nbytes: _Optional[int] = ..., grace_seconds: _Optional[float] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("id", "pinned")
    ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    id: str
    pinned: bool
    def __init__(self, id: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("id", "run")
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    id: str
    run: str
    def __init__(self, id: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("id", "nbytes", "total_nbytes", "damage", "note", "ended")
    ID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NBYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    id: str
    nbytes: int
    total_nbytes: int
    damage: _containers.RepeatedScalarFieldContainer[str]
    note: str
    ended: bool
    def __init__(self, id: _Optional[str] = ..., nbytes: _Optional[int] = ..., total_nbytes: _Optional[int] = ..., damage: _Optional[_Iterable[str]] = ..., note: _Optional[str] = ..., ended: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("cancel",)
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    cancel: bool
    def __init__(self, cancel: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("accepted", "nbytes", "failed", "memory_only", "begun")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    nbytes: int
    failed: _containers.RepeatedScalarFieldContainer[str]
    memory_only: _containers.RepeatedScalarFieldContainer[str]
    begun: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepted: _Optional[int] = ..., nbytes: _Optional[int] = ..., failed: _Optional[_Iterable[str]] = ..., memory_only: _Optional[_Iterable[str]] = ..., begun: _Optional[_Iterable[str]] = ...) -> None: ...
