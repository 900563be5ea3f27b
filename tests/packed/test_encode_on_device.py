"""The encode kernels against the compiled core: every array of every field has the same bits. Triton interprets the
kernels here; tests/gpu/test_cuda_encode.py runs them on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same_batch
from samples import PAD, workload
from tensordict import TensorDict
from torch import Tensor

from maskpack import MaskNestingSpec, PackedBatch, compress, decompress, nest_batch_by_mask
from maskpack.errors import LayoutError
from maskpack.nesting.schema import LAYOUTS
from maskpack.nesting.verify import Verifier
from maskpack.packed import batch as packing
from maskpack.packed import table as tables
from maskpack.packed.cuda import device_plan
from maskpack.packed.cuda import encode as encoding
from maskpack.packed.cuda.device_plan import DevicePlan

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def kernel_test(test: Any) -> Any:
    return pytest.mark.interpreter(pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1")(test))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tables.forget()
    yield
    tables.forget()


class Seen:
    """Which fields the kernels encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[encoding.OnDevice | None] = []
        whole = encoding.encode_on_device
        monkeypatch.setattr(encoding, "uses_triton", lambda device, call: True)
        monkeypatch.setattr(packing, "encode_on_device", lambda *given: self._kept(whole(*given)))

    def _kept(self, found: encoding.OnDevice | None) -> encoding.OnDevice | None:
        self.done.append(found)
        return found

    def names(self, packed: PackedBatch) -> set[str]:
        """The fields of the last batch that the kernels encoded."""
        found = self.done[-1]
        return set() if found is None else {packed.tensors[number].path[-1] for number in found.numbers}


def by_host(batches: list[TensorDict], **more: Any) -> PackedBatch:
    """The last of some batches, encoded on the host in the forms of those before."""
    tables.forget()
    return [compress(batch, **more) for batch in batches][-1]


def by_kernels(seen: Seen, batches: list[TensorDict], **more: Any) -> PackedBatch:
    """The last of some batches, encoded by the kernels."""
    tables.forget()
    packed = [compress(batch, **more) for batch in batches][-1]
    assert seen.done[-len(batches)] is None  # the host chooses the forms
    return packed


def arrays_of(packed: PackedBatch, path: Any) -> list[Any]:
    """The entry of a field and those that it is made of, with their arrays."""
    table, number = packed.table, packed.numbers[path]
    found: list[Any] = []
    for at in table.own_entries(number):
        entry = table.entries[at]
        found.append([int(entry[name]) for name in ("kind", "items", "size", "number")])
        found += [(array.dtype, array.tobytes()) for array in table.arrays_of(at)]
    return found


def assert_same(ours: PackedBatch, expected: PackedBatch, names: set[str]) -> None:
    assert ours.numbers == expected.numbers
    for form in expected.tensors:
        if form.path[-1] in names:
            assert arrays_of(ours, form.path) == arrays_of(expected, form.path), form.path
    table = ours.table
    ends = sorted(
        (int(p["at"]), int(p["at"] + p["size"] * p["count"])) for e in table.entries for p in (e[n] for n in "abc")
    )
    assert all(end <= table.body.nbytes for _, end in ends)


LENGTHS = ([3, 0, 700, 256, 1, 64, 63, 1025, 2048, 5], [300, 0, 255, 257, 2, 65, 62, 1024, 1, 0])


def rows_of(values: list[Any], dtype: torch.dtype) -> Tensor:
    rows = [torch.from_numpy(np.asarray(row)).to(dtype) for row in values]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def batch_of(rng: np.random.Generator, lengths: list[int]) -> TensorDict:
    """Jagged fields, a form each."""
    fields: dict[str, Tensor] = {}

    def add(name: str, dtype: torch.dtype, row: Any) -> None:
        fields[name] = rows_of([row(length) for length in lengths], dtype)

    for dtype in (torch.int16, torch.int32, torch.int64):
        add(f"random {dtype}", dtype, lambda n: rng.integers(0, 1000, n))
        add(f"below {dtype}", dtype, lambda n: rng.integers(-5000, -4990, n))
        add(f"steps {dtype}", dtype, lambda n: np.arange(n) * 3 - 7)
        add(f"two steps {dtype}", dtype, lambda n: np.concatenate([np.arange(n // 2), 5 * np.arange(n - n // 2)]))
        add(f"sparse {dtype}", dtype, lambda n: (rng.random(n) < 0.01) * rng.integers(1, 99, n))
        add(f"two words {dtype}", dtype, lambda n: np.where(rng.random(n) < 0.5, 3, -2))
        add(f"stretches {dtype}", dtype, lambda n: np.repeat(rng.integers(0, 9, n // 50 + 1), 50)[:n])
    add("bools", torch.bool, lambda n: rng.random(n) < 0.5)
    add("bytes", torch.uint8, lambda n: rng.integers(0, 7, n))
    add("wide", torch.int64, lambda n: rng.integers(-(2**62), 2**62, n))
    add("ends", torch.int64, lambda n: np.where(rng.random(n) < 0.5, 2**63 - 1, -(2**63)))
    add("floats", torch.float32, lambda n: rng.normal(size=n))
    add("halves", torch.bfloat16, lambda n: rng.normal(size=n))
    add("doubles", torch.float64, lambda n: rng.normal(size=n))
    add("complex", torch.complex128, lambda n: rng.normal(size=n) + 1j)
    add("one", torch.float32, lambda n: np.full(n, -0.0))
    add("pairs", torch.int32, lambda n: np.stack([np.arange(n), rng.integers(0, 9, n)], 1))
    repeated = rng.integers(0, 2**31, 4000)
    order = rng.integers(0, 3, len(lengths))
    fields["repeated"] = rows_of([repeated[1000 * at : 1000 * at + 900] for at in order], torch.int64)
    fields["constant rows"] = rows_of([np.full(n, rng.integers(0, 4)) for n in lengths], torch.float32)
    fields["dense"] = torch.from_numpy(rng.integers(0, 300, (len(lengths), 6)))
    fields["scalars"] = torch.from_numpy(rng.normal(size=len(lengths)))
    return TensorDict(fields, batch_size=[len(lengths)])


@kernel_test
@quiet
@pytest.mark.parametrize("seed", range(2))
def test_every_form_has_the_arrays_of_the_core(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = (batch_of(rng, [*rng.permutation(lengths)]) for lengths in (LENGTHS[0], LENGTHS[0][::-1]))
    expected = by_host([one, other])
    seen = Seen(monkeypatch)
    packed = by_kernels(seen, [one, other])
    names = seen.names(packed)
    kinds = {packed.table.kind(packed.numbers[form.path]) for form in packed.tensors if form.path[-1] in names}
    assert {"plain", "narrow", "blocks", "rle", "arange", "delta", "sparse", "bitmap"} <= set(" ".join(kinds).split())
    assert any(kind.startswith("dictionary") for kind in kinds)
    assert len(names) > 25
    assert_same(packed, expected, names)
    assert_same_batch(
        decompress(packed, format="nested").exclude(LAYOUTS), decompress(expected, format="nested").exclude(LAYOUTS)
    )


@kernel_test
@quiet
@pytest.mark.parametrize(
    "variant", ["reference", "multi-turn", "negative-zeros", "m-rope", "m-rope-edge", "routed-experts", "ppo"]
)
def test_workloads_have_the_arrays_of_the_core(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    padded = [workload(variant, rows=8, prompt=24, response=300, seed=seed, fill=0.3, group=4) for seed in (0, 1)]
    nested = [nest_batch_by_mask(batch, pad_token_id=PAD) for batch in padded]
    expected = by_host(nested, pad_token_id=PAD)
    seen = Seen(monkeypatch)
    packed = by_kernels(seen, nested, pad_token_id=PAD)
    names = seen.names(packed)
    assert len(names) >= 10
    assert_same(packed, expected, names)
    assert_same_batch(decompress(packed), padded[1])


@kernel_test
@quiet
def test_forms_of_a_padded_batch_serve_a_nested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose layouts come in another order."""
    batches = [workload(rows=6, prompt=24, response=100, seed=seed, fill=0.4, group=3) for seed in (0, 1, 2)]
    seen = Planned(monkeypatch)
    compress(batches[0], pad_token_id=PAD)
    for batch in batches:
        packed = compress(nest_batch_by_mask(batch, pad_token_id=PAD), pad_token_id=PAD)
        assert len(seen.names(packed)) >= 10
        assert_same_batch(decompress(packed), batch)


@kernel_test
@quiet
def test_a_batch_of_jagged_fields_and_one_that_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    batches = [
        TensorDict({"a": rows_of([rng.integers(0, 9, n) for n in (3, 0, 70)], torch.int64), "b": own}, batch_size=[])
        for own in (torch.tensor([[True, False]] * 5), torch.tensor([[False, True]] * 5))
    ]
    seen = Seen(monkeypatch)
    for batch in batches:
        packed = compress(batch, registry={"b": MaskNestingSpec(None)})
        assert_same_batch(decompress(packed, format="nested").exclude(LAYOUTS), batch)
    assert seen.names(packed) == {"a", "b"}


@kernel_test
@quiet
def test_what_does_not_fit_its_form_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    steps, noise, other = ([f(n) for n in LENGTHS[0]] for f in (np.arange, lambda n: rng.integers(0, 99, n), np.arange))
    batches = [
        TensorDict({"a": rows_of(own, torch.int64), "b": rows_of(steps, torch.int32)}, batch_size=[len(steps)])
        for own in (steps, noise, noise, other)
    ]
    seen = Seen(monkeypatch)
    for batch, names in zip(batches, [set[str](), {"b"}, set[str](), {"a", "b"}], strict=True):
        packed = compress(batch)
        assert_same_batch(decompress(packed, format="nested").exclude(LAYOUTS), batch)
        assert seen.names(packed) <= names
    assert seen.done[0] is None  # the host chooses
    assert seen.done[2] is None  # and once more, as a field did not fit


@kernel_test
@quiet
@pytest.mark.parametrize("hashes", ["equal", "right"])
def test_rows_are_equal_by_their_words_not_by_their_hash(monkeypatch: pytest.MonkeyPatch, hashes: str) -> None:
    rng = np.random.default_rng(7)
    words = rng.integers(0, 2**31, (4, 300))
    repeated = [words[[0, 0, 1, 1, 2, 2]], words[[3, 2, 3, 2, 1, 1]]]
    batches = [
        TensorDict({"a": rows_of([*rows], torch.int64), "b": rows_of([*rows[::-1]], torch.int64)}, batch_size=[6])
        for rows in repeated
    ]
    seen = Seen(monkeypatch)
    if hashes == "equal":
        measured = encoding.Encoder.measured

        def collided(self: Any, *others: Tensor) -> Any:
            found = measured(self, *others)
            found[0][:, :, 6] = 1
            return found

        monkeypatch.setattr(encoding.Encoder, "measured", collided)
    compress(batches[0])
    packed = compress(batches[1])
    assert seen.names(packed) == (set() if hashes == "equal" else {"a", "b"})
    assert_same_batch(decompress(packed, format="nested").exclude(LAYOUTS), batches[1])


@kernel_test
@quiet
def test_equal_fields_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    batches: list[TensorDict] = []
    for _ in range(2):
        rows = [rng.normal(size=n) for n in LENGTHS[0]]
        fields = {name: rows_of(rows, torch.float32) for name in "abc"}
        batches.append(TensorDict(fields, batch_size=[len(rows)]))
    offsets = [batch["a"].offsets() for batch in batches]
    batches = [
        TensorDict(
            {name: torch.nested.nested_tensor_from_jagged(batch[name].values(), own) for name in "abc"}, batch_size=[10]
        )
        for batch, own in zip(batches, offsets, strict=True)
    ]
    seen = Seen(monkeypatch)
    packed = by_kernels(seen, batches)
    assert seen.names(packed) == {"a", "b", "c"}
    assert len(set(packed.table.fields.tolist())) == 1
    for name in "abc":
        assert torch.equal(decompress(packed, format="nested")[name].values(), batches[1][name].values())


@kernel_test
@quiet
def test_odd_bools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [
        TensorDict({"a": torch.tensor([[0, 1, 1]] * 4).bool(), "b": torch.ones(4, 3)}, batch_size=[4]) for _ in range(2)
    ]
    seen = Seen(monkeypatch)
    registry = {"a": MaskNestingSpec(None), "b": MaskNestingSpec(None)}
    compress(batches[0], registry=registry)
    batches[1]["a"] = torch.tensor([[0, 1, 2]] * 4, dtype=torch.uint8).view(torch.bool)
    monkeypatch.setattr("maskpack.nesting.verify.odd_bools", lambda words: False)  # as for tensors on a GPU
    with pytest.raises(LayoutError, match='field "a" is torch'):
        compress(batches[1], registry=registry)
    assert seen.done


@kernel_test
@quiet
def test_a_batch_whose_rows_are_no_batch_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    batches = [TensorDict({"a": torch.from_numpy(rng.integers(0, 9, (7, 5)))}, batch_size=[]) for _ in range(2)]
    seen = Seen(monkeypatch)
    for batch in batches:
        packed = compress(batch, registry={"a": MaskNestingSpec(None)})
        assert_same_batch(decompress(packed), batch)
    assert seen.done


@kernel_test
@quiet
def test_the_host_looks_for_better_forms_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_A_LOOK", 3)
    rng = np.random.default_rng(13)
    seen = Seen(monkeypatch)
    for number in range(7):
        rows = [rng.integers(0, 9, n) for n in LENGTHS[0]]
        compress(TensorDict({"a": rows_of(rows, torch.int64)}, batch_size=[len(rows)]))
        assert (seen.done[-1] is None) == (number in (0, 4))


class Planned(Seen):
    """`Seen`, and padded tensors on the host are treated as if they lay on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.plans: list[bool] = []
        monkeypatch.setattr(Verifier, "deferred", lambda self, forms: {})
        whole = DevicePlan.encoded
        monkeypatch.setattr(DevicePlan, "encoded", lambda plan, batch: self._planned(whole(plan, batch)))

    def _planned(self, found: Any) -> Any:
        self.plans.append(found is not None)
        return found


@kernel_test
@quiet
@pytest.mark.parametrize(
    ("variant", "verify"), [("reference", "always"), ("ppo", "never"), ("routed-experts", "always")]
)
def test_padded_batches_of_a_plan(monkeypatch: pytest.MonkeyPatch, variant: str, verify: Any) -> None:
    options: dict[str, Any] = {"pad_token_id": PAD, "verify": verify}
    batches = [workload(variant, rows=6, prompt=24, response=100, seed=seed, fill=0.4, group=3) for seed in range(4)]
    expected = by_host([*batches[:1], batches[3]], **options)
    seen = Planned(monkeypatch)
    tables.forget()
    packed = [compress(batch, **options) for batch in batches]
    assert seen.plans == [True, True]
    for batch, one in zip(batches, packed, strict=True):
        assert_same_batch(decompress(one), batch)
        assert set(one.layouts) == set(expected.layouts)
    assert packed[3].layouts == expected.layouts
    assert [own.anchor for own in packed[3].layouts.values()] == [own.anchor for own in expected.layouts.values()]
    assert packed[3].schema == replace(expected.schema, forms=packed[3].schema.forms)
    assert_same(packed[3], expected, {form.path[-1] for form in expected.tensors})


def _stray(batch: TensorDict) -> None:
    batch["old_log_probs"][0, -1] = 1.0


def _stray_edge(batch: TensorDict) -> None:
    batch["position_ids"][1, 0] += 1


def _several_spans(batch: TensorDict) -> None:
    batch["attention_mask"][0, :] = 1
    batch["attention_mask"][0, 1] = 0


def _gap_in_numbers(batch: TensorDict) -> None:
    """A gap in a mask of many numbers, which has no form that a 0 does not fit."""
    _several_spans(batch)
    _numbered(batch)


def _numbered(batch: TensorDict) -> None:
    mask = batch["attention_mask"]
    batch["attention_mask"] = (mask != 0) * torch.randint(
        1, 200, mask.shape, generator=torch.Generator().manual_seed(0)
    )


def _noise(batch: TensorDict) -> None:
    mask = batch["response_mask"] != 0
    batch["advantages"] = torch.randn(mask.shape).where(mask, 0)


@kernel_test
@quiet
@pytest.mark.parametrize(
    ("change", "verify"),
    [
        (_stray, "always"),
        (_stray_edge, "always"),
        (_several_spans, "always"),
        (_several_spans, "never"),
        (_gap_in_numbers, "never"),
        (_noise, "always"),
    ],
)
def test_a_batch_that_does_not_fit_its_plan(monkeypatch: pytest.MonkeyPatch, change: Any, verify: Any) -> None:
    batches = [workload(rows=6, prompt=24, response=100, seed=seed, fill=0.4, group=3) for seed in range(4)]
    change(batches[3])
    for batch in batches[:3] if change is _gap_in_numbers else []:
        _numbered(batch)
    seen = Planned(monkeypatch)
    for batch in batches:
        packed = compress(batch, pad_token_id=PAD, verify=verify)
        assert_same_batch(decompress(packed), batch)
    assert seen.plans == [True, False]
    for name, lossy in {"old_log_probs": _stray, "position_ids": _stray_edge}.items():
        assert packed.forms[(name,)].kind == ("dense" if change is lossy else "padded")


@kernel_test
@quiet
@pytest.mark.parametrize("reason", ["rows of several spans", "rows that are too long"])
def test_batches_without_a_plan(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Nothing is measured in vain for them."""
    if reason == "rows that are too long":
        monkeypatch.setattr(device_plan, "MOST", 123)
    batches = [workload(rows=6, prompt=24, response=100, seed=seed, fill=0.4, group=3) for seed in (0, 1, 0)]
    if reason == "rows of several spans":
        for batch in batches:
            _several_spans(batch)
    seen = Planned(monkeypatch)
    for batch in batches:
        assert_same_batch(decompress(compress(batch, pad_token_id=PAD)), batch)
    assert seen.plans == []
    assert seen.done[-1] is not None
