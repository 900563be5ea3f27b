"""What maskpack must give, by naive row loops over raw cells; shares no code with maskpack.

A cell is one element as opaque bytes, so that every dtype, NaN payload and -0.0 is compared and moved alike.
Masks are lists of rows of Python bools. Shape letters: B rows, S width, T real tokens, F trailing dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

Mask = list[list[bool]]
Run = tuple[int, int]

EDGE = "edge"
"""The pad that repeats the nearest real value."""

PER_ROW = "per row"
"""The pad that is any one value in each row."""

SIGNED_ZERO = "signed zero"
"""The pad that is 0.0 in some rows and -0.0 in others."""

ANY_ZERO = "any zero"
"""The pad that is 0.0 or -0.0 in every element; as SIGNED_ZERO in fields with several elements for each position."""

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -------------------------------------------------------------------- cells


def cells(x: Tensor) -> np.ndarray:
    """The elements of a dense tensor as opaque items, in the tensor's shape."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    size = x.element_size()
    if not x.numel():
        return np.zeros(tuple(x.shape), f"V{size}")
    same = torch.view_as_real(x).view(torch.int64) if size == 16 else x.view(_WORD[size])
    return np.frombuffer(same.numpy().tobytes(), f"V{size}").reshape(tuple(x.shape))


def from_cells(array: np.ndarray, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The inverse of `cells`."""
    out = torch.empty(array.shape, dtype=dtype)
    if array.size:
        raw = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
        out = raw.view(dtype).reshape(array.shape)
    return out.to(device)


def pad_cell(pad: Any, dtype: torch.dtype) -> np.ndarray:
    """One element `pad` of `dtype` as a cell ()."""
    if dtype.is_complex:
        return cells(torch.tensor(pad, dtype=torch.complex128).to(dtype))
    if dtype.is_floating_point:
        return cells(torch.tensor(float(pad), dtype=torch.float64).to(dtype))
    return cells(torch.tensor(int(pad), dtype=dtype))


# -------------------------------------------------------------------- masks and runs


def mask_rows(mask: Tensor) -> Mask:
    """A mask [B, S] of any dtype: real where it is not zero."""
    if mask.dtype.is_floating_point:
        mask = mask.to(torch.float64)
    return [[bool(item != 0) for item in row] for row in mask.tolist()]


def mask_tensor(mask: Mask, width: int) -> Tensor:
    """The bool tensor [B, S] of a mask."""
    return torch.tensor(mask, dtype=torch.bool).reshape(len(mask), width)


def mask_to_runs(mask: Mask) -> list[list[Run]]:
    """The maximal runs (start, length) of each row."""
    table: list[list[Run]] = []
    for row in mask:
        runs: list[Run] = []
        for place, real in enumerate(row):
            if not real:
                continue
            if runs and sum(runs[-1]) == place:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((place, 1))
        table.append(runs)
    return table


def lengths(mask: Mask) -> list[int]:
    return [sum(row) for row in mask]


def offsets(mask: Mask) -> list[int]:
    out = [0]
    for length in lengths(mask):
        out.append(out[-1] + length)
    return out


def indices(mask: Mask) -> list[int]:
    """Places of the real elements in the flattened [B * S]."""
    return [row * len(line) + place for row, line in enumerate(mask) for place, real in enumerate(line) if real]


def prefix(mask: Mask) -> Mask:
    """Every row real up to and with its last real position."""
    return [[any(row[place:]) for place in range(len(row))] for row in mask]


def take(mask: Mask, rows: Sequence[int]) -> Mask:
    return [mask[row] for row in rows]


# -------------------------------------------------------------------- pack and unpack


def pack_rows(x: Tensor, mask: Mask) -> list[Tensor]:
    """The real elements of each row of `x` [B, S, *F]: a list of [length, *F]."""
    array = cells(x)
    rows = []
    for row, line in enumerate(mask):
        places = [place for place, real in enumerate(line) if real]
        picked = np.empty((len(places), *x.shape[2:]), array.dtype)
        for number, place in enumerate(places):
            picked[number] = array[row, place]
        rows.append(from_cells(picked, x.dtype))
    return rows


def pack(x: Tensor, mask: Mask) -> Tensor:
    """The real elements of `x` [B, S, *F], row after row: [T, *F]."""
    rows = [cells(row) for row in pack_rows(x, mask)]
    empty = np.empty((0, *x.shape[2:]), cells(x).dtype)
    return from_cells(np.concatenate([empty, *rows]), x.dtype)


def unpack(values: Tensor, mask: Mask, width: int, pad: Any = 0) -> Tensor:
    """Values [T, *F] in their places of [B, S, *F]. The pad is a number, a tensor [B] of one pad a row, or EDGE: before
    the first real value of a row its first real value, anywhere else the last real value so far; zero bits in an empty
    row."""
    source = cells(values)
    out = np.zeros((len(mask), width, *values.shape[1:]), source.dtype)
    if isinstance(pad, Tensor):
        fillers = list(cells(pad))
    else:
        fillers = [None if pad is EDGE else pad_cell(pad, values.dtype)[()]] * len(mask)
    begin = 0
    for row, line in enumerate(mask):
        length = sum(line)
        taken = 0
        for place in range(width):
            if line[place]:
                out[row, place] = source[begin + taken]
                taken += 1
            elif fillers[row] is not None:
                out[row, place] = fillers[row]
            elif length:
                out[row, place] = source[begin + max(taken - 1, 0)]
        begin += length
    return from_cells(out, values.dtype)


def fits(x: Tensor, mask: Mask, pad: Any) -> bool:
    """Whether every element of `x` [B, S, *F] under the mask is the pad, bit for bit: a number or one of the above."""
    array = cells(x)
    edges = cells(unpack(pack(x, mask), mask, x.shape[1], EDGE)) if pad is EDGE else array
    if pad in (SIGNED_ZERO, ANY_ZERO):
        held = {pad_cell(zero, x.dtype).tobytes() for zero in (0.0, -0.0)}
    else:
        held = set() if pad in (EDGE, PER_ROW) else {pad_cell(pad, x.dtype).tobytes()}
    several = pad == EDGE or (pad == ANY_ZERO and x.dim() == 2)
    for row, line in enumerate(mask):
        seen: set[bytes] = set()
        for place, real in enumerate(line):
            if real:
                continue
            if pad is EDGE and array[row, place].tobytes() != edges[row, place].tobytes():
                return False
            seen.update(item.tobytes() for item in array[row, place].reshape(-1))
        if (len(seen) > 1 and not several) or (held and not seen <= held):
            return False
    return True


# -------------------------------------------------------------------- rows of a batch


def jagged_rows(x: Tensor) -> list[Tensor]:
    """The rows of a torch.jagged tensor, read from its offsets."""
    bounds = x.offsets().tolist()
    return [x.values()[begin:end] for begin, end in itertools.pairwise(bounds)]


def make_jagged(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Rows as a torch.jagged tensor of the dtype and trailing shape of the jagged tensor `like`."""
    bounds, parts = [0], [np.empty((0, *like.values().shape[1:]), cells(like.values()).dtype)]
    for row in rows:
        bounds.append(bounds[-1] + row.shape[0])
        parts.append(cells(row))
    values = from_cells(np.concatenate(parts), like.dtype)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(bounds))


def take_rows(batch: TensorDictBase, rows: Sequence[int]) -> TensorDict:
    """The batch with these rows, row by row: repeats and any order are fine. For batches with batch dims [B, ...]."""
    out: dict[str, Any] = {}
    batch_size = (len(rows), *batch.batch_size[1:])
    for name, value in batch.items():
        if isinstance(value, NonTensorStack):
            items = value.tolist()
            picked = [NonTensorData(items[row]) for row in rows]
            out[name] = NonTensorStack(*picked) if picked else None
        elif is_non_tensor(value):
            out[name] = NonTensorData(value.data, batch_size=batch_size)
        elif is_tensorclass(value):
            out[name] = type(value).from_tensordict(_taken(value._tensordict, rows))
        elif isinstance(value, TensorDictBase):
            out[name] = _taken(value, rows)
        elif value.is_nested:
            parts = jagged_rows(value)
            out[name] = make_jagged([parts[row] for row in rows], value)
        else:
            array = cells(value)
            picked = np.empty((len(rows), *array.shape[1:]), array.dtype)
            for place, row in enumerate(rows):
                picked[place] = array[row]
            out[name] = from_cells(picked, value.dtype, value.device)
    empty = [name for name, value in out.items() if value is None]
    if not empty:
        return TensorDict(out, batch_size=batch_size, device=batch.device)
    made = batch.select(*empty)[:0]  # tensordict 0.14 makes no TensorDict of stacks without items
    return made.update({name: value for name, value in out.items() if value is not None}).select(*out)


def _taken(batch: TensorDictBase, rows: Sequence[int]) -> TensorDictBase:
    if isinstance(batch, LazyStackedTensorDict) and rows:
        items = batch.unbind(0)
        return lazy_stack([items[row] for row in rows])
    return take_rows(batch, rows)


def map_tensors(batch: TensorDictBase, change: Callable[[Tensor], Tensor]) -> TensorDict:
    """The batch with every dense and jagged tensor changed."""
    out: dict[str, Any] = {}
    for name, value in batch.items():
        if is_non_tensor(value):
            out[name] = value
        elif isinstance(value, TensorDictBase):
            out[name] = map_tensors(value, change)
        else:
            out[name] = change(value)
    return TensorDict(out, batch_size=batch.batch_size, device=batch.device)


# -------------------------------------------------------------------- a batch as it was


def copy(x: Tensor) -> Tensor:
    """The same bits in other memory. (TensorDict.clone adds 0 where the batch has a device, which loses -0.0.)"""
    if not x.is_nested:
        return from_cells(cells(x), x.dtype, x.device)
    return torch.nested.nested_tensor_from_jagged(copy(x.values()), copy(x.offsets()))


def snapshot(batch: TensorDictBase) -> list[tuple[Any, ...]]:
    """Everything a caller could see change: keys in order, identity, address, shape, strides and bits of each tensor,
    lock state, batch size, device, and identity of each Python object."""
    lines: list[tuple[Any, ...]] = [(tuple(batch.batch_size), str(batch.device), batch.is_locked)]
    for name, value in batch.items():
        if isinstance(value, NonTensorStack):
            lines.append((name, "stack", id(value), tuple(repr(item) for item in value.tolist())))
        elif is_non_tensor(value):
            lines.append((name, "data", id(value), id(value.data), repr(value.data)))
        elif isinstance(value, TensorDictBase):
            lines.append((name, id(value), snapshot(value)))
        elif value.is_nested:
            parts = value.values(), value.offsets()
            lines.append((name, id(value), *[(part.data_ptr(), *_bits(part)) for part in parts]))
        else:
            lines.append((name, id(value), value.data_ptr(), value.stride(), value._version, *_bits(value)))
    return lines


def _bits(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.device, cells(x).tobytes()


# -------------------------------------------------------------------- the comparison


def assert_same_tensor(a: Tensor, b: Tensor, where: str = "tensor") -> None:
    """Bit for bit: kind, dtype, shape, device, every bit. Jagged tensors by offsets and values."""
    _same(f"{where}: nested", a.is_nested, b.is_nested)
    _same(f"{where}: dtype", a.dtype, b.dtype)
    _same(f"{where}: device", a.device, b.device)
    if a.is_nested:
        _same(f"{where}: layout", a.layout, b.layout)
        _same(f"{where}: dims", a.dim(), b.dim())
        _same(f"{where}: ragged dim", a._ragged_idx, b._ragged_idx)
        _same(f"{where}: offsets", a.offsets().tolist(), b.offsets().tolist())
        assert_same_tensor(a.values(), b.values(), f"{where} values")
        return
    _same(f"{where}: shape", tuple(a.shape), tuple(b.shape))
    left, right = cells(a).reshape(-1), cells(b).reshape(-1)
    if left.tobytes() != right.tobytes():
        differs = [place for place in range(left.size) if left[place].tobytes() != right[place].tobytes()]
        place = np.unravel_index(differs[0], tuple(a.shape))
        raise AssertionError(
            f"{where}: {len(differs)} elements differ, first at {tuple(map(int, place))}: "
            f"{left[differs[0]].tobytes().hex()} is not {right[differs[0]].tobytes().hex()}"
        )


def assert_same_object(a: Any, b: Any, where: str = "object") -> None:
    """The same Python object or an equal one of the same types all the way down; tensors and arrays by their bits."""
    if a is b:
        return
    _same(f"{where}: type", type(a), type(b))
    if isinstance(a, Tensor):
        assert_same_tensor(a, b, where)
    elif isinstance(a, np.ndarray) and a.dtype != object:
        _same(f"{where}: array", (a.dtype, a.shape, a.tobytes()), (b.dtype, b.shape, b.tobytes()))
    elif isinstance(a, Mapping):
        _same(f"{where}: keys", list(a), list(b))
        for key in a:
            assert_same_object(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple | np.ndarray):
        _same(f"{where}: length", len(a), len(b))
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same_object(left, right, f"{where}[{place}]")
    elif isinstance(a, float):
        _same(f"{where}: bits", np.float64(a).tobytes(), np.float64(b).tobytes())
    else:
        _same(where, a, b)


def assert_same_rows(got: TensorDictBase, want: TensorDictBase) -> None:
    """As assert_same_batch, where batch-wide objects may have become per-row in one of the two only."""
    assert (got.batch_size, got.device) == (want.batch_size, want.device)
    assert list(got.keys()) == list(want.keys())
    for name in want.keys():  # noqa: SIM118
        a, b = got.get(name), want.get(name)
        if is_non_tensor(b):
            assert_same_object(a.tolist(), b.tolist(), name)
        elif isinstance(b, TensorDictBase):
            assert_same_rows(a, b)
        else:
            assert_same_tensor(a, b, name)


def assert_same_batch(a: Any, b: Any, where: str = "batch") -> None:
    """Bit for bit: batch size, device, key order, every tensor, every non-tensor entry; recursively. Of tensorclasses
    the class, too; lazy stacks row by row."""
    if is_tensorclass(a) or is_tensorclass(b):
        _same(f"{where}: class", type(a), type(b))
        assert_same_batch(a._tensordict, b._tensordict, where)
        return
    if isinstance(a, LazyStackedTensorDict) or isinstance(b, LazyStackedTensorDict):
        _same(f"{where}: lazy", *(isinstance(x, LazyStackedTensorDict) for x in (a, b)))
        _same(f"{where}: batch size", tuple(a.batch_size), tuple(b.batch_size))
        for row, (left, right) in enumerate(zip(a.unbind(0), b.unbind(0), strict=True)):
            assert_same_batch(left, right, f"{where}[{row}]")
        return
    assert isinstance(a, TensorDictBase), f"{where}: {type(a).__name__} is no TensorDict"
    assert isinstance(b, TensorDictBase), f"{where}: {type(b).__name__} is no TensorDict"
    _same(f"{where}: batch size", tuple(a.batch_size), tuple(b.batch_size))
    _same(f"{where}: device", a.device, b.device)
    _same(f"{where}: keys", list(a.keys()), list(b.keys()))
    for name in a.keys():  # noqa: SIM118
        _same_entry(a.get(name), b.get(name), f"{where}/{name}")


def _same_entry(a: Any, b: Any, where: str) -> None:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor), f"{where}: {type(a).__name__} is no tensor"
        assert isinstance(b, Tensor), f"{where}: {type(b).__name__} is no tensor"
        assert_same_tensor(a, b, where)
    elif is_non_tensor(a) or is_non_tensor(b):
        _same(f"{where}: type", type(a), type(b))
        _same(f"{where}: batch size", tuple(a.batch_size), tuple(b.batch_size))
        if isinstance(a, NonTensorStack):
            assert_same_object(a.tolist(), b.tolist(), where)
        else:
            assert_same_object(a.data, b.data, where)
    else:
        assert_same_batch(a, b, where)


def _same(where: str, a: Any, b: Any) -> None:
    assert a == b, f"{where}: {a!r} is not {b!r}"
