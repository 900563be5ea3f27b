"""Encoding of a batch: on the host as it is read, on a GPU after that.

on the host   origins, jobs --> make_layouts --> encode: pads verified, values gathered and encoded --> table
on a device   a plan of kernels, if they encoded such a batch before (cuda/device_plan.py)
else          read --> values, pads --> kernels, and `of_values` for what they do not encode --> table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from maskpack.core import abi, native
from maskpack.core.bits import host_words, odd_bools, odd_bools_error
from maskpack.core.keys import show
from maskpack.errors import LayoutError
from maskpack.layout.row_layout import RowLayout, anchored, core_layout
from maskpack.nesting.read import Opened, Read, read, with_kept
from maskpack.nesting.schema import Schema
from maskpack.packed.cuda.device_plan import DevicePlan
from maskpack.packed.cuda.encode import OnDevice, device_of, encode_on_device, learn_forms
from maskpack.packed.table import (
    GIVEN,
    UNDER_MASK,
    Done,
    Table,
    check_memory,
    device_plans,
    done_jobs,
    merge,
    of_values,
    recall,
    wholes_first,
)

(_RESULT,) = native.places_in(abi.JOB, "result")
_SPARE = 1 << 15
"""Bytes of a body that is a little larger than the last."""


def encoded_batch(opened: Opened) -> tuple[Table, Schema]:
    """The table and the schema of a batch. Raises as `read`; LayoutError also for sparse tensors."""
    plan, seen = opened.plan, opened.seen
    for form, x in zip(plan.forms, seen.tensors, strict=True) if seen.signature is None else ():
        if x is None and form.dtype is not None:
            raise LayoutError(
                f'compress: field "{show(form.path)}" has the memory layout {seen.entries[form.path].layout}; expected '
                "strided or jagged. Convert it with to_dense(), or leave it out."
            )
    by_kernels = None if seen.signature is None or plan.host is not None else device_plans.get(seen.signature)
    found = _by_core(opened) if by_kernels is None else by_kernels.encoded(seen, opened.rows)
    return _of_read(read(opened)) if found is None else found


def _by_core(opened: Opened) -> tuple[Table, Schema] | None:
    """By the core; None for a batch of which some tensors are on a device, or one that is to be looked at again."""
    host, seen, rows, given = opened.plan.host, opened.seen, opened.rows, opened.given
    nested = {} if host is None else opened.pads_of_nested()
    if host is None or any(form.layout not in given for form in opened.plan.forms if form.path in nested):
        return None
    opened.check_jagged(given)
    layouts = native.layout_rows([core_layout(layout) for layout in given.values()])
    key = host.table, rows.bit_length(), False
    before = done_jobs.get(key) or Done(None, None, None, 0, native.SPANS * rows)
    known = before.line if before.host is host else None
    line, origins, jobs, held = host.located(seen, rows, layouts, host.line if known is None else known)
    made = native.make_layouts(origins, host.cuts, jobs, rows, before.spans, rows * host.mask_bytes)
    if made is None:
        return None
    if known is None:
        recall(jobs, before)
    lines = native.numbers_of(jobs)
    for place, form in zip(host.table.order.tolist(), host.forms, strict=True) if nested else ():
        if form.path in nested:
            lines[place, GIVEN] = nested[form.path].place
    stored, nbytes = native.copied(host.stored), sum([x.nbytes for x in seen.tensors if x is not None])
    found = native.encode(jobs, made.table, stored, before.room, nbytes)
    del held, layouts  # not earlier: the core had their addresses
    if found is None:
        check_memory(jobs["result"])
        return None
    done_jobs.keep(key, Done(host, line, jobs, found.body.nbytes + found.body.nbytes // 4 + _SPARE, made.room))
    done, dense_rows = lines[host.table.order], opened.plan.schema.dense_rows(rows)
    pads = native.structs(np.array(done[:, UNDER_MASK], order="C"), abi.ARRAY)
    parts = host.parts.names, stored, found.entries, found.fields[host.table.order], pads, found.body
    kept = [host.forms[number].path for number, one in enumerate(done[:, _RESULT].tolist()) if one == abi.KEPT]
    schema = with_kept(opened.plan.schema, tuple(kept))
    return Table(rows, dense_rows, *parts, is_compact=True), schema


def _of_read(found: Read) -> tuple[Table, Schema]:
    """Of a batch that was read, of which a GPU encodes what it can. Its plan is remembered then."""
    opened, schema = found.opened, found.schema
    own = {form.path: x for form, x in zip(schema.forms, opened.seen.tensors, strict=True) if x is not None}
    tensors = [form for form in schema.forms if form.dtype is not None]
    layouts = _to_host(found.layouts)
    size = opened.rows, schema.dense_rows(opened.rows)
    values = {number: found.values.get(form.path, own[form.path]) for number, form in enumerate(tensors)}
    away = encode_on_device(tensors, values, found.pads, layouts, *size)
    by_device = [] if away is None else away.numbers
    rest = [number for number in range(len(tensors)) if number not in by_device]
    bits = host_words(ready := {number: values[number] for number in rest}, ready)
    odd = [] if away is None else [tensors[number].path for number in away.odd]
    odd += [tensors[at].path for at in rest if tensors[at].dtype is torch.bool and odd_bools(bits[at])]
    if odd:
        raise odd_bools_error("compress", dict.fromkeys(odd))
    if away is not None and not rest:
        plan = DevicePlan.of(found, schema)
        if plan is not None and opened.seen.signature is not None:
            device_plans.keep(opened.seen.signature, plan)
        return away.table, schema
    done = of_values(
        [tensors[number] for number in rest],
        [bits[number] for number in rest],
        layouts,
        *size,
        found.pads,
        by_kernels=device_of(values) is not None,
    )
    assert done is not None  # bools were looked at
    if away is not None:
        return _together(away, done.table, rest, len(tensors)), schema
    learn_forms(tensors, values, opened.rows, done)
    return done.table, schema


def _to_host(layouts: Mapping[str, RowLayout]) -> dict[str, RowLayout]:
    """The layouts on the host. Columns of another layout stay columns of it."""
    moved: dict[int, RowLayout] = {}
    out: dict[str, RowLayout] = {}
    for name, layout in wholes_first(layouts).items():
        whole, low = layout.__dict__.get("part_of", (None, 0))
        again = layout.device.type != "cpu" and id(whole) in moved
        own = moved[id(whole)].narrow(low, low + layout.width) if again else layout.to("cpu")
        out[name] = moved[id(layout)] = own if own.anchor == layout.anchor else anchored(own, layout.anchor)
    return out


def _together(away: OnDevice, table: Table, rest: Sequence[int], count: int) -> Table:
    """The table of all tensors, of which a device encoded some and the host the `rest`."""
    picked = {number: (0, at) for at, number in enumerate(away.numbers)}
    picked |= {number: (1, at) for at, number in enumerate(rest)}
    return merge([away.table, table], [picked[number] for number in range(count)])
