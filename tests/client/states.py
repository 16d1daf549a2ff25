"""States of a training script for the client's tests: blank copies, and comparison bit by bit."""

from __future__ import annotations

from typing import Any

import torch

#: An integer dtype of the same width: torch compares and copies it whatever the dtype is.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def blank(value: Any) -> Any:
    """The same structure with nothing of the values: zeros for tensors, None for objects."""
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return torch.quantize_per_tensor(torch.zeros(value.shape), 0.25, 3, value.dtype)
        return torch.zeros(value.shape, dtype=torch.uint8).new_empty(value.shape, dtype=value.dtype)
    return None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers; a conj or neg bit is resolved first."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(BITS[tensor.element_size()])


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    """Same structure, same dtypes and shapes, same bits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}/{key!r}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert torch.equal(bits(found), bits(expected)), path
        if expected.is_quantized:
            assert (found.q_scale(), found.q_zero_point()) == (expected.q_scale(), expected.q_zero_point()), path
    else:
        assert found == expected, path
