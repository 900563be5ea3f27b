"""nest_batch_by_mask and unnest_batch_by_mask, against naive row loops."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
from typing import Any

import fuzz_nested
import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import assert_same_batch, assert_same_object, assert_same_tensor
from samples import PAD, PROMPT, RESPONSE, ROWS, jagged, joined, parts_of, registry_of, rollout, rows_of, under
from strategies import Case, batches, row_ops, rows_after
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from maskpack import (
    EDGE,
    PER_ROW,
    RL_FIELDS,
    ZERO,
    MaskNestingRegistry,
    MaskNestingSpec,
    PackedBatch,
    compress,
    decompress,
    nest_batch_by_mask,
    select_and_pad_to_response,
    unnest_batch_by_mask,
)
from maskpack import (
    unnest_batch_by_mask as unnest,
)
from maskpack.core.bits import words
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO
from maskpack.errors import CoverageError, LayoutError, LossyPadError, MaskpackError, MaskpackWarning, RegistryError
from maskpack.nesting import cat, plan, read, take
from maskpack.nesting.check import COVERAGE, check
from maskpack.nesting.schema import LAYOUTS

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def entry(batch: TensorDictBase, path: tuple[str, ...]) -> Any:
    for name in path:
        batch = batch.get(name)
    return batch


def entries(batch: TensorDictBase, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every tensor and object of a batch but LAYOUTS, by path."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in batch.items():
        path = (*prefix, name)
        if path == (LAYOUTS,):
            continue
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack | NonTensorData):
            found.update(entries(value, path))
        else:
            found[path] = value
    return found


def cached_bounds(x: torch.Tensor) -> tuple[int, int]:
    """Min and max row length as the tensor itself holds them: set, not computed when asked."""
    held = x._metadata_cache
    assert {"min_seqlen", "max_seqlen"} <= set(held), f"cached: {sorted(held)}"
    return x._get_min_seqlen(), x._get_max_seqlen()


# -------------------------------------------------------------------- there and back


def assert_nested(nested: TensorDictBase, case: Case) -> None:
    """Jagged fields have the rows of plain loops, offsets that those of an axis share, and cached bounds."""
    assert [name for name in nested.keys() if name != LAYOUTS] == list(case.batch.keys())  # noqa: SIM118
    shared: dict[tuple[Any, ...], torch.Tensor] = {}
    for path, x in entries(case.batch).items():
        now, field = entry(nested, path), case.nested.get(path)
        if not isinstance(x, torch.Tensor):
            assert_same_object(now.tolist(), x.tolist())
        elif field is None:
            assert_same_tensor(now, x, "/".join(path))
        else:
            assert (now.layout, now.dtype, now.device) == (torch.jagged, x.dtype, x.device), path
            rows = oracle.pack_rows(x.movedim(field.ragged_dim, 1), field.mask)
            for number, (got, want) in enumerate(zip(oracle.jagged_rows(now), rows, strict=True)):
                assert_same_tensor(got, want, f"{path} row {number}")
            assert_same_tensor(now.offsets(), torch.tensor(oracle.offsets(field.mask)))
            assert now.offsets() is shared.setdefault((path[0] == "own", field.axis), now.offsets())
            lengths = oracle.lengths(field.mask)
            assert cached_bounds(now) == (min(lengths, default=0), max(lengths, default=0))


@quiet
@given(batches())
def test_round_trip_bit_for_bit(case: Case) -> None:
    """Nested, packed, and each once more from the nested form; what is given stays as it is."""
    tree = oracle.snapshot(case.batch)
    nested, packed = nest_batch_by_mask(case.batch, **case.options), compress(case.batch, **case.options)
    for options in ({"strict_mask_nesting": True}, {"pad_token_id": None}):
        for call in (nest_batch_by_mask, compress):
            with contextlib.suppress(MaskpackError):
                call(case.batch, **{**case.options, **options})
    assert oracle.snapshot(case.batch) == tree
    tree, decoded = oracle.snapshot(nested), decompress(packed, format="nested")
    for form in (nested, decoded):
        assert_nested(form, case)
    for form in (nested, decoded, nest_batch_by_mask(nested, **case.options)):
        assert_same_batch(unnest(form), case.batch)
    assert len(packed) == packed.num_rows == case.rows
    for own in (packed, compress(nested, **case.options)):
        assert_same_batch(decompress(own), case.batch)
    assert oracle.snapshot(nested) == tree


AXIS = {"attention_mask": torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]), "values": torch.tensor([[1.0, 5, 6]] * 2)}
NO_PROMPT = {"attention_mask": torch.tensor([[0, 1]]), "prompts": torch.zeros(1, 0, dtype=torch.int64)}


@quiet
@pytest.mark.parametrize(
    ("kept", "fields"),
    [
        ("values", AXIS | {"response_mask": torch.tensor([[1, 5, 5], [1, 5, 0]])}),
        ("values", AXIS | {"max_response_length": NonTensorData(3, batch_size=[2])}),
        ("response_mask", NO_PROMPT | {"responses": torch.tensor([[0, 9]]), "response_mask": torch.tensor([[1, 0]])}),
    ],
    ids=["every field beside a mask", "every field beside a number", "a mask"],
)
def test_nesting_twice_where_a_field_was_kept_dense(kept: str, fields: dict[str, Any]) -> None:
    """The layout of a dense field is then still the one that the mask gave; and a dense response_mask, beside which
    attention_mask is jagged by then, must not become the response axis instead."""
    batch = TensorDict(fields, [len(fields["attention_mask"])])
    once = nest_batch_by_mask(batch, pad_token_id=PAD)
    assert not once[kept].is_nested
    assert_same_batch(unnest(once), batch)
    assert_same_batch(unnest(nest_batch_by_mask(once, pad_token_id=PAD)), batch)
    assert_same_batch(decompress(compress(once, pad_token_id=PAD)), batch)


@quiet
@given(batches(), st.sampled_from([None, "cpu"]), st.data())
def test_named_fields(case: Case, device: Any, data: st.DataObject) -> None:
    names = list(case.batch.keys())
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if names else []
    chosen = {name: case.batch.get(name) for name in names if name in wanted or not wanted}
    own, moved = (
        TensorDict(chosen, batch_size=case.batch.batch_size, device=each)
        for each in (case.batch.device, device or case.batch.device)
    )
    assert_same_batch(unnest(nest_batch_by_mask(case.batch, **case.options), *wanted), own)
    packed = compress(case.batch, **case.options)
    assert_same_batch(decompress(packed, *wanted, device=device), moved)
    assert_same_batch(unnest(decompress(packed, *wanted, format="nested", device=device)), moved)


@quiet
@given(batches())
def test_unchecked_pads_are_exact_without_non_pads(case: Case) -> None:
    if case.lossy:
        return
    nested = unnest(nest_batch_by_mask(case.batch, **case.options, verify=False))
    packed = decompress(compress(case.batch, **case.options, verify=False))
    for path, field in case.nested.items():
        for got in (nested, packed) if field.trusted else ():
            assert_same_tensor(entry(got, path), entry(case.batch, path), "/".join(path))


@quiet
@given(batches())
def test_plain_torch_finds_the_pads_that_the_core_finds(case: Case) -> None:
    """What a device without kernels does, on the host."""
    want = nest_batch_by_mask(case.batch, **case.options)
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, read):
            patch.setattr(module, "is_away", lambda x: True)
        got = nest_batch_by_mask(case.batch, **case.options)
        assert_same_batch(got.exclude(LAYOUTS), want.exclude(LAYOUTS))
        assert_same_batch(unnest(got), case.batch)


def test_round_trip_keeps_gradients() -> None:
    batch = rollout()
    batch["advantages"] = batch["advantages"].requires_grad_()
    padded = unnest(nest_batch_by_mask(batch, pad_token_id=PAD))["advantages"]
    weight = torch.arange(padded.numel(), dtype=torch.float32).view_as(padded)
    (padded * weight).sum().backward()
    assert_same_tensor(batch["advantages"].grad, weight * (batch["response_mask"] != 0))


# -------------------------------------------------------------------- jagged arithmetic


def test_nesting_again_restores_shared_offsets_and_nests_new_fields() -> None:
    batch = rollout()
    nested = pickle.loads(pickle.dumps(nest_batch_by_mask(batch, pad_token_id=PAD)))
    nested["values"] = batch["advantages"].clone()
    nested["returns"] = torch.nested.nested_tensor_from_jagged(
        nested["advantages"].values().clone(), nested["advantages"].offsets().clone()
    )
    nested["new"] = torch.arange(2.0 * len(batch)).view(-1, 2)
    again = nest_batch_by_mask(nested, pad_token_id=PAD)
    assert again["values"].is_nested
    assert again["values"].offsets() is again["advantages"].offsets()
    assert again["returns"].offsets() is again["advantages"].offsets()
    assert (again["values"] - again["advantages"]).values().abs().sum() == 0
    batch["values"] = batch["advantages"].clone()
    batch["returns"], batch["new"] = batch["advantages"].clone(), nested["new"]
    assert_same_batch(unnest(again), batch)


def test_dims_of_equal_sizes_and_rows_of_as_many_tokens() -> None:
    """A width behind a dim of its size, with gradients; and a new jagged field whose rows differ in their order from
    those of its mask."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    x = (torch.arange(27.0).reshape(3, 3, 3) * mask[:, None]).requires_grad_()
    batch = TensorDict({"m": mask, "x": x}, [3])
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", 0, ragged_dim=2), "y": MaskNestingSpec("m")}
    nested = nest_batch_by_mask(batch, registry)
    assert nested["x"].values().tolist() == [x[b, :, s].tolist() for b in range(3) for s in range(3) if mask[b, s]]
    batch["y"] = nested["y"] = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 3, 5, 5]))
    assert_same_batch(unnest(nest_batch_by_mask(nested, registry)), batch)


def test_gradients_through_rows_by_edge_and_rows_by_a_constant() -> None:
    rows, registry = [[1.0, 2.0, 0.0], [3.0, 4.0, 4.0]], registry_of(x=[0, EDGE])
    mask = torch.tensor([[True, True, False]])
    parts = [TensorDict({"m": mask, "x": torch.tensor([row])}, [1]) for row in rows]
    nested = cat([nest_batch_by_mask(part, registry) for part in parts])
    values = nested["x"].values().requires_grad_()
    nested["x"] = torch.nested.nested_tensor_from_jagged(values, nested["x"].offsets())
    padded = unnest(nested)["x"]
    assert padded.tolist() == rows
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex64])
def test_gradients_that_torch_cannot_carry_are_detached_as_the_error_says(dtype: torch.dtype) -> None:
    batch, registry = under([[1, 1, 0, 0], [1, 0, 0, 0]], x=torch.tensor([[1.0, 2, 0, 0], [5, 0, 0, 0]]).to(dtype))
    batch["x"].requires_grad_()
    assert_same_batch(decompress(compress(batch, registry=registry)), batch.detach())
    with pytest.raises(LayoutError, match="Detach it"):
        nest_batch_by_mask(batch, registry)
    with torch.no_grad():
        assert_same_batch(unnest(nest_batch_by_mask(batch, registry)).detach(), batch.detach())
    nested = nest_batch_by_mask(batch.detach(), registry)
    assert_same_batch(unnest(nested), batch.detach())
    if not dtype.is_complex:
        nested["x"] = torch.nested.nested_tensor_from_jagged(
            nested["x"].values().requires_grad_(), nested["x"].offsets()
        )
        with pytest.raises(LayoutError, match=r'unnest_batch_by_mask: field "x" is torch\.float8.* and requires grad'):
            unnest(nested)


# -------------------------------------------------------------------- operations commute


@quiet
@given(batches(home_jagged=False, dtypes=strategies.PLAIN_DTYPES), st.data())
def test_row_operations_commute(case: Case, data: st.DataObject) -> None:
    ops = data.draw(row_ops(case.rows))
    nested: TensorDictBase = nest_batch_by_mask(case.batch, **case.options)
    for op in ops:
        nested = op.on_batch(nested)
    want = oracle.take_rows(case.batch, rows_after(ops, case.rows, even_chunks=False))
    got = unnest(nested)
    assert got.batch_size == want.batch_size
    for path, value in entries(want).items():
        if isinstance(value, torch.Tensor):
            assert_same_tensor(entry(got, path), value, "/".join(path))
        else:
            assert_same_object(entry(got, path).tolist(), value.tolist(), "/".join(path))
    assert list(got.keys()) == list(want.keys())


CASTS = {
    "float": lambda batch: batch.float(),
    "double": lambda batch: batch.double(),
    "half": lambda batch: batch.half(),
    "bfloat16": lambda batch: batch.to(torch.bfloat16),
    "int": lambda batch: batch.int(),
    "int8": lambda batch: batch.to(torch.int8),
    "complex64": lambda batch: batch.to(torch.complex64),
    "complex128": lambda batch: batch.to(torch.complex128),
    "float, then complex64": lambda batch: batch.float().to(torch.complex64),
    "cpu": lambda batch: batch.to("cpu"),
}


@quiet
@pytest.mark.parametrize("name", CASTS)
@given(case=batches(finite=True, home_jagged=False, generic=False))
def test_casts_commute(name: str, case: Case) -> None:
    cast = CASTS[name]
    assert_same_batch(unnest(cast(nest_batch_by_mask(case.batch, **case.options))), cast(case.batch))


COPIES = {
    "clone": lambda batch: batch.clone(),
    "clone, not recursive": lambda batch: batch.clone(False),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "consolidate": lambda batch: batch.consolidate(),
    "lock_": lambda batch: batch.clone(False).lock_(),
    "contiguous": lambda batch: batch.contiguous(),
}


@quiet
@pytest.mark.parametrize("name", COPIES)
@given(case=batches(home_jagged=False, min_rows=1, dtypes=strategies.PLAIN_DTYPES, device=False))
def test_copies_restore(name: str, case: Case) -> None:
    assert_same_batch(unnest(COPIES[name](nest_batch_by_mask(case.batch, **case.options))), case.batch)


# -------------------------------------------------------------------- LAYOUTS


def line_by_loops(batch: TensorDict, row: int, pads: dict[str, Any], masks: dict[str, oracle.Mask]) -> list[list[int]]:
    """A row of the pads, a record for each field, and of the signs, whose first position is in the highest bit."""
    line, more = [0xA5], list[int]()
    for name, pad in sorted(pads.items()):
        places = [place for place, valid in enumerate(masks[name][row]) if not valid]
        word = oracle.pad_cell(0 if pad in (EDGE, PER_ROW, ANY_ZERO) else pad, batch[name].dtype)
        if pad is PER_ROW and places:
            word = oracle.cells(batch[name])[row, places[0]]
        signs = bytearray(-(-len(masks[name][row]) // 8))
        for place in places if pad is ANY_ZERO else ():
            signs[place // 8] |= bool(torch.signbit(batch[name][row, place])) << 7 - place % 8
        line += [2 if any(signs) else int(pad is EDGE), *word.tobytes()]
        more += signs if any(signs) else b""
    return [line, more]


@quiet
@pytest.mark.parametrize("width", [1, 8, 19])
@given(data=st.data())
def test_layouts_are_what_plain_loops_write(width: int, data: st.DataObject) -> None:
    """The bits of two masks, and a record a row of a field of every pad; one bit more or less in a mask is refused."""
    pads = {"m": 0, "n": 0, "e": EDGE, "z": ANY_ZERO, "c": 3, "r": PER_ROW, "y": ANY_ZERO}
    masks = {"m": data.draw(strategies.patterns(width=width))}
    rows, rng = len(masks["m"]), np.random.default_rng(data.draw(st.integers(0, 99)))
    masks["n"] = data.draw(strategies.patterns(rows=rows, width=width))
    batch = TensorDict({name: oracle.mask_tensor(mask, width) for name, mask in masks.items()}, [rows])
    registry = {name: MaskNestingSpec(name) for name in masks}
    for name in list(pads)[2:]:
        axis = "m" if name == "z" else "n"
        own = strategies.values(rng, (oracle.offsets(masks[axis])[-1],), torch.float32)
        batch[name], masks[name] = strategies.padded(rng, own, masks[axis], width, pads[name]), masks[axis]
        registry[name] = MaskNestingSpec(axis, pads[name])
    nested = nest_batch_by_mask(batch, registry)
    said = {" ".join(key.split()[::2]): value for key, value in nested[LAYOUTS].items()}  # without the digest
    assert list(said) == ["mask m", "mask n", "pads", "types", "signs"]
    for name in ("m", "n"):
        bits = np.packbits(np.array(masks[name], bool).reshape(rows, width), axis=1, bitorder="little")
        assert_same_tensor(said[f"mask {name}"], torch.from_numpy(bits))
    lines = zip(said["pads"].tolist(), oracle.jagged_rows(said["signs"]), strict=True)
    want = [line_by_loops(batch, row, pads, masks) for row in range(rows)]
    assert [[line, signs.tolist()] for line, signs in lines] == want
    for row, place in itertools.product(range(rows), range(width)):
        again = nested.clone()
        key = next(key for key in again[LAYOUTS].keys() if key.endswith(" n"))  # noqa: SIM118
        again[LAYOUTS][key][row, place // 8] ^= 1 << place % 8
        with pytest.raises(LayoutError, match=r'field "n" .* its layout has'):
            unnest_batch_by_mask(again)


# -------------------------------------------------------------------- never in silence


def replaced(batch: TensorDict) -> TensorDict:
    batch = batch.clone()
    rows = [torch.zeros(length % 4) for length in range(len(batch))]
    batch["advantages"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return batch


def added(batch: TensorDict) -> TensorDict:
    batch = batch.clone()
    batch["new"] = torch.nested.nested_tensor_from_jagged(
        batch["advantages"].values(), batch["advantages"].offsets().clone()
    )
    return batch


def reordered(batch: TensorDict) -> TensorDict:
    """One field follows a new order of rows, the others and LAYOUTS do not."""
    batch = batch.clone()
    batch["advantages"] = rows_of(batch, list(range(len(batch)))[::-1])["advantages"]
    return batch


def with_entry(kind: str, change: Any = None) -> Any:
    """Changes an entry of LAYOUTS, or drops it."""

    def changed(batch: TensorDict) -> TensorDict:
        entries = dict(batch[LAYOUTS].items())
        key = next((key for key in entries if key.startswith(kind)), kind)
        held = entries.pop(key, None)
        entries |= {} if change is None else {key: change(held)}
        return batch.clone().set(LAYOUTS, TensorDict(entries, batch.batch_size))

    return changed


def with_record(at: int, value: int) -> Any:
    def change(lines: torch.Tensor) -> torch.Tensor:
        lines = lines.clone()
        lines[3, at] = value
        return lines

    return with_entry("pads", change)


def as_object(batch: TensorDict) -> TensorDict:
    return batch.clone().set("advantages", NonTensorData("gone", batch_size=[len(batch)]))


OBJECT = NonTensorData(1, batch_size=[len(ROWS)])
CHANGED_LAYOUTS = {
    "integer index": (lambda batch: batch[0], "maskpack.nesting.take(batch, [i])"),
    "unbind": (lambda batch: batch.unbind(0)[1], "maskpack.nesting.take(batch, [i])"),
    "add": (lambda batch: batch.apply(lambda x: x + 1), "changed, by arithmetic"),
    "double": (lambda batch: batch.apply(lambda x: x * 2), "changed, by arithmetic"),
    "zeros": (lambda batch: batch.apply(torch.zeros_like), "changed, by arithmetic"),
    "clamp": (lambda batch: batch.apply(lambda x: x.clamp(max=1)), "changed, by arithmetic"),
    "bool": (lambda batch: batch.bool(), "a cast that loses bytes"),
    "float8": (lambda batch: batch.to(torch.float8_e5m2), "a cast that loses bytes"),
    "other row lengths": (replaced, '"advantages"'),
    "other row order": (reordered, '"advantages"'),
    "no mask": (with_entry("mask"), 'the mask of layout "sequence" is missing'),
    "no pads": (with_entry("pads"), "the pads of rows are missing"),
    "no types": (with_entry("types"), '"_maskpack" was not written by nest_batch_by_mask'),
    "types of another kind": (with_entry("types", lambda _: OBJECT), "was not written by nest_batch_by_mask"),
    "another entry": (lambda batch: batch.clone().set(LAYOUTS, torch.ones(len(ROWS))), "was not written by"),
    "an object": (lambda batch: batch.clone().set(LAYOUTS, OBJECT), "was not written by"),
    "an entry more": (with_entry("more", lambda _: torch.ones(len(ROWS))), "no longer a line for each row"),
    "a mask of no bits": (with_entry("mask", lambda bits: bits[:, :0]), 'layout "sequence" is (7, 0) bytes'),
    "a mask of other rows": (with_entry("mask", lambda bits: bits.flip(0)), "its layout has"),
    "a mask of no rows": (with_entry("mask", lambda bits: bits[:, 0]), "no longer a line for each row"),
    "a mask of fractions": (with_entry("mask", lambda bits: bits + 0.5), " sequence of the batch changed"),
    "pads that are an object": (with_entry("pads", lambda _: OBJECT), "the pads of rows of the batch changed"),
    "pads that are cut": (with_entry("pads", lambda line: line[:, 1:]), "the pads of rows are (7, "),
    "a record without its mark": (with_record(0, 0xA4), "the pads of rows of the batch changed"),
    "a record of another kind": (with_record(1, 3), "the pads of rows of the batch changed"),
    "a record of signs that are not there": (with_record(1, 2), "the pads of rows of the batch changed"),
}
NOT_RESTORABLE = CHANGED_LAYOUTS | {
    "select drops LAYOUTS": (lambda batch: batch.select("responses"), LAYOUTS),
    "exclude drops LAYOUTS": (lambda batch: batch.exclude(LAYOUTS), LAYOUTS),
    "never nested": (lambda batch: rollout(), "not nested"),
    "field that became an object": (as_object, '"advantages" is no longer a tensor; expected a jagged tensor'),
    "jagged field added later": (added, '"new"'),
}


def result_of(nested: TensorDict, **fields: torch.Tensor) -> TensorDict:
    """Padded fields as `WorkerGroup.call(..., format="nested")` gives them."""
    batch = TensorDict(fields, batch_size=[len(nested)])
    return decompress(compress(batch, like=nested, strict_mask_nesting=True), format="nested")


@pytest.mark.parametrize("pad", [0.0, -0.0])
def test_update_with_results_of_the_same_rows(pad: float) -> None:
    batch = rollout((*ROWS[:2], *ROWS[5:])).exclude("entropys")
    nested, mask = nest_batch_by_mask(batch, pad_token_id=PAD), batch["attention_mask"][:, PROMPT:].bool()
    values = torch.arange(mask.numel(), dtype=torch.float32).view(mask.shape).masked_fill(~mask, pad)
    nested.update(result_of(nested, values=values, advantages=batch["advantages"] * 0.5))
    batch["values"], batch["advantages"] = values, batch["advantages"] * 0.5
    assert_same_batch(unnest(nested), batch)
    nested.update(result_of(nested, values=values * 3, advantages=batch["advantages"] * 2))  # the same fields
    nested.update(result_of(nested, entropys=values * 5))
    batch["values"], batch["advantages"], batch["entropys"] = values * 3, batch["advantages"] * 2, values * 5
    order = torch.tensor([2, 0, 3, 3])
    ways = {
        "whole": (nested, batch),
        "index": (rows_of(nested, order), batch[order]),
        "cat": (joined(parts_of(nested, [2, len(batch) - 2])[::-1]), torch.cat([batch[2:], batch[:2]])),
        "pickle": (pickle.loads(pickle.dumps(nested)), batch),
        "again": (nest_batch_by_mask(nested, pad_token_id=PAD), batch),
    }
    for seen, wanted in ways.values():
        assert_same_batch(unnest(seen), wanted)
        assert_same_batch(decompress(compress(seen, pad_token_id=PAD)), wanted)
    assert_same_batch(unnest(nested, "values"), batch.select("values"))
    assert_same_batch(select_and_pad_to_response(nested, "values"), batch.select("values"))


M = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])


def one_field(x: torch.Tensor, pad: Any, mask: torch.Tensor = M, **more: torch.Tensor) -> tuple[TensorDict, TensorDict]:
    """A batch of "x" under "m", and the same nested. Without a pad, "x" has no mask."""
    spec = MaskNestingSpec(None) if pad is None else MaskNestingSpec("m", pad)
    batch = TensorDict({"x": x, "m": mask, **more}, [len(x)])
    return batch, nest_batch_by_mask(batch, {"x": spec, "m": MaskNestingSpec("m"), "y": MaskNestingSpec("m")})


@pytest.mark.parametrize("other", ["lengths", "places", "width", "form", "jagged"])
def test_update_with_results_of_other_rows(other: str) -> None:
    _, nested = one_field(M * 3, 0)
    x, mask, said = {
        "lengths": (M.flip(0), M.flip(0), r'"x" has 2 rows of 3 tokens; its layout has 2 .*rows differ in length'),
        "places": (M.flip(1), M.flip(1), r'layout "m" of another batch, with other .*update\(\).*\(batch\).update'),
        "width": (M[:, :3], M[:, :3], r'layout "m" of another batch, with other .*update\(\).*\(batch\).update'),
        "form": (M * 4.0, M, r'"x" was nested twice, as torch.int64 .* as torch.float32 .*update\(\).*Restore both'),
        "jagged": (jagged([M[0], M[1]]), M, r'"x" was nested twice, as .*Restore both first'),
    }[other]
    more = {"y": x} if other == "places" else {}  # as many tokens, one column further on
    result = one_field(x, 0 if other != "jagged" else None, mask, **more)[1]
    nested.update(result.exclude("x") if other in ("lengths", "places") else result)
    for call in (unnest, nest_batch_by_mask, compress):
        with pytest.raises(LayoutError, match=said):
            call(nested)


def test_jagged_fields_that_share_offsets_or_not_are_of_one_kind() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    x, y = jagged(rows), jagged(rows)
    batches = [TensorDict({"x": x, "y": other}, [2]) for other in (y, x * 2)]
    nested = [nest_batch_by_mask(batch, {}) for batch in batches]
    assert len({tuple(own[LAYOUTS].keys()) for own in nested}) == 1
    assert_same_batch(rows_of(unnest(joined(nested)), slice(0, 2)), batches[0])


@pytest.mark.parametrize("width", [5, 70])
def test_bits_of_masks_behind_their_width_mean_nothing(width: int) -> None:
    mask = torch.arange(width) < torch.tensor([[width], [2], [0]])
    batch, nested = one_field(mask * 3, 0, mask)
    key = next(key for key in nested[LAYOUTS].keys() if key.startswith("mask "))  # noqa: SIM118
    nested[LAYOUTS][key][:, -1] |= 0x80
    for restored in (unnest(nested), decompress(compress(nested)), unnest(take(nested, [2, 1, 0]))[[2, 1, 0]]):
        assert_same_batch(restored, batch)


def under_m(*pads: float) -> torch.Tensor:
    return torch.where(M.bool(), 9.0, torch.tensor(pads)[:, None])


PADDED = [
    (under_m(0.0, 0.0), 0),
    (under_m(-1.0, -1.0), -1),
    (under_m(2.0, 3.0), PER_ROW),
    (under_m(float("nan"), -0.0), PER_ROW),
    (torch.tensor([[9.0, 8.0, -0.0, 0.0], [7.0, 0.0, 0.0, -0.0]]), ANY_ZERO),
    (torch.tensor([[9.0, 8.0, 8.0, 8.0], [7.0, 7.0, 7.0, 7.0]]), EDGE),
    (torch.ones(2, 4), None),
]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(PADDED, PADDED)))
@pytest.mark.parametrize("more", [{}, {"y": M * 5}], ids=["the same fields", "more fields"])
def test_update_with_a_field_of_the_same_rows(before: Any, after: Any, more: dict[str, torch.Tensor]) -> None:
    """A batch of the same fields replaces their pads. Of one with other fields, which pads are newer nothing tells; a
    field that stays padded has none."""
    batch, nested = one_field(*before)
    other, result = one_field(*after, **more)
    nested.update(result)
    batch.update(other)
    registry = registry_of(x=[EDGE, 0, -1, ANY_ZERO, PER_ROW], y=0)
    if more and before is not after and None not in (before[1], after[1]):
        for call in (unnest, nest_batch_by_mask, compress):
            with pytest.raises(LayoutError, match=r'"x" was nested twice, .* update\(\) replaced .* equal pads'):
                call(nested)
        return
    again = nest_batch_by_mask(nested, registry), decompress(compress(nested, registry=registry), format="nested")
    for way in (nested, pickle.loads(pickle.dumps(nested)), *again):
        assert_same_batch(unnest(way), batch)
    order = [1, 0, 1]
    assert_same_batch(unnest(rows_of(joined([nested, nested]), order)), oracle.take_rows(batch, order))


def test_update_with_all_fields_in_another_order_replaces_them() -> None:
    registry, mask = {name: MaskNestingSpec("m") for name in "mxy"}, M.flip(0)
    batch = TensorDict({"x": M * 2, "y": M * 3, "m": M}, [2])
    other = TensorDict({"y": mask * 4, "m": mask, "x": mask * 5}, [2])
    nested = nest_batch_by_mask(batch, registry)
    nested.update(nest_batch_by_mask(other, registry))
    assert_same_batch(unnest(nested), batch.update(other))


def test_a_field_that_was_cast_has_its_pad_in_the_new_dtype() -> None:
    """300 is 44 in eight bits, as for a padded tensor that is cast."""
    batch, nested = one_field(torch.where(M.bool(), M * 7, 300), 300)
    for own in (batch, nested):
        own["x"] = own["x"].to(torch.int8)
    registry = registry_of(x=300)
    assert_same_batch(unnest(nested), batch)
    assert_same_batch(unnest(nest_batch_by_mask(nested, registry)), batch)
    assert_same_batch(decompress(compress(nested, registry=registry)), batch)


@pytest.mark.parametrize("row", [0, 2, -1, -4])
def test_one_row_is_taken_as_the_error_says(row: int) -> None:
    nested = nest_batch_by_mask(rollout(), pad_token_id=PAD)
    with pytest.raises(LayoutError, match=r"Take one row with a list: maskpack\.nesting\.take\(batch, \[i\]\)"):
        unnest(nested[row])
    assert_same_batch(unnest(take(nested, [row])), unnest(nested)[[row]])


@pytest.mark.parametrize("name", NOT_RESTORABLE)
def test_what_cannot_be_restored_is_named(name: str) -> None:
    change, part = NOT_RESTORABLE[name]
    batch = change(nest_batch_by_mask(rollout(), pad_token_id=PAD))
    tree = oracle.snapshot(batch)
    with pytest.raises(LayoutError) as caught:
        unnest_batch_by_mask(batch)
    message = str(caught.value)
    assert message.startswith("unnest_batch_by_mask: ")
    assert part in message
    for call in (nest_batch_by_mask, compress) if name in CHANGED_LAYOUTS else ():
        with pytest.raises(LayoutError):
            call(batch, pad_token_id=PAD)
    assert oracle.snapshot(batch) == tree


J = torch.nested.nested_tensor_from_jagged
NO_FIELD = {
    "fewer values": lambda x: J(x.values()[:-1].clone(), x.offsets()),
    "more dims": lambda x: J(x.values()[:, None].repeat(1, 2), x.offsets()),
    "complex of more dims": lambda x: J(x.values()[:, None].repeat(1, 2).to(torch.complex64), x.offsets()),
}


@pytest.mark.parametrize("change", NO_FIELD)
def test_values_that_do_not_fit_their_pads_are_refused(change: str) -> None:
    """The signs of zeros are of one number a token."""
    _, nested = one_field(torch.tensor([[9.0, 8.0, -0.0, 0.0], [7.0, 0.0, 0.0, -0.0]]), ANY_ZERO)
    nested["x"] = NO_FIELD[change](nested["x"])
    for call in (unnest, nest_batch_by_mask, compress):
        with pytest.raises(LayoutError, match='"x"'):
            call(nested, **({} if call is unnest else {"registry": registry_of(x=0)}))


@pytest.mark.parametrize("dims", [[2], [2, 4], [2, 5], []])
def test_a_sub_batch_with_other_dims_behind_its_rows_is_refused(dims: list[int]) -> None:
    sub = TensorDict({"y": torch.ones(2, 3, 2)}, [2, 3])
    nested = nest_batch_by_mask(TensorDict({"m": M, "x": M * 3, "sub": sub}, [2]), registry_of(x=0))
    nested["sub"] = TensorDict({"y": torch.ones(*dims, 2)}, dims[:1])
    for call in (unnest, nest_batch_by_mask, compress):
        with pytest.raises(LayoutError, match=r'"sub.*, in a batch that was nested with \(2, 3\)'):
            call(nested)


@pytest.mark.parametrize("seed", range(0, 200, 100))
def test_changed_batches_are_restored_soundly_or_refused(seed: int) -> None:
    for own in range(seed, seed + 100):
        fuzz_nested.play(own)


def test_named_fields_skip_what_cannot_be_restored() -> None:
    batch = rollout()
    got = unnest(added(nest_batch_by_mask(batch, pad_token_id=PAD)), "advantages", "uid")
    assert_same_batch(got, batch.select("advantages", "uid"))


# -------------------------------------------------------------------- values under the mask


@quiet
@given(batches(objects=False))
def test_non_pads_are_found_exactly(case: Case) -> None:
    found = check(case.batch, case.registry, pad_token_id=case.pad_token_id)
    reported = {one.path for one in found if one.kind in COVERAGE}
    assert reported == case.loose
    wrong = case.lossy or case.loose
    allowed = {path: MaskNestingSpec(None) for path in case.loose}
    options = {**case.options, "registry": MaskNestingRegistry({}) | case.registry | allowed}
    if wrong:
        tree = oracle.snapshot(case.batch)
        with pytest.raises(LossyPadError if case.lossy else CoverageError) as caught:
            nest_batch_by_mask(case.batch, **case.options, strict_mask_nesting=True)
        named = {line.split('"')[1] for line in str(caught.value).splitlines() if line.count('"') > 1}
        assert named >= {"/".join(path) for path in wrong}
        assert oracle.snapshot(case.batch) == tree
    nest_batch_by_mask(case.batch, **options, strict_mask_nesting=True)


@pytest.mark.parametrize("call", ["compress", "nest"])
def test_pads_that_are_not_checked_are_the_first_of_the_registry(call: str) -> None:
    batch, registry = under([[1, 1, 0], [1, 0, 0]], {"x": [0, 1]}, x=torch.tensor([[7, 8, 1], [9, 1, 1]]))
    for verify, pad in ((True, 1), (False, 0)):
        if call == "nest":
            restored = unnest(nest_batch_by_mask(batch, registry, verify=verify))
        else:
            restored = decompress(compress(batch, registry=registry, verify=verify))
        assert restored["x"].tolist() == [[7, 8, pad], [9, pad, pad]]


JOINS = {"torch": joined, "maskpack": cat}


@quiet
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize(
    "dtype", [*strategies.FLOATS, torch.int64, torch.bool, torch.complex128, torch.uint16, torch.float8_e5m2], ids=str
)
@given(data=st.data())
def test_batches_of_other_pads_join(dtype: torch.dtype, join: str, data: st.DataObject) -> None:
    """A constant, EDGE, a constant a row, signs of zero, empty rows, no rows, no width, one number a token or more."""
    rng, width = data.draw(strategies.generators()), data.draw(st.integers(0, 9))
    more = data.draw(st.sampled_from([(), (), (2,)]))
    pads = [0, 1, EDGE, *([SIGNED_ZERO, ANY_ZERO] if dtype in strategies.FLOATS else []), PER_ROW]
    registry, parts = registry_of(x=pads), list[TensorDict]()
    for _ in range(data.draw(st.integers(1, 3))):
        mask = data.draw(strategies.patterns(rows=data.draw(st.integers(0, 3)), width=width))
        values = strategies.values(rng, (oracle.offsets(mask)[-1], *more), dtype)
        x = strategies.padded(rng, values, mask, width, data.draw(st.sampled_from(pads)))
        parts.append(TensorDict({"m": oracle.mask_tensor(mask, width), "x": x}, [len(mask)]))
    nested = [nest_batch_by_mask(part, registry, strict_mask_nesting=True) for part in parts]
    fields = [np.concatenate([oracle.cells(part[name]) for part in parts]) for name in ("m", "x")]
    whole = TensorDict({"m": oracle.from_cells(fields[0], torch.bool), "x": oracle.from_cells(fields[1], dtype)})
    whole.batch_size = [len(fields[0])]
    seen = JOINS[join](nested)
    assert_same_batch(unnest(seen), whole)
    order = rng.integers(0, len(whole), 4 if len(whole) else 0).tolist()
    want = oracle.take_rows(whole, order)
    taken = take(seen, order)
    packed = compress(taken, registry=registry)
    for way in (taken, nest_batch_by_mask(taken, registry), decompress(packed, format="nested")):
        assert_same_batch(unnest(way), want)
    if dtype.itemsize > 1 and not dtype.is_complex:
        assert_same_batch(unnest(taken.half()), want.half())


@pytest.mark.parametrize("sizes", [(PROMPT, RESPONSE + 1), (PROMPT + 1, RESPONSE), (PROMPT + 1, RESPONSE - 1)], ids=str)
def test_batches_of_other_widths_do_not_join(sizes: tuple[int, int]) -> None:
    parts = [rollout(((2, 3), (1, 1)), *own, objects=False) for own in ((PROMPT, RESPONSE), sizes)]
    nested = [nest_batch_by_mask(part, pad_token_id=PAD) for part in parts]
    with pytest.raises(LayoutError, match=r"cat: a batch was nested with other padded widths.*PackedBatch\.cat"):
        cat(nested)
    packed = PackedBatch.cat([compress(part, pad_token_id=PAD) for part in nested])  # what the error says
    assert_same_batch(
        decompress(packed), decompress(PackedBatch.cat([compress(part, pad_token_id=PAD) for part in parts]))
    )


@pytest.mark.parametrize("join", JOINS)
def test_batches_that_are_split_elsewhere_do_not_join(join: str) -> None:
    """Their masks are alike, and not the place where prompts end."""

    def part(response: int) -> TensorDict:
        about = NonTensorData(response, batch_size=[2])
        batch = TensorDict({"attention_mask": M, "input_ids": M * 3, "max_response_length": about}, [2])
        return nest_batch_by_mask(batch, pad_token_id=0)

    assert_same_batch(unnest(JOINS[join]([part(3), part(3)])), torch.cat([unnest(part(3))] * 2))
    with pytest.raises((LayoutError, KeyError)):
        JOINS[join]([part(3), part(2)])


@quiet
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("names", [(None, None), ("rows", None), (None, "turn"), ("rows", "turn")], ids=str)
def test_names_of_dims_are_those_of_the_first_batch(names: tuple[Any, Any], join: str) -> None:
    def batch(*names: Any) -> TensorDict:
        sub = TensorDict({"y": torch.ones(2, 4, 3)}, [2, 4, 3], names=[*names, names[1] and "last"])
        return TensorDict({"m": M, "x": M * 3, "sub": sub}, [2, 4], names=list(names))

    def names_of(batch: TensorDict) -> list[Any]:
        return [batch.names, batch["sub"].names]

    registry = registry_of(x=0)
    for parts in ([batch(*names)], [batch(*names), batch(None, None)], [batch(*names), batch("a", "b")]):
        seen = unnest(JOINS[join]([nest_batch_by_mask(part, registry) for part in parts]))
        assert names_of(seen) == names_of(parts[0])
        assert_same_batch(seen, torch.cat([part.clone() for part in parts]))
        assert names_of(unnest(take(nest_batch_by_mask(parts[0], registry), [1]))) == names_of(parts[0])


def test_a_sub_batch_of_a_batch_without_batch_dims() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    batch = TensorDict({"sub": TensorDict({"m": mask, "x": mask * 1.5}, batch_size=[2])}, batch_size=[])
    for nested in (
        nest_batch_by_mask(batch, registry),
        decompress(compress(batch, registry=registry), format="nested"),
    ):
        assert_same_batch(unnest(nested), batch)
    plain = TensorDict({"sub": TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])}, batch_size=[])
    assert_same_batch(unnest(nest_batch_by_mask(plain, {"x": MaskNestingSpec(None)})), plain)


def test_names_with_a_slash_are_not_paths() -> None:
    """A field "a/b" and a field "b" of "a" have masks of their own, axes of their own, and rows of their own."""
    registry = {
        "a/b": MaskNestingSpec("a/m"),
        "a/m": MaskNestingSpec(None),
        ("a", "b"): MaskNestingSpec(("a", "m")),
        ("a", "m"): MaskNestingSpec(None),
    }
    one, two = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    sub = TensorDict({"m": two, "b": two * 7}, [2])
    batch = TensorDict({"a/m": one, "a/b": one * 5, "a": sub}, [2])
    nested = nest_batch_by_mask(batch, registry)
    assert nested["a/b"].values().tolist() == [5] * 3
    assert nested["a", "b"].values().tolist() == [7] * 4
    assert_same_batch(unnest(nested), batch)
    packed = compress(batch, registry=registry)
    assert len(packed.layouts) == 2
    assert_same_batch(decompress(packed[[1, 0]]), oracle.take_rows(batch, [1, 0]))
    rows = [torch.ones(1), torch.ones(3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    other = torch.nested.nested_tensor(rows[::-1], layout=torch.jagged)
    batch = TensorDict({"a/b": jagged, "a": TensorDict({"b": other}, [2])}, [2])
    assert_same_batch(decompress(compress(batch)), batch)


# -------------------------------------------------------------------- coverage


@pytest.mark.parametrize("dims", [[2, 3], [2], [2, 3, 4]])
@pytest.mark.parametrize("call", [compress, nest_batch_by_mask])
def test_a_batch_of_groups_is_one_of_rows_as_the_error_says(call: Any, dims: list[int]) -> None:
    batch = TensorDict({"attention_mask": torch.ones(2, 3, 4), "x": torch.ones(2, 3, 4)}, dims)
    first = "" if dims == [2, 3] else "batch.batch_size = [2, 3], then "
    text = (
        f'"attention_mask" is (2, 3, 4); expected (B, width). Make a row of each line of the mask: {first}batch.reshape'
    )
    with pytest.raises(LayoutError, match=re.escape(text)):
        call(batch)
    back = decompress if call is compress else unnest_batch_by_mask
    batch.batch_size = [2, 3]
    assert_same_batch(back(call(batch.reshape(-1))).reshape(2, 3), batch)
    four = TensorDict({"attention_mask": torch.ones(2, 1, 4, 4)}, [2])
    with pytest.raises(
        LayoutError, match=r"\(2, 1, 4, 4\); expected \(B, width\). Give one entry per row and position"
    ):
        call(four)


def test_missing_mask_is_reported() -> None:
    batch = TensorDict({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, batch_size=[2])
    with pytest.raises(CoverageError, match='nothing in the batch gives its mask "sequence"'):
        nest_batch_by_mask(batch, pad_token_id=PAD, strict_mask_nesting=True)
    with pytest.warns(MaskpackWarning, match='nothing in the batch gives its mask "sequence"'):
        assert_same_batch(unnest(nest_batch_by_mask(batch, pad_token_id=PAD)), batch)
    registry = RL_FIELDS | {"input_ids": MaskNestingSpec(["own", "response"])}
    with pytest.raises(CoverageError, match='its mask "own" or "response", computed from own, attention_mask'):
        nest_batch_by_mask(batch, registry, strict_mask_nesting=True)


# -------------------------------------------------------------------- axes


@example(mask=[[True, False, True, False, False, True, False]], seed=1)
@given(mask=strategies.patterns(), seed=st.integers(0, 999))
def test_edge_non_pads_are_found_wherever_they_are(mask: oracle.Mask, seed: int) -> None:
    """Every single change under the mask is seen, also between two runs and in empty rows."""
    rng = np.random.default_rng(seed)
    width = len(mask[0]) if mask else 0
    values = torch.from_numpy(rng.integers(0, 2, oracle.offsets(mask)[-1]))
    clean = oracle.unpack(values, mask, width, oracle.EDGE)
    registry = {"p": MaskNestingSpec("m", EDGE), "m": MaskNestingSpec("m")}
    batch = TensorDict({"m": oracle.mask_tensor(mask, width), "p": clean}, batch_size=[len(mask)])
    assert nest_batch_by_mask(batch, registry, strict_mask_nesting=True)["p"].is_nested
    for row, line in enumerate(mask):
        for place, real in enumerate(line):
            if real:
                continue
            dirty = batch.clone()
            dirty["p"][row, place] ^= 1
            with pytest.raises(LossyPadError, match=rf'"p" holds {int(dirty["p"][row, place])} at \({row}, {place}\)'):
                nest_batch_by_mask(dirty, registry, strict_mask_nesting=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_pad_zero_is_one_number_in_dtypes_whose_signs_it_does_not_keep(dtype: torch.dtype) -> None:
    x = torch.ones(1, 3).to(dtype)
    words(x)[0, 2] = words(torch.tensor(-0.0, dtype=torch.float64).to(dtype).view(1))[0]
    batch, registry = under([[1, 1, 0]], {"x": ZERO}, x=x)
    for call in (nest_batch_by_mask, compress):
        with pytest.raises(LossyPadError, match=r'field "x" holds .* at \(0, 2\)'):
            call(batch, registry=registry, strict_mask_nesting=True)
        assert_same_batch(unnest(nest_batch_by_mask(batch, registry)), batch)


def test_a_batch_without_batch_dims_keeps_the_signs_of_its_zeros() -> None:
    mask = torch.arange(16) < torch.tensor([[3], [9]])
    x = torch.where(mask, 1.0, torch.tensor([[-0.0, 0.0] * 8]))
    batch = TensorDict({"m": mask, "x": x}, [])
    registry = {"m": ("m", 0), "x": ("m", ZERO)}
    nested = nest_batch_by_mask(batch, registry)
    for again in (nested, nest_batch_by_mask(nested, registry)):
        assert_same_batch(unnest(again), batch)
    assert_same_batch(decompress(compress(nested, registry=registry)), batch)


@pytest.mark.parametrize("pad", [1000, -448.5])
def test_a_pad_beyond_the_numbers_of_its_dtype_is_not_its_largest_one(pad: float) -> None:
    batch, registry = under([[1, 0]], {"x": pad}, x=torch.full((1, 2), 448.0).to(torch.float8_e4m3fn))
    with pytest.raises(RegistryError, match="does not fit that dtype"):
        nest_batch_by_mask(batch, registry)


# -------------------------------------------------------------------- one pad a row

MIXED = "A row mixes 0.0 and -0.0, which the pad ZERO takes in fields with"


@pytest.mark.parametrize(
    ("pads", "given", "remedy"),
    [
        ([0.0, 0.0], 0, ""),
        ([-0.0, -0.0], 0, "0.0 and -0.0 differ in their bits: the pad ZERO takes both"),
        ([0.0, 0.0], -0.0, "the pad ZERO takes both"),
        ([-0.0, -0.0], [0, SIGNED_ZERO], ""),
        ([0.0, -0.0], "several", MIXED),
        ([-0.0, 0.0], "several", MIXED),
        ([-0.0, 0.0], ZERO, ""),
        ([-0.0, 1.0], ZERO, "holds 1.0 at (0, 2)"),
        ([7.0, 7.0], 0, "holds 7.0 at (0, 1)"),
    ],
)
def test_the_message_names_the_pad_that_takes_these_zeros(pads: list[float], given: Any, remedy: str) -> None:
    x = torch.tensor([[2.0, *pads]])
    x, given = (torch.stack([x, x], -1), ZERO) if given == "several" else (x, given)
    batch, registry = under([[1, 0, 0]], {"x": given}, x=x)
    if remedy:
        with pytest.raises(LossyPadError) as caught:
            nest_batch_by_mask(batch, registry, strict_mask_nesting=True)
        assert remedy in str(caught.value)
        assert ("pad ZERO takes" in str(caught.value)) == ("holds" not in remedy)
        named = "ZERO" if given is ZERO else repr(given)
        assert f"expected its pad {named} there" in str(caught.value)
    else:
        assert_same_batch(unnest(nest_batch_by_mask(batch, registry, strict_mask_nesting=True)), batch)
