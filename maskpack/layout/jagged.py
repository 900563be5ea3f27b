"""Tensors with rows of different lengths: torch.jagged ones are built, with minimum and maximum length set, and read.

    tensor [B, j, *F]       ragged along dim 1
    tensor [B, 4, j]        ragged along dim 2, as the positions of M-RoPE
    Jagged                  either as values [T, *F], one row after another, their offsets [B + 1], and the ragged dim

Equal offsets of a process are one tensor, so that torch takes tensors of different calls together in arithmetic.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from maskpack.core.index import IntArray
from maskpack.core.keys import Path, show
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import RowLayout, min_length, shared_offsets

_Way = Callable[[Sequence[Tensor], Tensor, int, int], list[Tensor]]


def jagged(values: Tensor, layout: RowLayout) -> Tensor:
    """Packed values [T, *F] as a jagged tensor on the offsets of `layout`, with min and max length set."""
    return jagged_from(values, layout.offsets, min_length(layout), layout.max_length)


def jagged_from(values: Tensor, offsets: Tensor, min_length: int, max_length: int) -> Tensor:
    """Values [T, *F] and offsets int64 [B + 1] as a jagged tensor [B, j, *F]."""
    return jagged_all([values], offsets, min_length, max_length)[0]


def jagged_all(
    fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int, dims: Sequence[int] = ()
) -> list[Tensor]:
    """`jagged_from` for several values; of those with other ragged `dims` than 1 the tensors are [B, ..., j, ...]."""
    differentiable = torch.is_grad_enabled() and any(values.requires_grad for values in fields)
    way = None if differentiable or torch.compiler.is_compiling() else _fast_way()
    made = (way or _public_way)(fields, offsets, min_length, max_length)
    for place, dim in enumerate(dims):
        if dim != 1:
            values = fields[place].movedim(0, dim - 1).contiguous()
            made[place] = torch.nested.nested_tensor_from_jagged(
                values, offsets, jagged_dim=dim, min_seqlen=min_length, max_seqlen=max_length
            )
    return made


def jagged_on(
    layouts: Mapping[str, RowLayout],
    fields: Iterable[tuple[Path, str, int]],
    values: Mapping[Path, Tensor],
    given: Mapping[str, Tensor],
) -> dict[Path, Tensor]:
    """`jagged` for some fields of a batch with these layouts: their paths, layouts and ragged dims, and their values
    [T, *F]. Those of one layout and device share its offsets, which are `given`, by layout, if this process has no
    equal ones yet."""
    groups: dict[tuple[str, torch.device], list[tuple[Path, int]]] = {}
    for path, name, dim in fields:
        groups.setdefault((name, values[path].device), []).append((path, dim))
    out: dict[Path, Tensor] = {}
    alike = alike_in(layouts) if groups else {}
    for (name, device), own in groups.items():
        layout, sent = layouts[name], given.get(name)
        sent = None if sent is None or sent.device != device else sent
        offsets = shared_offsets(layout.row_offsets, device, sent, alike=alike[name])
        packed, dims = [values[path].contiguous() for path, _ in own], [dim for _, dim in own]
        made = jagged_all(packed, offsets, min_length(layout), layout.max_length, dims)
        out.update(zip((path for path, _ in own), made, strict=True))
    return out


def alike_in(layouts: Mapping[str, RowLayout]) -> dict[str, int]:
    """How many layouts of a batch with the same rows are before each one: `alike` of `shared_offsets`. Response and
    sequence of rows without a prompt have offsets of their own, since these alone tell which axis a tensor is on; the
    response is before all others, so that it has those that equal rows of other batches share."""
    before, out = Counter[bytes](), dict[str, int]()
    for name in sorted(layouts, key=lambda name: name != "response"):
        rows = layouts[name].row_offsets.tobytes()
        out[name] = before[rows]
        before[rows] += 1
    return out


# -------------------------------------------------------------------- two ways to construct jagged tensors


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
    """The private constructor if it gives the same as the public one on a small example, else None."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            way = _private_way()
            return way if _is_exact(way) else None
    except Exception:  # private names may mean anything in another version of torch
        return None


def _private_way() -> _Way:
    """The constructor below `NestedTensor`, whose attributes it takes from one example. A tensor takes a quarter of the
    time, and others on the same offsets half of that. Gradients do not flow through its tensors."""
    from torch._C import DispatchKey, DispatchKeySet
    from torch._dynamo import mark_dynamic
    from torch.nested._internal import nested_tensor

    internal: Any = nested_tensor
    NestedTensor, symbol_of = internal.NestedTensor, internal.get_tensor_symint
    keys = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)
    example: Any = NestedTensor(torch.zeros(1, device="cpu"), torch.tensor([0, 1], device="cpu"))
    examples: list[dict[str, Any]] = [vars(example), vars(example._values)]

    def way(fields: Sequence[Tensor], offsets: Tensor, min_length: int, max_length: int) -> list[Tensor]:
        rows, ragged = offsets.shape[0] - 1, symbol_of(offsets)
        bounds = [torch.zeros(length, 0, device="cpu") for length in (min_length, max_length)]
        for bound in bounds:
            mark_dynamic(bound, 0)
        attributes, value_attributes = map(_own_marks, examples)
        attributes["_offsets"] = offsets
        forms: dict[Any, Any] = {}
        out: list[Tensor] = []
        for given in fields:
            values: Any = given.detach()
            shape, stride = form = values.shape, values.stride()
            if form not in forms:
                first = ragged if stride[0] == 1 else ragged * stride[0]  # an operation takes 15 microseconds
                forms[form] = (rows, ragged, *shape[1:]), (first, *stride)
            size, strides = forms[form]
            field: Any = torch.Tensor._make_wrapper_subclass(
                NestedTensor, size, strides, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device,
                False, False, "sizes", False, True, keys, storage_size=values.untyped_storage().size(),
            )  # fmt: skip
            vars(values).update(value_attributes)
            cache = {"min_seqlen": bounds[0], "max_seqlen": bounds[1]}
            vars(field).update(attributes, _size=size, _strides=strides, _values=values, _metadata_cache=cache)
            out.append(field)
        return out

    return way


def _own_marks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with copies of the marks for torch.compile, which are sets that it may add to."""
    return {name: {*value} if isinstance(value, set) else value for name, value in attributes.items()}


def _is_exact(way: _Way) -> bool:
    """Whether `way` gives the same as torch, for two tensors of a form."""
    rows = [torch.tensor(row, device="cpu").view(-1, 2) for row in ([1.0, -2.0], [], [3.0, 4.0, 5.0, -0.0])]
    want: Any = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cpu")
    fields = [want.values(), want.values().clone()]
    made = way(fields, want.offsets(), 0, 2)
    # before any operation, because operations add attributes
    alike = all(_is_equal(vars(got), vars(want)) for got in made)
    return alike and all(_is_same(got, values, want) for got, values in zip(made, fields, strict=True))


def _is_same(got: Any, values: Tensor, want: Any) -> bool:
    """Whether `got`, a jagged tensor of `values`, equals `want` on the same offsets: in operations, after a pickle and
    in the autograd graph."""
    from torch._C import _dispatch_keys as dispatch_keys  # type: ignore[reportPrivateUsage]

    pickled: Any = pickle.loads(pickle.dumps(got))
    expected: Any = pickle.loads(pickle.dumps(want))
    # compared but not run: a backward pass starts threads, after which a process must not fork
    graphs: list[Any] = [(field.detach().requires_grad_() * 2).values().grad_fn for field in (got, want)]
    return (
        type(got) is type(want)
        and all(getattr(got, name) == getattr(want, name) for name in ("shape", "dtype", "device", "layout"))
        and (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset())
        and str(dispatch_keys(got)) == str(dispatch_keys(want))
        and not got.requires_grad
        and got.values().data_ptr() == values.data_ptr()
        and got.offsets() is want.offsets()
        and got.lengths() is None
        and torch.equal((got - want).values(), values - values)
        and all(map(torch.equal, got.unbind(), want.unbind()))
        and torch.equal(got.to_padded_tensor(0.0), want.to_padded_tensor(0.0))
        and torch.equal(pickled.values(), expected.values())
        and torch.equal(pickled.offsets(), expected.offsets())
        and _is_equal(vars(pickled).get("_metadata_cache"), vars(expected).get("_metadata_cache"))
        and type(graphs[0]) is type(graphs[1])
    )


def _is_equal(got: Any, want: Any) -> bool:
    """Whether two attributes are equal; of tensors, also their own attributes, such as marks for torch.compile. The
    capsules in which older versions of torch keep sizes cannot be compared, and count as equal."""
    if isinstance(want, dict):
        named = cast("dict[Any, Any]", want)
        return (
            isinstance(got, dict)
            and got.keys() == named.keys()
            and all(_is_equal(got[name], named[name]) for name in named)
        )
    if isinstance(want, Tensor):
        return isinstance(got, Tensor) and torch.equal(got, want) and _is_equal(vars(got), vars(want))
    return type(got) is type(want) and (type(want).__name__ == "PyCapsule" or bool(got == want))


# -------------------------------------------------------------------- reading jagged tensors


class Jagged(NamedTuple):
    """A tensor with rows of different lengths, without its gradients.

    Attributes:
        values: [T, *F], one row after another, the ragged dim in front. They may be the ones that it holds: do not
            change their attributes.
        offsets: [B + 1], where rows begin, of the dtype that they have.
        dim: the ragged dim: 1 of [B, j, *F], 2 of [B, n, j].
    """

    values: Tensor
    offsets: Tensor
    dim: int

    @classmethod
    def of(cls, field: Any) -> Jagged | None:
        """None for a tensor that is not nested, has the strided layout, or gaps between its rows."""
        private = cast("dict[str, Any]", vars(field))  # each attribute of torch takes microseconds
        values, offsets, dim = private.get("_values"), private.get("_offsets"), private.get("_ragged_idx")
        if values is not None and offsets is not None and dim is not None:
            lengths = private.get("_lengths")
        elif field.is_nested and field.layout == torch.jagged:
            values, offsets, lengths = field.values().detach(), field.offsets(), field.lengths()
            # torch reads the private attribute, which may be set without changing the shape
            dim = getattr(field, "_ragged_idx", None) or next(
                dim for dim, size in enumerate(field.shape) if not isinstance(size, int)
            )
        else:
            return None
        if lengths is not None:
            return None
        return cls(values if dim == 1 else values.movedim(dim - 1, 0), offsets, dim)


GAPS = (
    "is nested, with gaps between its rows or the strided layout; expected torch.jagged without gaps. Rebuild it "
    "from its rows [j, *F]: torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)."
)
"""Of a field that is no Jagged."""


def offsets_of(field: Any) -> Tensor:
    """The offsets of a jagged tensor, int64 [B + 1]."""
    return field.offsets()


def values_of(field: Any) -> Tensor:
    """The values [T, *F] of a jagged tensor, with their gradients."""
    return all_values([field])[0]


def all_values(fields: Sequence[Any]) -> list[Tensor]:
    """`values_of` for several fields."""
    jagged = [Jagged.of(field) for field in fields]
    if torch.compiler.is_compiling() or requires_grad(fields):
        return [
            field.values() if own is None or own.dim == 1 else field.values().movedim(own.dim - 1, 0)
            for field, own in zip(fields, jagged, strict=True)
        ]
    return [field.values() if own is None else own.values for field, own in zip(fields, jagged, strict=True)]


def requires_grad(fields: Iterable[Tensor]) -> bool:
    """Whether gradients are recorded and any of these tensors requires them. Each attribute of a jagged tensor takes
    microseconds if torch looks for a method of its class."""
    if not torch.is_grad_enabled():
        return False
    with DisableTorchFunctionSubclass():
        return any(field.requires_grad for field in fields)


def to_host(tensors: Sequence[Tensor]) -> list[IntArray]:
    """Integer tensors [n] as int64 arrays on the host, with one synchronisation for all of a device."""
    arrays: dict[int, IntArray] = {}
    away: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            arrays[place] = np.ascontiguousarray(tensor.to(torch.int64).numpy())  # the core reads them
        else:
            away.setdefault(tensor.device, []).append(place)
    for places in away.values():
        parts = [tensors[place].to(torch.int64) for place in places]
        line = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
        ends = np.cumsum([part.numel() for part in parts])
        arrays.update(zip(places, np.split(line, ends[:-1]), strict=True))
    return [arrays[place] for place in range(len(tensors))]


def _shares(field: Tensor, layout: RowLayout) -> bool:
    return layout.__dict__.get("offsets") is offsets_of(field)


def host_offsets(field: Tensor, *layouts: RowLayout | None) -> IntArray:
    """The offsets of a field on the host, int64 [B + 1]. No synchronisation if they are the offsets of one of
    `layouts`."""
    for layout in layouts:
        if layout is not None and _shares(field, layout):
            return layout.row_offsets
    return to_host([offsets_of(field)])[0]


def check_lengths(fields: Mapping[Path, tuple[Tensor, RowLayout]], call: str, remedy: str) -> None:
    """Raises LayoutError unless each jagged field has the row lengths of its layout. One synchronisation on CUDA if any
    field does not share the offsets of its layout."""
    apart: dict[tuple[int, int], tuple[Path, Tensor, RowLayout]] = {}
    for path, (field, layout) in fields.items():
        own = Jagged.of(field)
        if own is None or own.dim != 1:
            raise LayoutError(
                f'{call}: field "{show(path)}" is nested, but not jagged along dim 1 without gaps; expected such a '
                f"tensor. {remedy}"
            )
        if not _shares(field, layout):
            offsets = offsets_of(field)
            apart.setdefault((id(offsets), id(layout)), (path, offsets, layout))
    on_host = to_host([offsets for _, offsets, _ in apart.values()])
    for (path, _, layout), offsets in zip(apart.values(), on_host, strict=True):
        if not np.array_equal(offsets, layout.row_offsets):
            lengths = np.diff(offsets)
            raise LayoutError(
                f'{call}: field "{show(path)}" has {lengths.size} rows of {int(lengths.sum())} tokens; its layout has '
                f"{layout.num_rows} rows of {layout.num_tokens} tokens, or the rows differ in length. {remedy}"
            )
