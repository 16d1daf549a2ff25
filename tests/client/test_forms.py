"""Containers made from a form and raw bytes are what torch.save would have stored."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile

import pytest
import torch

from ckptd import archive
from ckptd.errors import InvalidRequest
from ckptd_client.forms import form_of, is_dense

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (0, 4), (4, 0), (1, 1), (3, 5), (2, 3, 4), (1, 300, 2), (70000,)]


def saveable(dtype: torch.dtype) -> bool:
    """Whether torch itself brings a plain tensor of `dtype` through save and load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = io.BytesIO()
            torch.save(torch.empty(2, dtype=dtype), out)
            torch.load(io.BytesIO(out.getvalue()), weights_only=True)
        except (RuntimeError, NotImplementedError, KeyError, AttributeError, TypeError, ValueError, pickle.UnpicklingError):
            return False
    return True


NAMED = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES = sorted((dtype for dtype in NAMED if saveable(dtype)), key=str)
REQUIRED = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
}


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of recognisable bytes whose storage it fills exactly."""
    numel = torch.Size(shape).numel()
    raw = (torch.arange(numel * dtype.itemsize, dtype=torch.int64) * 37 % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    storage = raw.untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides or torch.empty(shape, device="meta").stride())


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


def container(tensor: torch.Tensor, at: int) -> bytes:
    form = form_of(tensor.dtype, tuple(tensor.shape), tensor.stride())
    before, after = archive.gaps(at, form.pkl, tensor.nbytes)
    return before + raw_bytes(tensor) + after


def assert_same(loaded: torch.Tensor, original: torch.Tensor) -> None:
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (original.dtype, original.shape, original.stride())
    assert not loaded.requires_grad
    assert raw_bytes(loaded) == raw_bytes(original)


def test_every_dtype_of_the_contract_is_covered() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES} >= REQUIRED


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_containers_load_as_the_tensor_they_describe(dtype: torch.dtype) -> None:
    for at, shape in enumerate(SHAPES):
        tensor = tensor_of(dtype, shape)
        loaded = torch.load(io.BytesIO(container(tensor, at * 11)), weights_only=True, map_location="cpu")
        assert_same(loaded, tensor)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 4, 5), (60, 1, 15, 3)), ((2, 3, 4, 5), (1, 2, 6, 24)), ((5, 2, 4, 3), (24, 12, 3, 1)), ((1, 6), (99, 1))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64, torch.uint16], ids=str)
def test_strides_survive(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape, strides)
    assert_same(torch.load(io.BytesIO(container(tensor, 0)), weights_only=True, mmap=False), tensor)


def test_channels_last_survives() -> None:
    tensor = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    loaded = torch.load(io.BytesIO(container(tensor, 4096)), weights_only=True)
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(loaded, tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pickle_is_the_one_that_torch_writes(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        out = io.BytesIO()
        torch.save(tensor, out)
        with zipfile.ZipFile(out) as stock:
            assert form_of(dtype, shape, tensor.stride()).pkl == stock.read("archive/data.pkl"), shape


def test_a_form_tells_dtype_shape_and_strides() -> None:
    form = form_of(torch.bfloat16, (3, 5), (1, 3))
    assert (form.dtype, list(form.shape), list(form.strides)) == ("bfloat16", [3, 5], [1, 3])


def test_a_form_is_made_once() -> None:
    assert form_of(torch.float64, (9, 9), (9, 1)) is form_of(torch.float64, (9, 9), (9, 1))


def test_a_tensor_larger_than_memory_has_a_form() -> None:
    # 2^60 bytes: nothing of that size can have been allocated.
    form = form_of(torch.float32, (1 << 29, 1 << 29), (1 << 29, 1))
    assert list(form.shape) == [1 << 29, 1 << 29]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4,), (2,)), ((4, 4), (0, 1)), ((3, 5), (6, 1)), ((2, 2), (1, 1)), ((2, 2), (2,)), ((3,), (0,)), ((3,), (-1,))],
    ids=str,
)
def test_holes_and_overlaps_are_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert not is_dense(shape, strides)
    with pytest.raises(InvalidRequest, match="does not fill its storage"):
        form_of(torch.float32, shape, strides)


def test_strides_of_dimensions_of_one_element_do_not_matter() -> None:
    assert is_dense((1, 5, 1), (77, 1, 3))


def test_a_dtype_that_only_quantised_tensors_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot save"):
        form_of(torch.qint8, (3,), (1,))
