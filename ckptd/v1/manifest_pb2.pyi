from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Form(_message.Message):
    __slots__ = ("pkl", "dtype", "shape", "strides")
    PKL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    pkl: bytes
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pkl: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("fqn", "offset", "has_offset", "index", "kind", "at", "raw_at", "nbytes", "form")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RAW: _ClassVar[Item.Kind]
        OPAQUE_TENSOR: _ClassVar[Item.Kind]
        OPAQUE_OBJECT: _ClassVar[Item.Kind]
    RAW: Item.Kind
    OPAQUE_TENSOR: Item.Kind
    OPAQUE_OBJECT: Item.Kind
    FQN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HAS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    RAW_AT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    fqn: bytes
    offset: _containers.RepeatedScalarFieldContainer[int]
    has_offset: bool
    index: int
    kind: Item.Kind
    at: int
    raw_at: int
    nbytes: int
    form: int
    def __init__(self, fqn: _Optional[bytes] = ..., offset: _Optional[_Iterable[int]] = ..., has_offset: bool = ..., index: _Optional[int] = ..., kind: _Optional[_Union[Item.Kind, str]] = ..., at: _Optional[int] = ..., raw_at: _Optional[int] = ..., nbytes: _Optional[int] = ..., form: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("forms", "items", "end")
    FORMS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    forms: _containers.RepeatedCompositeFieldContainer[Form]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    end: int
    def __init__(self, forms: _Optional[_Iterable[_Union[Form, _Mapping]]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., end: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("node", "address", "token", "rank", "nbytes", "table_nbytes", "raw_bytes", "items", "sealed_us")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SEALED_US_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    token: str
    rank: int
    nbytes: int
    table_nbytes: int
    raw_bytes: int
    items: int
    sealed_us: int
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., token: _Optional[str] = ..., rank: _Optional[int] = ..., nbytes: _Optional[int] = ..., table_nbytes: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., items: _Optional[int] = ..., sealed_us: _Optional[int] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("id", "attempt", "step", "accepted_us", "world_size", "raw_bytes", "stored_bytes", "codec", "tags", "parent")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_US_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: str
    step: int
    accepted_us: int
    world_size: int
    raw_bytes: int
    stored_bytes: int
    codec: str
    tags: _containers.ScalarMap[str, str]
    parent: str
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[str] = ..., step: _Optional[int] = ..., accepted_us: _Optional[int] = ..., world_size: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., tags: _Optional[_Mapping[str, str]] = ..., parent: _Optional[str] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("summary", "shards", "metadata", "durable", "only_new", "store", "replicas")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    summary: Summary
    shards: _containers.RepeatedCompositeFieldContainer[Receipt]
    metadata: Receipt
    durable: bool
    only_new: bool
    store: str
    replicas: int
    def __init__(self, summary: _Optional[_Union[Summary, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., metadata: _Optional[_Union[Receipt, _Mapping]] = ..., durable: bool = ..., only_new: bool = ..., store: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("offset", "lengths", "hashes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    def __init__(self, offset: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class StoredShard(_message.Message):
    __slots__ = ("rank", "file", "nbytes", "table", "stored")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    file: str
    nbytes: int
    table: Table
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    def __init__(self, rank: _Optional[int] = ..., file: _Optional[str] = ..., nbytes: _Optional[int] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("summary", "shards", "metadata_head", "metadata_nbytes", "metadata_hash", "block_nbytes")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_HEAD_FIELD_NUMBER: _ClassVar[int]
    METADATA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    summary: Summary
    shards: _containers.RepeatedCompositeFieldContainer[StoredShard]
    metadata_head: int
    metadata_nbytes: int
    metadata_hash: bytes
    block_nbytes: int
    def __init__(self, summary: _Optional[_Union[Summary, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[StoredShard, _Mapping]]] = ..., metadata_head: _Optional[int] = ..., metadata_nbytes: _Optional[int] = ..., metadata_hash: _Optional[bytes] = ..., block_nbytes: _Optional[int] = ...) -> None: ...

class Tombstone(_message.Message):
    __slots__ = ("id", "save_id", "deleted_us", "files")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    DELETED_US_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    id: str
    save_id: str
    deleted_us: int
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., save_id: _Optional[str] = ..., deleted_us: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("id", "attempt", "node", "shard")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: str
    node: str
    shard: StoredShard
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[str] = ..., node: _Optional[str] = ..., shard: _Optional[_Union[StoredShard, _Mapping]] = ...) -> None: ...
