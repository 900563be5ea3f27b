"""The cases that broke other systems, a test or more for each: exact, or a named error that leaves the input alone."""

from __future__ import annotations

import contextlib
import pickle
import warnings

import pytest
import torch
from samples import (
    PAD,
    PROMPT,
    RESPONSE,
    ROWS,
    assert_same,
    field,
    freeze,
    jagged,
    joined,
    of,
    parts_of,
    response_mask,
    rollout,
    tokens,
)
from tensordict import TensorDict, TensorDictBase

import maskpack as mp
from maskpack.core import pads
from maskpack.core.pads import SIGNED_ZERO

B = len(ROWS)
DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


def nest(batch, **options):
    return mp.nest_batch_by_mask(batch, **{"pad_token_id": PAD, **options})


def compress(batch, **options):
    return mp.compress(batch, **{"pad_token_id": PAD, **options})


def both_ways(batch, **options):
    """The batch after each way there and back."""
    return {
        "nest": mp.unnest_batch_by_mask(nest(batch, **options)),
        "compress": mp.decompress(compress(batch, **options)),
        "compress, nested": mp.unnest_batch_by_mask(mp.decompress(compress(batch, **options), format="nested")),
    }


def assert_exact(batch, **options):
    """Exact both ways, without a warning, and the batch is not changed."""
    before = freeze(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mp.errors.MaskpackWarning)
        for restored in both_ways(batch, **options).values():
            assert_same(restored, batch)
    assert freeze(batch) == before


def assert_kept(batch, name, **options):
    """Exact both ways, with a warning that names the field."""
    before = freeze(batch)
    with pytest.warns(mp.errors.MaskpackWarning, match=f'"{name}"'):
        restored = both_ways(batch, **options)
    for out in restored.values():
        assert_same(out, batch)
    assert freeze(batch) == before


def assert_refused(batch, error, match, **options):
    """Both ways raise the named error, and the batch is not changed."""
    before = freeze(batch)
    with pytest.raises(error, match=match):
        nest(batch, **options)
    with pytest.raises(error, match=match):
        compress(batch, **options)
    assert freeze(batch) == before


# -------------------------------------------------------------------- values


STRAYS = [
    ("old_log_probs", (0, 5), 1e-30),
    ("old_log_probs", (4, 0), float("nan")),
    ("responses", (2, 0), 0),
    ("prompts", (0, 0), PAD - 1),
    ("position_ids", (0, 10), 0),
    ("position_ids", (0, 0), 1),
    ("position_ids", (4, 3), 1),
    ("response_mask", (2, 3), 1),
    ("routed_experts", (0, 0, 2, 1), 7),
]


@pytest.mark.parametrize(("name", "place", "value"), STRAYS)
def test_03_a_value_under_the_mask_is_kept_or_named(name, place, value):
    batch = rollout()
    batch["routed_experts"] = of("sequence", torch.int16, 0, (3, 2))
    batch[name][place] = value
    assert_kept(batch, name)
    assert_refused(
        batch, mp.errors.LossyPadError, rf'"{name}" holds .* at \({place[0]}, {place[1]}', strict_mask_nesting=True
    )


# -------------------------------------------------------------------- shapes and edges


def test_08_dense_prompts_without_a_prompt_mask():
    batch = TensorDict(
        {"prompts": tokens()["prompts"], "responses": tokens()["responses"], "response_mask": response_mask()},
        batch_size=[B],
    )
    assert_kept(batch, "prompts")


# -------------------------------------------------------------------- state


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_09_an_error_leaves_the_batch_as_it_was(last):
    batch = rollout()
    batch["returns"] = torch.zeros(B, RESPONSE + 1)
    if not last:
        batch = TensorDict({name: batch.get(name) for name in reversed(list(batch.keys()))}, batch_size=[B])
    storages = {name: value.data_ptr() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert_refused(batch, mp.errors.LayoutError, r'"returns" is \(7, 7\)')
    assert_refused(batch.exclude("returns"), mp.errors.RegistryError, "pad_token_id", pad_token_id=None)
    assert storages == {name: value.data_ptr() for name, value in batch.items() if isinstance(value, torch.Tensor)}


# -------------------------------------------------------------------- torch, tensordict, Ray


def test_12a_packed_rows_never_index_a_jagged_leaf(monkeypatch):
    batch = rollout(holes=True)
    batch["prompts"] = jagged([torch.arange(p) for p, _ in ROWS])
    expected = {name: mp.decompress(part) for name, part in _row_operations(compress(batch)).items()}
    packed = compress(batch)
    jagged_rows = jagged([torch.arange(2), torch.arange(3)])

    def refuse(*args, **kwargs):
        raise AssertionError("a TensorDict or a jagged leaf was indexed")

    for name in ("__getitem__", "split", "chunk", "unbind", "gather", "_index_tensordict"):
        for kind in (TensorDictBase, TensorDict):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, refuse)
    kind = type(jagged_rows)
    for name in ("__getitem__", "unbind", "split", "chunk", "narrow", "select", "index_select"):
        monkeypatch.setattr(kind, name, refuse, raising=False)
    with pytest.raises(AssertionError, match="indexed"):
        batch[0:2]
    with pytest.raises(AssertionError, match="indexed"):
        jagged_rows[0]
    restored = {
        name: (mp.decompress(part), mp.decompress(part, format="nested"))
        for name, part in _row_operations(packed).items()
    }
    monkeypatch.undo()
    for name, (padded, nested) in restored.items():
        assert_same(padded, expected[name])
        assert_same(mp.unnest_batch_by_mask(nested), expected[name])


def _row_operations(packed):
    return {
        "slice": packed[1:4],
        "select": packed.take([3, 0, 0]),
        "mask": packed[torch.tensor([True, False, True, False, True, False, True])],
        "split": packed.split([2, 5])[1],
        "chunk": packed.chunk(3)[0],
        "cat": mp.PackedBatch.cat([packed[4:], packed[:4]]),
    }


def test_15_layouts_stay_on_the_device_of_the_mask():
    layout = mp.RowLayout.from_mask(torch.tensor([[1, 1, 0], [0, 1, 0]])).to("meta")
    for tensor in (layout.offsets, layout.cu_seqlens, layout.indices, layout.to_mask()):
        assert tensor.device.type == "meta"
    assert layout.take([1]).device.type == "meta"
    assert layout.narrow(0, 2).to_mask().device.type == "meta"
    packed = mp.ops.pack(torch.empty(2, 3, 5, device="meta"), layout)
    assert packed.device.type == "meta"
    assert packed.shape == (3, 5)
    assert mp.ops.unpack(packed, layout, 1).device.type == "meta"
    with pytest.raises(mp.errors.LayoutError, match="meta"):
        mp.ops.pack(torch.empty(2, 3), layout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_15_masks_come_back_on_the_device_of_the_batch():
    batch = rollout(holes=True).to("cuda")
    assert_exact(batch)
    nested = nest(batch)
    assert all(value.is_cuda for value in nested.values() if isinstance(value, torch.Tensor))
    mixed = rollout(objects=False)
    mixed["old_log_probs"] = mixed["old_log_probs"].cuda()
    assert_exact(mixed)


# -------------------------------------------------------------------- torch's defaults


def of_every_dtype():
    """A field of every dtype under the pads that it can have, beside a mask with holes."""
    on = [[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    mask = [[item == 1 for item in line] for line in on]
    fields = {"mask": torch.tensor(on)}
    registry = {"mask": mp.MaskNestingSpec("mask")}
    for dtype in DTYPES:
        signed = dtype.is_floating_point and dtype.itemsize > 1
        pads = {"zero": 0, "one": 1, "edge": mp.EDGE, "row": mp.PER_ROW} | ({"sign": SIGNED_ZERO} if signed else {})
        for name, pad in pads.items():
            key = f"{name} of {dtype}"
            fields[key] = field(mask, dtype, samples_pad(pad))
            registry[key] = mp.MaskNestingSpec("mask", pad)
    fields["by dim 2"] = field(mask, torch.float32, "edge", (3,)).movedim(1, 2).contiguous()
    registry["by dim 2"] = mp.MaskNestingSpec("mask", mp.EDGE, ragged_dim=2)
    return TensorDict(fields, batch_size=[len(on)]), registry


def samples_pad(pad):
    return {mp.EDGE: "edge", mp.PER_ROW: 1, SIGNED_ZERO: -0.0}.get(pad, pad)


@contextlib.contextmanager
def meta_device_set():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def double_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {"meta": lambda: torch.device("meta"), "meta, set": meta_device_set, "float64": double_dtype}


@pytest.mark.parametrize("default", DEFAULTS)
def test_34_torchs_defaults_change_nothing(default):
    """The same bits come from every call, whatever device and dtype torch gives to tensors of its own."""
    batch, odd_fields = rollout(holes=True), rollout(holes=True)
    odd_fields["advantages"][0, -1] = 7.0  # kept dense
    every, registry = of_every_dtype()
    chosen = torch.tensor([4, 0, 2])
    hidden, head, ids = torch.randn(11, 8), torch.randn(17, 8), torch.randint(17, (11,))
    has_prompt = torch.tensor([b for b, (p, r) in enumerate(ROWS) if p or not r])
    scored = batch[has_prompt]
    logits = torch.randn(len(scored), PROMPT + RESPONSE)
    lengths = batch["attention_mask"].sum(1)

    def everything():
        pads._pad_words.cache_clear()
        out = {}
        for verify in (True, False):
            out["nest", verify] = nested = nest(batch, verify=verify)
        chunks = parts_of(nested, [3, 2, 2])
        out["chunk"], out["cat"] = chunks[1], joined(chunks)
        out["take"], out["joined"] = mp.nesting.take(nested, chosen), mp.nesting.cat([nested, nested])
        out["unnest"] = [mp.unnest_batch_by_mask(out[name]) for name in ("chunk", "cat", "take", "joined")]
        out["response"] = mp.select_and_pad_to_response(nested)
        out["named"] = mp.select_and_pad_to_response(batch, "responses", "old_log_probs")
        out["extracted"] = [mp.extract_response(b, logits) for b in (scored, nest(scored))]
        packed = compress(batch)
        received = pickle.loads(pickle.dumps(packed))
        out["bytes"] = stored = packed.to_bytes(checksum=True)
        for name, held in {"packed": packed, "received": received, "read": mp.PackedBatch.from_bytes(stored)}.items():
            for layout in ("padded", "nested"):
                out[name, layout] = mp.decompress(held, format=layout)
            out[name, "trim"] = mp.decompress(held[1:3], widths="trim")
            out[name, "rows"] = mp.decompress(held.take(chosen))
            out[name, "cat"] = mp.decompress(mp.PackedBatch.cat(held.chunk(2)))
        out["dense"] = mp.decompress(compress(odd_fields))
        out["like"] = mp.decompress(compress(batch.select("advantages"), like=packed))
        view = mp.views.BatchView.of(packed).take(chosen)
        out["view"] = [view.materialize(), view.with_fields(packed.take(chosen)).materialize(format="nested")]
        out["every dtype"] = mp.unnest_batch_by_mask(nest(every, registry=registry))
        every_packed = mp.PackedBatch.from_bytes(compress(every, registry=registry).to_bytes())
        out["every dtype, packed"] = mp.decompress(every_packed)
        out["every dtype, nested"] = mp.decompress(every_packed, format="nested")
        plan = mp.planning.plan_micro_batches(lengths, token_budget=12)

        def planned(whole):
            return plan.restore(list(plan.apply(whole)))

        out["plan"] = [planned(whole) for whole in (batch, nested, batch["input_ids"], nested["input_ids"])]
        out["plan, packed"] = mp.decompress(planned(packed))
        out["plan, view"] = planned(mp.views.BatchView.of(packed)).materialize()
        layout = mp.RowLayout.from_mask(batch["attention_mask"])
        out["layout"] = [layout.to_mask(), layout.indices, layout.offsets, layout.cu_seqlens]
        out["layout"] += [mp.RowLayout.from_lengths(lengths).to_mask(), mp.RowLayout.from_lengths([2, 0, 3]).to_mask()]
        out["layout"] += [mp.RowLayout.from_cu_seqlens(layout.cu_seqlens).to_mask(), layout.narrow(2, 7).to_mask()]
        for dtype in DTYPES:
            values = mp.ops.pack(batch["attention_mask"].to(dtype), layout)
            out["ops", dtype] = [values, *(mp.ops.unpack(values, layout, pad) for pad in (0, 1, mp.EDGE))]
        out["log_probs"] = mp.ops.packed_log_probs(hidden, head, ids, entropy=True)
        out["inputs"] = mp.replay.PackedInputs.of(scored, options=mp.replay.ReplayOptions(multiple_of=16))
        out["inputs of packed"] = mp.replay.PackedInputs.of(compress(scored))
        out["report"] = mp.report(packed).metrics()
        out["fields"] = mp.check(odd_fields, pad_token_id=PAD)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
        expected = everything()
        with DEFAULTS[default]():
            seen = everything()
    for name, want in expected.items():
        assert freeze(seen[name]) == freeze(want), name
