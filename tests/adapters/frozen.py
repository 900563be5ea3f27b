"""Columns of TransferQueue as plain data, and their comparison between storage backends."""

from __future__ import annotations

import itertools

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

RESULTS: dict[str, object] = {}


def freeze(value):
    """A value as plain data that is equal only to the same bits in the same kind of container."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            ragged = value._ragged_idx if value.layout == torch.jagged else None
            return ("nested", str(value.layout), ragged, [freeze(row) for row in rows_of(value)])
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return ("tensor", str(value.dtype), tuple(value.shape), raw)
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        raw = [freeze(item) for item in value.ravel().tolist()] if value.dtype == object else value.tobytes()
        return (type(value).__name__, str(value.dtype), value.shape, raw)
    if isinstance(value, dict):
        return ("dict", {name: freeze(value[name]) for name in sorted(value, key=str)})
    if isinstance(value, NonTensorStack):
        return ("stack", [freeze(item) for item in value.tolist()])
    if isinstance(value, NonTensorData):
        return ("data", freeze(value.data))
    if isinstance(value, TensorDictBase):
        return ("batch", tuple(value.batch_size), {name: freeze(value.get(name)) for name in sorted(value.keys())})
    if isinstance(value, list | tuple):
        return (type(value).__name__, [freeze(item) for item in value])
    return (type(value).__name__, repr(value))


def rows_of(nested):
    """The rows of a nested tensor, along whichever dim is ragged; `unbind` of torch splits the wrong one at times."""
    if nested.layout != torch.jagged:
        return list(nested.unbind())
    dim, offsets = nested._ragged_idx - 1, nested.offsets().tolist()
    return [nested.values().narrow(dim, a, b - a) for a, b in itertools.pairwise(offsets)]


def uncast(pack):
    """SimpleStorage's way to put rows together, without the casts of rows whose dtypes differ."""

    def packed(values):
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return pack(values) if len(dtypes) < 2 else NonTensorStack(*values)

    return packed


def agree(name, result):
    """The first backend says what the other is to give."""
    same(result, RESULTS.setdefault(name, result))


def same(seen, expected, path="it"):
    """Equal plain data; a failure names the place."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        assert seen.keys() == expected.keys(), path
        for name in expected:
            same(seen[name], expected[name], f"{path}[{name!r}]")
    elif isinstance(expected, list | tuple) and len(seen) == len(expected):
        for place, pair in enumerate(zip(seen, expected, strict=True)):
            same(*pair, f"{path}[{place}]")
    else:
        assert seen == expected, path
