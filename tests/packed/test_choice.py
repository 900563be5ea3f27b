"""The choice of encodings: what the fields of real batches get, and that no choice ever changes a bit."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch
from samples import PAD, workload
from strategies import Case, batches, row_ops, rows_after
from tensordict import TensorDict
from test_encodings import DTYPES, FAMILIES, Rows, assert_holds, bounds_of, rows_like, words_of

from maskpack import EDGE, RL_FIELDS, MaskNestingSpec, PackedBatch, compress, decompress, unnest
from maskpack.fields.registry import HINTS, Path
from maskpack.packed.choose import Candidate, encode, encode_alone
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps
from maskpack.packed.references import Columns, Joined, Repeated, Same, kind_of, nbytes

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
ANY_HINT = (*HINTS, "delta:x", "join:prompts,responses", "join:x,x", "join:x,y", "join:y,m", "join:gone,x")

# -------------------------------------------------------------------- the fields of real batches

USUAL = {
    "prompts": "repeated narrow",
    "responses": "narrow",
    "input_ids": "prompts + responses",
    "attention_mask": "runs",
    "position_ids": "ramp",
    "response_mask": "runs",
    "rollout_log_probs": "plain",
    "old_log_probs": "plain",
    "ref_log_prob": "plain",
    "entropys": "plain",
    "advantages": "runs",
    "returns": "same as advantages",
    "token_level_scores": "runs",
    "token_level_rewards": "same as token_level_scores",
}
VARIANTS = {
    "reference": {},
    "multi-turn": {},
    "negative-zeros": {},
    "m-rope": {"position_ids": "columns ramp steps"},
    "m-rope-edge": {"position_ids": "columns steps ramp"},
    "routed-experts": {"routed_experts": "narrow"},
    "ppo": {"advantages": "plain", "returns": "plain", "values": "plain"},
    "jagged-prompts": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_fields_of_the_reference_workload(variant: str) -> None:
    batch = workload(variant, 64, 96, 448)
    packed = compress(batch, pad_token_id=PAD)
    found = {"/".join(path): kind_of(encoding) for path, encoding in packed.fields.items()}
    assert found == {**USUAL, **VARIANTS[variant]}
    assert_same_batch(decompress(packed), batch)


def test_the_usual_fields_need_no_hints() -> None:
    """But for input_ids, whose two halves no glance can guess."""
    batch = workload("m-rope", 64, 96, 448)
    plain = RL_FIELDS | {name: dataclasses.replace(spec, hints=()) for name, spec in RL_FIELDS.items()}
    packed = compress(batch, pad_token_id=PAD, registry=plain)
    found = {path[0]: kind_of(encoding) for path, encoding in packed.fields.items()}
    assert found == {**USUAL, "input_ids": "narrow", "position_ids": found["position_ids"]}
    assert found["position_ids"] != "plain"
    assert_same_batch(decompress(packed), batch)


def test_what_is_equal_stays_small_with_more_tokens() -> None:
    """Ten times the response: masks, positions, rewards and advantages take (almost) no byte more."""
    short, long = (compress(workload(rows=64, prompt=64, response=width), pad_token_id=PAD) for width in (448, 4480))
    for name in ("attention_mask", "position_ids", "response_mask", "advantages", "token_level_scores", "returns"):
        assert nbytes(long.fields[(name,)]) <= nbytes(short.fields[(name,)]) + 64, name


def test_memory_of_compress_stays_below_a_share_of_the_batch() -> None:
    """numpy reports its memory to tracemalloc; torch's own (one copy of the real values, 8 % of the batch) is not in
    this number. Encoding reads the values a few times over, but never makes anything of the padded size."""
    batch = workload(rows=64, prompt=256, response=1792)
    padded = sum(x.numel() * x.element_size() for x in batch.values())
    compress(batch[:1], pad_token_id=PAD)
    tracemalloc.start()
    try:
        packed = compress(batch, pad_token_id=PAD)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert packed.nbytes < most < padded / 4


# -------------------------------------------------------------------- one field


@dataclass(frozen=True)
class One:
    """A field with rows of words, and what it is said to be."""

    rows: Rows
    dtype: np.dtype[Any]
    columns: int
    hints: tuple[str, ...]
    integers: bool

    def candidate(self, layout: str | None = "m") -> Candidate:
        words = words_of(self.rows, self.dtype)
        return Candidate(words, bounds_of(self.rows), layout, self.integers, self.columns, self.hints)


@st.composite
def fields(draw: st.DrawFn) -> One:
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(rows_like(draw(st.sampled_from(FAMILIES)), dtype))
    columns = draw(st.sampled_from([1, 1, 2, 3]))
    rows = [row * columns for row in rows]
    times = draw(st.sampled_from([1, 1, 2, 300]))
    hints = tuple(draw(st.lists(st.sampled_from(ANY_HINT), max_size=3)))
    return One(rows * times, dtype, columns, hints, draw(st.booleans()))


@given(fields())
def test_never_larger_than_plain_and_always_exact(field: One) -> None:
    candidate = field.candidate()
    before = candidate.words.copy()
    made = encode_alone(candidate)
    assert nbytes(made) <= before.nbytes
    assert_holds(made, field.rows, field.dtype)
    assert candidate.words.tolist() == before.tolist()
    if field.columns > 1 and "columns" in field.hints and before.size:
        assert isinstance(made, Columns)


@pytest.mark.parametrize("size", [2047, 2048, 2049, 5000])
@pytest.mark.parametrize("hints", [(), ("runs",), ("ramp",), ("bits", "sparse")])
def test_a_glance_is_not_the_whole(size: int, hints: tuple[str, ...]) -> None:
    """One odd word, anywhere, beside words that every glance takes for equal, rising, or few."""
    places = [0, 1, 63, 64, 65, 100, 2040, size - 65, size - 64, size - 1]
    for family in (np.ones(size, np.int64), np.arange(size), np.zeros(size, np.int64), np.arange(size) % 2):
        for place in places:
            words = family.copy()
            words[place] = 2**40 + 7
            made = encode_alone(Candidate(words, np.array([0, size // 3, size]), "m", True, 1, hints))
            assert made.problem(words.dtype, np.array([0, size // 3, size])) is None
            assert np.array_equal(made.decode(words.dtype, np.array([0, size // 3, size])), words)
            assert nbytes(made) <= words.nbytes


def kind(words: Any, dtype: Any, rows: int = 4, integers: bool = True, hints: tuple[str, ...] = ()) -> type:
    words = np.asarray(words).astype(dtype)
    bounds = np.linspace(0, words.size, rows + 1).astype(np.int64)
    return type(encode_alone(Candidate(words, bounds, "m", integers, 1, hints)))


def test_what_the_words_suggest() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(-(2**62), 2**62, 4000)
    assert kind(noise, np.int64) is Plain
    assert kind(noise % 1000, np.int64) is Narrow
    assert kind(noise % 1000, np.int64, integers=False) is Plain
    assert kind(noise % 2, np.int64) is Bits
    assert kind(noise % 2, np.int64, integers=False, hints=("bits",)) is Bits
    assert kind(np.arange(4000) // 1000, np.int64) is Runs
    assert kind(np.arange(4000) // 1000, np.int32, integers=False) is Runs
    assert kind(np.arange(4000) * 3, np.int64) is Ramp
    assert kind(np.cumsum(np.arange(4000) // 700 % 3), np.int64) is Steps
    assert kind(np.where(np.arange(4000) % 3 == 1, noise, 0), np.int64) is Sparse
    assert kind(np.where(np.arange(4000) % 3 == 1, noise, 0), np.int32, integers=False) is Sparse
    assert kind(np.tile(noise[:1000], 4), np.int64) is Repeated
    assert kind(np.tile(noise[:1000], 4), np.int32, integers=False) is Repeated
    assert kind([], np.int64) is Plain
    assert kind(np.arange(4000) * 3, np.int64, hints=("narrow",)) is Ramp  # a quarter is not small enough to stop


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("hints", [(), ("runs", "bits"), ("sparse", "runs"), ("runs",)])
@pytest.mark.parametrize("name", [name for name in strategies.MANY_RUNS if name != "no width"])
def test_a_field_of_two_words_takes_its_bits_and_little_more(name: str, hints: tuple[str, ...], dtype: Any) -> None:
    mask, width = strategies.MANY_RUNS[name]
    for high, low in ((1, 0), (0, 200), (9, 100)):
        words = np.where(np.array(mask), high, low).astype(dtype).reshape(-1)
        bounds = np.arange(len(mask) + 1) * width
        for integers in (False, True):
            made = encode_alone(Candidate(words, bounds, "m", integers, 1, hints))
            assert np.array_equal(made.decode(words.dtype, bounds), words)
            assert nbytes(made) <= 2 * len(mask) * ((width + 7) // 8) + 128


def test_a_wrong_hint_costs_time_only() -> None:
    noise = np.random.default_rng(0).integers(-(2**62), 2**62, 4000)
    bounds = np.linspace(0, 4000, 5).astype(np.int64)
    for hints in itertools.chain(((hint,) for hint in ANY_HINT), [ANY_HINT, ANY_HINT[::-1]]):
        made = encode_alone(Candidate(noise, bounds, "m", True, 1, hints))
        assert nbytes(made) == noise.nbytes
        assert np.array_equal(made.decode(noise.dtype, bounds), noise)


# -------------------------------------------------------------------- fields that follow from others


def followed(found: Mapping[Path, Any]) -> None:
    """Raises where a field leads back to itself or to one that is not there, or to more than two others in a row."""

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"{path} leads back to itself"
        encoding = found[path]
        for name in ("field", "head", "tail"):
            if isinstance(encoding, Same | Joined) and hasattr(encoding, name):
                visit(getattr(encoding, name), (*above, path))

    for path, encoding in found.items():
        visit(path, ())
        if isinstance(encoding, Same):
            assert not isinstance(found[encoding.field], Same | Joined)
        if isinstance(encoding, Joined):
            assert not isinstance(found[encoding.head], Joined)
            assert not isinstance(found[encoding.tail], Joined)


def decoded(found: Mapping[Path, Any], candidates: Mapping[Path, Candidate], path: Path) -> list[int]:
    """The words of a field, by hand from those of other fields."""
    encoding, field = found[path], candidates[path]
    if isinstance(encoding, Same):
        return decoded(found, candidates, encoding.field)
    if not isinstance(encoding, Joined):
        return encoding.decode(field.words.dtype, field.bounds).tolist()
    out: list[int] = []
    for row in range(field.bounds.size - 1):
        for part in (encoding.head, encoding.tail):
            begin, end = candidates[part].bounds[row : row + 2]
            out += decoded(found, candidates, part)[begin:end]
    return out


@given(st.data())
def test_no_field_leads_back_to_itself(data: st.DataObject) -> None:
    """Fields that are joined of each other in circles, under any layouts; rows without words make it possible."""
    names = ["a", "b", "c", "d"]
    one = st.sampled_from(names)
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(rows_like("two", dtype))
    candidates: dict[Path, Candidate] = {}
    for name in data.draw(st.permutations(names)):
        empty = data.draw(st.sampled_from([False, False, True]))
        held = [[] for _ in rows] if empty else rows
        hints = tuple(f"join:{data.draw(one)},{data.draw(one)}" for _ in range(data.draw(st.integers(0, 2))))
        field = One(held, dtype, 1, hints, True)
        candidates[(name,)] = field.candidate(data.draw(st.sampled_from(["k", "l", "m", "n", None])))
    found = encode(candidates)
    assert list(found) == list(candidates)
    followed(found)
    for path, field in candidates.items():
        assert decoded(found, candidates, path) == field.words.tolist()


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_circle_of_joins(order: tuple[str, ...]) -> None:
    """a = b + c, b = a + c, where c has no words: each of a and b could follow from the other."""
    words, bounds, none = np.arange(7) * 1000 % 777, np.array([0, 3, 7]), np.zeros(3, np.int64)
    of = {
        "a": Candidate(words, bounds, "k", True, 1, ("join:b,c",)),
        "b": Candidate(words, bounds, "l", True, 1, ("join:a,c", "join:c,a")),
        "c": Candidate(words[:0], none, "m", True, 1, ("join:a,b", "join:b,a")),
    }
    candidates = {(name,): of[name] for name in order}
    found = encode(candidates)
    assert sum(isinstance(encoding, Joined) for encoding in found.values()) == 1
    followed(found)
    for path, field in candidates.items():
        assert decoded(found, candidates, path) == field.words.tolist()


@pytest.mark.parametrize("order", list(itertools.permutations(["abc", "ab", "a"])))
def test_a_joined_field_is_no_source_of_a_joined_field(order: tuple[str, ...]) -> None:
    """abc = ab + c and ab = a + b: only one of the two follows from others."""
    of = {
        "a": Candidate(np.array([7, 70]), np.array([0, 1, 2]), "k", True, 1, ()),
        "b": Candidate(np.array([800, 5]), np.array([0, 1, 2]), "l", True, 1, ()),
        "c": Candidate(np.array([6, 600]), np.array([0, 1, 2]), "m", True, 1, ()),
        "ab": Candidate(np.array([7, 800, 70, 5]), np.array([0, 2, 4]), "n", True, 1, ("join:a,b",)),
        "abc": Candidate(np.array([7, 800, 6, 70, 5, 600]), np.array([0, 3, 6]), "o", True, 1, ("join:ab,c",)),
    }
    candidates = {(name,): of[name] for name in dict.fromkeys([*order, *of])}
    found = encode(candidates)
    assert sum(isinstance(encoding, Joined) for encoding in found.values()) == 1
    followed(found)
    for path, field in candidates.items():
        assert decoded(found, candidates, path) == field.words.tolist()


@pytest.mark.parametrize("place", [0, 63, 64, 65, 999])
def test_one_word_makes_a_difference(place: int) -> None:
    words = np.arange(1000) ** 2 % 997
    other = words.copy()
    other[place] += 1
    bounds = np.array([0, 400, 1000])
    fields = {
        ("a",): Candidate(words, bounds, "m", True, 1, ()),
        ("b",): Candidate(other, bounds, "m", True, 1, ()),
        ("c",): Candidate(other.copy(), bounds, "m", True, 1, ()),
    }
    found = encode(fields)
    assert found[("c",)] == Same(("b",))
    assert found[("b",)].decode(words.dtype, bounds).tolist() == other.tolist()


def test_joined_of_a_field_that_is_the_same_as_another() -> None:
    head, tail = np.array([7, 70, 5]), np.array([1, 2])
    whole = np.array([7, 70, 1, 5, 2])
    candidates = {
        ("first",): Candidate(head, np.array([0, 2, 3]), "h", True, 1, ()),
        ("head",): Candidate(head.copy(), np.array([0, 2, 3]), "h", True, 1, ()),
        ("tail",): Candidate(tail, np.array([0, 1, 2]), "t", True, 1, ()),
        ("whole",): Candidate(whole, np.array([0, 3, 5]), "w", True, 1, ("join:head,tail",)),
    }
    found = encode(candidates)
    assert found[("head",)] == Same(("first",))
    assert found[("whole",)] == Joined(("head",), ("tail",))
    assert decoded(found, candidates, ("whole",)) == whole.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"words": np.array([7, 70, 1, 5, 3])},
        {"words": np.array([7, 70, 1, 5, 2], np.int32)},
        {"bounds": np.array([0, 2, 5])},
        {"layout": "h"},
        {"layout": None},
        {"hints": ("join:tail,head",)},
        {"hints": ("join:head,gone",)},
        {"hints": ("join:head,head",)},
        {"hints": ()},
    ],
    ids=str,
)
def test_what_is_not_joined(change: dict[str, Any]) -> None:
    whole = Candidate(np.array([7, 70, 1, 5, 2]), np.array([0, 3, 5]), "w", True, 1, ("join:head,tail",))
    candidates = {
        ("head",): Candidate(np.array([7, 70, 5]), np.array([0, 2, 3]), "h", True, 1, ()),
        ("tail",): Candidate(np.array([1, 2]), np.array([0, 1, 2]), "t", True, 1, ()),
    }
    assert isinstance(encode({**candidates, ("whole",): whole})[("whole",)], Joined)
    candidates[("whole",)] = dataclasses.replace(whole, **change)
    found = encode(candidates)
    assert not isinstance(found[("whole",)], Joined)
    assert decoded(found, candidates, ("whole",)) == candidates[("whole",)].words.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"words": np.array([7, 70, 6])},
        {"words": np.array([7, 70, 5], np.int32)},
        {"words": np.array([7, 70, 5, 5])},
        {"layout": "other"},
        {"layout": None},
    ],
    ids=str,
)
def test_what_is_not_the_same(change: dict[str, Any]) -> None:
    one = Candidate(np.array([7, 70, 5]), np.array([0, 2, 3]), "h", True, 1, ())
    assert encode({("a",): one, ("b",): one})[("b",)] == Same(("a",))
    other = dataclasses.replace(one, **change)
    found = encode({("a",): one, ("b",): other})
    assert not isinstance(found[("b",)], Same)
    assert found[("b",)].decode(other.words.dtype, other.bounds).tolist() == other.words.tolist()
    dense = dataclasses.replace(one, layout=None)
    assert not isinstance(encode({("a",): dense, ("b",): dense})[("b",)], Same)


def test_a_joined_field_in_a_sub_batch_takes_its_neighbours() -> None:
    head = Candidate(np.array([7, 70, 5]), np.array([0, 2, 3]), "h", True, 1, ())
    tail = Candidate(np.array([1, 2]), np.array([0, 1, 2]), "t", True, 1, ())
    whole = Candidate(np.array([7, 70, 1, 5, 2]), np.array([0, 3, 5]), "w", True, 1, ("join:head,more/tail",))
    near = {("sub", "head"): head, ("sub", "more", "tail"): tail, ("sub", "whole"): whole, ("head",): tail}
    assert encode(near)[("sub", "whole")] == Joined(("sub", "head"), ("sub", "more", "tail"))
    far = {("head",): head, ("more", "tail"): tail, ("sub", "whole"): whole}
    assert not isinstance(encode(far)[("sub", "whole")], Joined)


def test_encodings_that_are_known_are_taken() -> None:
    bounds, known = np.array([0, 2, 3]), Plain(np.array([7, 70, 5]))
    one = Candidate(None, bounds, "h", True, 1, (), known, np.dtype(np.int64))
    tail = Candidate(np.array([1, 2]), np.array([0, 1, 2]), "t", True, 1, ())
    whole = Candidate(np.array([7, 70, 1, 5, 2]), np.array([0, 3, 5]), "w", True, 1, ("join:a,t",))
    found = encode({("w",): whole, ("a",): one, ("b",): one, ("t",): tail})
    assert found[("a",)] is known
    assert found[("b",)] == Same(("a",))
    assert found[("w",)] == Joined(("a",), ("t",))
    other = dataclasses.replace(one, dtype=np.dtype(np.int32), encoding=Plain(np.array([7, 70, 5], np.int32)))
    assert not isinstance(encode({("a",): one, ("b",): other})[("b",)], Same)


# -------------------------------------------------------------------- whole batches, any registry


@st.composite
def any_hints(draw: st.DrawFn, registry: Any) -> Any:
    """The registry with hints of any kind at any field."""
    names = draw(st.lists(st.sampled_from(sorted(registry, key=str)), max_size=8, unique=True))
    hints = st.lists(st.sampled_from(ANY_HINT), max_size=3).map(tuple)
    return registry | {name: dataclasses.replace(registry[name], hints=draw(hints)) for name in names}


@quiet
@given(batches(objects=False), st.data())
def test_hints_change_no_bit(case: Case, data: st.DataObject) -> None:
    registry = data.draw(any_hints(case.registry))
    packed = compress(case.batch, registry=registry, pad_token_id=case.pad_token_id)
    followed(packed.fields)
    assert_same_batch(decompress(packed), case.batch)
    assert_same_batch(unnest(decompress(packed, format="nested")), case.batch)


ORDERLY = ("x", "y", "advantages", "token_level_scores", "routed")


@st.composite
def orderly(draw: st.DrawFn, prompt: int, response: int, rope: int) -> TensorDict:
    """A batch whose values have the regularities that encodings are for, different ones in each batch."""
    rng = draw(strategies.generators())
    rows = draw(st.integers(0, 5))
    p, r = rng.integers(0, prompt + 1, rows), rng.integers(0, response + 1, rows)
    if draw(st.booleans()):  # a group of responses to one prompt
        p[:] = p[:1]
    places = np.arange(prompt + response)
    mask = (places >= prompt - p[:, None]) & (places < prompt + r[:, None])
    tail = mask[:, prompt:]
    prompts = rng.integers(1, 10 ** draw(st.integers(1, 9)), (rows, prompt))
    if draw(st.booleans()):
        prompts[:] = prompts[:1]
    prompts *= mask[:, :prompt]
    responses = rng.integers(1, 10 ** draw(st.integers(1, 9)), (rows, response)) * tail
    text = np.clip(np.cumsum(mask, 1) - 1, 0, None)
    fields: dict[str, np.ndarray] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], 1),
        "attention_mask": mask.astype(np.int64),
        "position_ids": np.stack([text // (way + 1) for way in range(rope)], 1) if rope else text,
        "response_mask": tail * rng.integers(draw(st.integers(0, 1)), 2, tail.shape),
    }
    if rows and draw(st.integers(0, 3)) == 0:
        fields["input_ids"][mask] += 1
    for name in ORDERLY:
        way = draw(st.sampled_from(["row", "sparse", "noise", "zero", "few", "ramp", "repeated"]))
        made = {
            "row": rng.integers(-3, 3, (rows, 1)) + np.zeros(tail.shape, np.int64),
            "sparse": rng.integers(1, 99, tail.shape) * (rng.random(tail.shape) < 0.1),
            "noise": rng.integers(-(2**31), 2**31, tail.shape),
            "zero": np.zeros(tail.shape, np.int64),
            "few": rng.choice([3, 2**40], tail.shape),
            "ramp": np.arange(response) * 3 + rng.integers(0, 9, (rows, 1)),
            "repeated": np.repeat(rng.integers(0, 2**30, (1, response)), rows, 0),
        }[way]
        fields[name] = made * tail
    if draw(st.booleans()):
        fields["y"] = fields["x"].copy()
    batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in fields.items()}
    for name in ("advantages", "token_level_scores"):
        batch[name] = batch[name].to(torch.float32) * torch.from_numpy(tail)
    batch["routed"] = batch["routed"].to(torch.int16)[..., None].repeat(1, 1, 2)
    batch["weight"] = torch.from_numpy(rng.integers(0, 3, rows))
    return TensorDict(batch, batch_size=[rows])


REGISTRY = RL_FIELDS | {
    **{name: MaskNestingSpec("response") for name in ("x", "y", "routed")},
    "position_ids": MaskNestingSpec("sequence", EDGE, ragged_dim=-1, hints=("columns", "ramp")),
}


@quiet
@given(st.data())
def test_row_operations_on_parts_with_different_encodings(data: st.DataObject) -> None:
    """Parts packed apart, each with hints of its own, then joined and moved: as the padded rows."""
    prompt, response = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 4, 9, 80]))
    rope = data.draw(st.sampled_from([0, 0, 3]))
    parts = data.draw(st.lists(orderly(prompt, response, rope), min_size=1, max_size=3))
    packs: list[PackedBatch] = []
    for part in parts:
        packed = compress(part, registry=data.draw(any_hints(REGISTRY)), pad_token_id=0)
        ops = data.draw(row_ops(len(part), max_size=2)) if data.draw(st.booleans()) else []
        for op in ops:
            packed = op.on_packed(packed)
        parts[len(packs)] = oracle.take_rows(part, rows_after(ops, len(part), even_chunks=True))
        packs.append(packed)
    whole = PackedBatch.cat(packs)
    padded = torch.cat(parts)
    ops = data.draw(row_ops(len(padded)))
    moved = whole
    for op in ops:
        moved = op.on_packed(moved)
    want = oracle.take_rows(padded, rows_after(ops, len(padded), even_chunks=True))
    for packed, expected in ((whole, padded), (moved, want)):
        followed(packed.fields)
        assert_same_batch(decompress(packed), expected)
        assert_same_batch(unnest(decompress(packed, format="nested")), expected)
        for path, encoding in packed.fields.items():
            if not isinstance(encoding, Same | Joined):
                dtype = np.dtype(f"i{packed.forms[path].dtype.itemsize}")
                assert encoding.problem(dtype, packed.bounds(path)) is None
