"""What `show` says of a checkpoint, from item tables and from stock metadata."""

from __future__ import annotations

import pytest

from ckptd import contents
from ckptd.errors import Corrupt
from ckptd.metadata import Contents, StoredAt, Tensor
from ckptd.model import mint_attempt
from ckptd.v1.daemon_pb2 import Checkpoint, ShowReply
from ckptd.v1.manifest_pb2 import Form, Item, Summary, Table


def raw(fqn: str, offset: list[int] | None, form: int, nbytes: int) -> Item:
    return Item(fqn=fqn.encode(), offset=offset or [], has_offset=offset is not None, kind=Item.RAW, form=form, nbytes=nbytes)


def table(*items: Item, forms: list[tuple[str, list[int]]]) -> Table:
    return Table(forms=[Form(pkl=b"pkl", dtype=dtype, shape=shape) for dtype, shape in forms], items=items)


def told(line: ShowReply.Tensor) -> tuple[bytes, str, list[int], int, int, int]:
    return line.fqn, line.dtype, list(line.shape), line.raw_bytes, line.chunks, line.shards


def test_a_tensor_is_as_large_as_its_chunks_reach_whatever_their_order() -> None:
    forms = [("float32", [2, 4]), ("float32", [1, 4])]
    tables = [
        table(raw("w", [2, 0], 1, 16), raw("w", [0, 0], 0, 32), forms=forms),
        table(raw("w", [0, 4], 0, 32), raw("w", [2, 4], 1, 16), forms=forms),
        table(raw("other", [0, 0], 0, 32), forms=forms),
        table(raw("w", [3, 0], 0, 32), forms=forms),
    ]
    assert [told(line) for line in contents.lines(tables)] == [
        (b"other", "float32", [2, 4], 32, 1, 1),
        (b"w", "float32", [5, 8], 128, 5, 3),
    ]


def test_every_kind_of_item_has_its_line_in_the_order_of_names() -> None:
    sparse = Item(fqn=b"sparse", offset=[0, 0], has_offset=True, kind=Item.OPAQUE_TENSOR, form=1, nbytes=900)
    note = Item(fqn="ü".encode(), kind=Item.OPAQUE_OBJECT, nbytes=7)
    forms = [("int64", []), ("float16", [3, 3]), ("uint8", [0, 5])]
    one = table(note, raw("scalar", [], 0, 8), sparse, raw("empty", [0, 0], 2, 0), raw("no offset", None, 0, 8), forms=forms)
    assert [told(line) for line in contents.lines([one])] == [
        (b"empty", "uint8", [0, 5], 0, 1, 1),
        (b"no offset", "int64", [], 8, 1, 1),
        (b"scalar", "int64", [], 8, 1, 1),
        (b"sparse", "float16", [3, 3], 900, 1, 1),
        ("ü".encode(), "", [], 7, 0, 1),
    ]
    assert contents.lines([]) == []


FORMS = [("float32", [2, 4]), ("int8", [2, 4]), ("float32", [2])]


@pytest.mark.parametrize(
    "items",
    [
        [raw("w", [0, 0], 0, 32), raw("w", [0, 4], 1, 8)],
        [raw("w", [0, 0], 0, 32), raw("w", [0], 2, 8)],
        [raw("w", [0], 0, 32)],
        [raw("w", [-1, 0], 0, 32)],
        [raw("w", [(1 << 63) - 2, 0], 0, 32)],
        [raw("w", [0, 0], 0, (1 << 63) - 1), raw("w", [2, 0], 0, 1)],
        [raw("w", [0, 0], 0, 32), Item(fqn=b"w", kind=Item.OPAQUE_OBJECT, nbytes=1)],
        [Item(fqn=b"\xff", kind=Item.OPAQUE_OBJECT)],
        [Item(fqn=b"x" * (1 << 21), kind=Item.OPAQUE_OBJECT)],
    ],
    ids=["dtypes", "dimensions", "offset", "below zero", "past 64 bits", "bytes past 64 bits", "tensor and object", "name", "long name"],
)
def test_tables_that_no_state_can_have_are_corrupt(items: list[Item]) -> None:
    with pytest.raises(Corrupt):
        contents.lines([table(one, forms=FORMS) for one in items])


def stock(*tensors: Tensor, objects: tuple[bytes, ...] = (), storage: dict[tuple[bytes, tuple[int, ...] | None], StoredAt]) -> Contents:
    return Contents(list(tensors), list(objects), storage, None)


def test_of_a_stock_checkpoint_bytes_come_from_the_dtype_and_shards_from_the_files() -> None:
    half = ((0, 0), (2, 3)), ((2, 0), (2, 3))
    found = stock(
        Tensor(b"w", "bfloat16", (4, 3), half),
        Tensor(b"a", "bool", (5,), (((0,), (5,)),)),
        Tensor(b"lost", "float64", (1,), (((0,), (1,)),)),
        objects=(b"o", b"z"),
        storage={
            (b"w", (0, 0)): StoredAt("__0_0.distcp", 0, 99, ()),
            (b"w", (2, 0)): StoredAt("__1_0.distcp", 0, 99, ()),
            (b"a", (0,)): StoredAt("__1_0.distcp", 99, 9, ()),
            (b"o", None): StoredAt("sub/__0_1.distcp", 0, 41, ()),
            (b"z", None): StoredAt("__0_0.distcp", 99, 20, ("stream.zstd/1",)),
        },
    )
    assert [told(line) for line in contents.stock_lines(found)] == [
        (b"a", "bool", [5], 5, 1, 1),
        (b"lost", "float64", [1], 8, 1, 0),
        (b"o", "", [], 41, 0, 1),
        (b"w", "bfloat16", [4, 3], 24, 2, 2),
        (b"z", "", [], 0, 0, 1),  # how long it is behind zstd, nothing says
    ]
    assert contents.stock_files(found) == ["__0_0.distcp", "__1_0.distcp", "sub/__0_1.distcp"]


def test_a_stock_tensor_larger_than_anything_is_corrupt() -> None:
    # The product of so many sizes would have millions of digits, and take longer than a test may.
    wide = (255,) * 3_000_000
    with pytest.raises(Corrupt):
        contents.stock_lines(stock(Tensor(b"w", "int8", (1,), (((0,), wide), ((1,), (1,)))), storage={}))
    assert contents.expected_nbytes("float32", [(*wide, 0)]) == 0
    assert contents.expected_nbytes("float32", [wide]) == (1 << 63) - 1


def test_a_large_answer_comes_in_messages_that_grpc_takes() -> None:
    tensors = [ShowReply.Tensor(fqn=b"layer.%d.weight" % number, dtype="int8", shape=[1, 2]) for number in range(60_000)]
    files = [f"{'directory' * 20}/{number}.distcp" for number in range(10_000)]
    replies = list(contents.replies(Checkpoint(stock=True), tensors, files))
    assert [reply.HasField("checkpoint") for reply in replies] == [True] + [False] * (len(replies) - 1)
    assert len(replies) > 2
    assert max(reply.ByteSize() for reply in replies) < 3 << 20
    assert [tensor for reply in replies for tensor in reply.tensors] == tensors
    assert [file for reply in replies for file in reply.files] == files
    assert len(list(contents.replies(Checkpoint(), [], []))) == 1


def test_a_branch_is_left_when_a_lower_step_is_accepted_later_by_a_time_that_a_clock_can_tell() -> None:
    minted = {"step-10": 1, "step-15": 3, "step-20": 2}
    lines = [Checkpoint(summary=Summary(id=f"run/{name}", attempt=mint_attempt(us, None))) for name, us in minted.items()]
    lines.append(Checkpoint(summary=Summary(id="run/step-5", attempt="f" * len(mint_attempt(1, None)))))
    contents.mark_abandoned(lines)
    assert [line.summary.id for line in lines if line.abandoned] == ["run/step-20"]
