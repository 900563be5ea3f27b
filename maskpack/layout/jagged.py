"""torch.jagged tensors [B, j, *F]: built with everything set that torch would otherwise guess, and read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.index import IntArray
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import RowLayout

_Way = Callable[[Sequence[Tensor], Tensor, int, int], list[Tensor]]


def jagged(values: Tensor, layout: RowLayout) -> Tensor:
    """Packed values [T, *F] as a jagged tensor on the layout's shared offsets, min and max length set."""
    return jagged_from(values, layout.offsets, layout.min_length, layout.max_length)


def jagged_from(values: Tensor, offsets: Tensor, min_length: int, max_length: int) -> Tensor:
    """Values [T, *F] and offsets int64 [B + 1] as a jagged tensor [B, j, *F]."""
    return jagged_all([values], offsets, min_length, max_length)[0]


def jagged_all(fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int) -> list[Tensor]:
    """As `jagged_from`, of several values."""
    differentiable = torch.is_grad_enabled() and any(values.requires_grad for values in fields)
    way = None if differentiable or torch.compiler.is_compiling() else _fast_way()
    return (way or _public_way)(fields, offsets, min_length, max_length)


# -------------------------------------------------------------------- two ways to make jagged tensors


def _public_way(fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int) -> list[Tensor]:
    if not torch.is_grad_enabled():
        fields = [values.detach() for values in fields]
    host = nullcontext() if torch.compiler.is_compiling() else torch.device("cpu")
    with host:  # where torch keeps the lengths
        return [
            torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min_length, max_seqlen=max_length)
            for values in fields
        ]


@cache
def _fast_way() -> _Way | None:
    """The private way, if it gives on a small example what the public one gives; else None."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            way = _private_way()
            return way if _is_exact(way) else None
    except Exception:  # whatever comes of private names in another version of torch
        return None


def _private_way() -> _Way:
    """What torch does inside its own nested operations, at a quarter of the time of its public function. No gradients
    flow through what it makes."""
    from torch._C import DispatchKey, DispatchKeySet
    from torch.nested._internal.nested_tensor import NestedTensor

    keys = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)

    def way(fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int) -> list[Tensor]:
        lengths = {"min_seqlen": min_length, "max_seqlen": max_length}
        bounds = {name: torch.zeros(length, 0, device="cpu") for name, length in lengths.items()}
        made: list[Tensor] = []
        first: Any = None
        for values in fields:
            if first is not None and (first._values.shape, first._values.stride()) == (values.shape, values.stride()):
                made.append(sibling(first, values.detach()))
            else:
                first = NestedTensor(values.detach(), offsets, _metadata_cache=dict(bounds))
                made.append(first)
        return made

    def sibling(field: Any, values: Any) -> Tensor:
        """A jagged tensor on the offsets of another, for values of its shape and strides. It takes the sizes from
        there, which cost two thirds of the time of making one."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            NestedTensor, field._size, field._strides, 0, torch.contiguous_format, values.dtype, torch.jagged,
            values.device, False, False, "sizes", False, True, keys, storage_size=values.untyped_storage().size(),
        )  # fmt: skip
        vars(made).update(vars(field))
        made._values, made._metadata_cache = values, dict(field._metadata_cache)
        vars(values).update(vars(field._values))  # marks for torch.compile
        return made

    return way


def _is_exact(way: _Way) -> bool:
    """Whether a way gives, with and without a tensor before it, what torch gives."""
    rows = [torch.tensor(row, device="cpu").view(-1, 2) for row in ([1.0, -2.0], [], [3.0, 4.0, 5.0, -0.0])]
    want: Any = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cpu")
    fields = [want.values(), want.values().clone()]
    return all(
        _is_same(seen, values, want) for seen, values in zip(way(fields, want.offsets(), 0, 2), fields, strict=True)
    )


def _is_same(seen: Any, values: Tensor, want: Any) -> bool:
    """Whether a jagged tensor of `values` is as another, on the same offsets: in itself, in operations, in a pickle and
    in a graph for gradients."""
    from torch._C import _dispatch_keys as dispatch_keys  # type: ignore[reportPrivateUsage]

    kept: Any = pickle.loads(pickle.dumps(seen))
    expected: Any = pickle.loads(pickle.dumps(want))
    # built and compared, but not run: a backward pass starts threads, after which a process must not fork
    graphs: list[Any] = [(field.detach().requires_grad_() * 2).values().grad_fn for field in (seen, want)]
    return (
        type(seen) is type(want)
        and all(getattr(seen, name) == getattr(want, name) for name in ("shape", "dtype", "device", "layout"))
        and (seen.stride(), seen.storage_offset()) == (want.stride(), want.storage_offset())
        and str(dispatch_keys(seen)) == str(dispatch_keys(want))
        and not seen.requires_grad
        and _carries(vars(seen), vars(want))
        and seen.values().data_ptr() == values.data_ptr()
        and seen.offsets() is want.offsets()
        and seen.lengths() is None
        and torch.equal((seen - want).values(), values - values)
        and all(map(torch.equal, seen.unbind(), want.unbind()))
        and torch.equal(seen.to_padded_tensor(0.0), want.to_padded_tensor(0.0))
        and torch.equal(kept.values(), expected.values())
        and torch.equal(kept.offsets(), expected.offsets())
        and _carries(vars(kept).get("_metadata_cache"), vars(expected).get("_metadata_cache"))
        and type(graphs[0]) is type(graphs[1])
    )


def _carries(seen: Any, want: Any) -> bool:
    """Whether two things are equal; tensors also in their attributes, such as marks for torch.compile. Capsules, where
    older versions of torch keep sizes for themselves, cannot be compared."""
    if isinstance(want, dict):
        named = cast("dict[Any, Any]", want)
        return (
            isinstance(seen, dict)
            and seen.keys() == named.keys()
            and all(_carries(seen[name], named[name]) for name in named)
        )
    if isinstance(want, Tensor):
        return isinstance(seen, Tensor) and torch.equal(seen, want) and _carries(vars(seen), vars(want))
    return type(seen) is type(want) and (type(want).__name__ == "PyCapsule" or bool(seen == want))


# -------------------------------------------------------------------- what a jagged tensor is


def offsets_of(field: Any) -> Tensor:
    """int64 [B + 1]: the row bounds of a jagged tensor."""
    return field.offsets()


def is_regular(field: Any) -> bool:
    """Whether a nested tensor is jagged along dim 1 without gaps, so that its values and offsets say all."""
    return field.layout == torch.jagged and ragged_dim(field) == 1 and field.lengths() is None


def ragged_dim(field: Any) -> int:
    """The dim of a jagged tensor that is ragged. Its shape says which; but verl sets the private number that torch
    reads, and leaves the shape."""
    known = getattr(field, "_ragged_idx", None)
    return stated_dim(field) if known is None else known


def stated_dim(field: Any) -> int:
    """The dim that the shape of a jagged tensor says is ragged."""
    return next(dim for dim, size in enumerate(field.shape) if not isinstance(size, int))


def to_host(tensors: Sequence[Tensor]) -> list[IntArray]:
    """Integer tensors [n] as int64 arrays on the host, with one synchronisation in all."""
    if all(tensor.device.type == "cpu" for tensor in tensors):  # also where there is none
        return [tensor.to(torch.int64).numpy() for tensor in tensors]
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return np.split(torch.cat([tensor.to(torch.int64) for tensor in tensors]).cpu().numpy(), ends[:-1])


def _shares(field: Tensor, layout: RowLayout) -> bool:
    return layout.__dict__.get("offsets") is offsets_of(field)


def host_offsets(field: Tensor, *layouts: RowLayout | None) -> IntArray:
    """int64 [B + 1] on the host: the row bounds of a field. No synchronisation if it is on a layout's own offsets."""
    for layout in layouts:
        if layout is not None and _shares(field, layout):
            return layout.row_offsets
    return to_host([offsets_of(field)])[0]


def check_lengths(fields: Mapping[str, tuple[Tensor, RowLayout]], call: str, remedy: str) -> None:
    """That each jagged field has the row lengths of the layout beside it. A field on the layout's own offsets has
    them. One synchronisation on CUDA, if there is any other."""
    for name, (field, _) in fields.items():
        if not is_regular(field):
            raise LayoutError(
                f'{call}: field "{name}" is nested, but not jagged along dim 1 without gaps; expected that. {remedy}'
            )
    own = {id(offsets_of(field)): offsets_of(field) for field, layout in fields.values() if not _shares(field, layout)}
    read = dict(zip(own, to_host(list(own.values())), strict=True))
    for name, (field, layout) in fields.items():
        offsets = read.get(id(offsets_of(field)), layout.row_offsets)
        if not np.array_equal(offsets, layout.row_offsets):
            seen = np.diff(offsets)
            raise LayoutError(
                f'{call}: field "{name}" has {seen.size} rows of {int(seen.sum())} tokens; its layout has '
                f"{layout.num_rows} rows of {layout.num_tokens} tokens, or the rows differ in length. {remedy}"
            )
