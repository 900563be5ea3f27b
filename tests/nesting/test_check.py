"""check and strict mode: no tensor hides, planted mistakes are found, and sound batches raise no alarm."""

from __future__ import annotations

import dataclasses
import subprocess
import warnings
from collections import deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_presets
import torch
import warm_workers
from fuzz_wire import with_peak
from samples import PAD, assert_same, freeze, per_row, rollout
from tensordict import NonTensorData, TensorDict, lazy_stack

import maskpack as mp
from maskpack import fields
from maskpack.errors import MaskpackWarning
from maskpack.nesting.check import COVERAGE
from maskpack.testing import assert_covered

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    name: str
    tokens: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slim:
    tokens: torch.Tensor


class Slotted:
    """Not a dataclass; `other` is not set."""

    __slots__ = ("other", "tokens")

    def __init__(self, tokens):
        self.tokens = tokens


class Plain:
    label = "a class attribute"

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def cyclic():
    item = {"tokens": torch.ones(3)}
    item["self"] = [item]
    other = Plain(back=item)
    other.me = other
    item["other"] = other
    return item


def object_array(*items):
    out = np.empty(len(items), dtype=object)
    out[:] = items
    return out


HIDING = {
    "dict": ({"a": torch.ones(3)}, ["a"]),
    "list": ([1, torch.ones(3)], ["[1]"]),
    "tuple": ((torch.ones(3), None), ["[0]"]),
    "deque": (deque([torch.ones(3)]), ["[0]"]),
    "set": ({torch.ones(3)}, ["[0]"]),
    "object array": (object_array("a", torch.ones(3)), ["[1]"]),
    "dataclass": (Record("a", torch.ones(3)), ["tokens"]),
    "dataclass with slots": (Slim(torch.ones(3)), ["tokens"]),
    "slots": (Slotted(torch.ones(3)), ["tokens"]),
    "attribute": (Plain(a=1, tokens=torch.ones(3)), ["tokens"]),
    "sub-TensorDict": ({"td": TensorDict({"x": torch.ones(3)}, batch_size=[3])}, ["td", "x"]),
    "module": (torch.nn.Linear(3, 1, bias=False), ["_parameters", "weight"]),
    "deep": ({"a": [Record("b", {"c": (Plain(d=[torch.ones(3)]),)})]}, ["a", "[0]", "tokens", "c", "[0]", "d", "[0]"]),
    "cyclic": (cyclic(), ["tokens"]),
    "requires grad": ([torch.ones(3, requires_grad=True)], ["[0]"]),
}


def entry(value, rows=2):
    return NonTensorData(value, batch_size=[rows])


def with_object(value, name="extra"):
    batch = TensorDict({"attention_mask": torch.ones(2, 4)}, batch_size=[2])
    return batch.set(name, entry(value))


def covered(batch, registry=mp.RL_FIELDS, **options):
    """The findings that strict mode makes errors of."""
    return [one for one in mp.check(batch, registry, **options) if one.kind in COVERAGE]


def paths(batch, registry=mp.RL_FIELDS, **options):
    return [one.path for one in covered(batch, registry, pad_token_id=PAD, **options)]


@pytest.mark.parametrize(("value", "place"), HIDING.values(), ids=HIDING)
def test_a_tensor_inside_an_object_is_found(value, place):
    """In one of the batch, and in one of a row."""
    rows = TensorDict({}, batch_size=[3]).set("extra", per_row(["nothing", value, None]))
    assert paths(rows) == [("extra", "[1]", *place)]
    batch = with_object(value)
    assert paths(batch) == [("extra", *place)]
    for call in (
        lambda: mp.nest_batch_by_mask(batch, strict_mask_nesting=True),
        lambda: mp.compress(batch, strict_mask_nesting=True),
    ):
        with pytest.raises(mp.errors.CoverageError) as caught:
            call()
        assert f'"{"/".join(["extra", *place])}"' in str(caught.value)
        assert "12 bytes" in str(caught.value)
    mp.nest_batch_by_mask(batch)  # not strict: objects travel as they are


@pytest.mark.parametrize(
    "value",
    [b"bytes", {"a": [1, "b", None]}, np.arange(5), torch.float32, Record, [torch.tensor(2)], Plain(), len],
    ids=lambda value: type(value).__name__,
)
def test_an_object_without_a_tensor_is_no_failure(value):
    assert paths(with_object(value)) == []


def test_a_tensor_named_twice_is_listed_once():
    tensor = torch.ones(3)
    assert paths(with_object([tensor, {"again": tensor}])) == [("extra", "[0]")]


def test_a_range_is_not_counted_out():
    """A pickle of a few bytes makes one of any length; nor are single bytes looked at."""
    batch = rollout()
    batch.set("meta", NonTensorData([range(1 << 20), bytearray(1 << 20)]))
    found, peak = with_peak(mp.check, batch, pad_token_id=PAD)
    assert [one for one in found if one.kind in COVERAGE] == []
    assert peak < 8 << 20


def test_deep_nesting_does_not_overflow():
    value = torch.ones(3)
    for _ in range(5000):
        value = [value]
    assert len(paths(with_object({"deep": value}))) == 1


# -------------------------------------------------------------------- tensors of the batch


def test_the_objects_of_all_rows_are_one_line():
    rows = 512
    batch = TensorDict({"attention_mask": torch.ones(rows, 4)}, batch_size=[rows])
    batch.set("images", per_row([{"pixels": torch.ones(3, 1 + row)} for row in range(rows)]))
    batch.set("audio", per_row([torch.ones(2), *[None] * (rows - 1)]))
    batch["secret"] = torch.ones(rows, 3)
    nbytes = 12 * sum(range(1, rows + 1))
    lines = [
        f'  "secret" (512, 3) float32, {12 * rows:,} bytes: the registry does not know it',
        f'  "images/[0]/pixels" (3, 1) float32, {nbytes:,} bytes: with 511 more, tensors inside Python objects',
        '  "audio/[0]" (2,) float32, 8 bytes: a tensor inside the Python object "audio"',
    ]
    with pytest.raises(mp.errors.CoverageError) as caught:
        mp.compress(batch, strict_mask_nesting=True)
    first, *listed, last = str(caught.value).splitlines()
    assert first.startswith("compress: 3 field(s) would stay padded")
    assert listed == lines
    assert "with MaskNestingSpec(None) a field, or the Python object" in last
    found = mp.check(batch)
    assert [f"  {one.line}" for one in found] == lines
    assert [one.kind for one in found] == ["padded", "hidden", "hidden"]


def test_what_the_error_says_to_do_covers_a_batch():
    batch = rollout()
    batch["secret"] = torch.ones(7, 300)
    batch.set("extra", per_row([{"t": torch.ones(2)}] + [None] * 6))
    options = {"pad_token_id": PAD, "strict_mask_nesting": True}
    with pytest.raises(
        mp.errors.CoverageError,
        match=r"with MaskNestingSpec\(None\) a field, or the Python object that the tensor is in, may stay",
    ):
        mp.compress(batch, **options)
    registry = mp.RL_FIELDS | dict.fromkeys(("secret", "extra"), mp.MaskNestingSpec(None))
    assert_same(mp.decompress(mp.compress(batch, **options, registry=registry)), batch)


def test_lists_of_tensors_are_made_jagged_columns():
    data = {"responses": [torch.arange(1, 4), torch.arange(1, 3)], "uid": ["a", "b"]}
    with pytest.raises(mp.errors.LayoutError) as raised:
        mp.compress(data)
    remedy = "torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
    assert f"Make a list of tensors a jagged column: {remedy}. Then wrap the columns" in str(raised.value)
    batch = TensorDict(data, batch_size=[2])
    with pytest.raises(mp.errors.CoverageError) as raised:
        mp.compress(batch, strict_mask_nesting=True)
    assert str(raised.value).endswith(f"Make a list of tensors a jagged column: {remedy}.")
    images = TensorDict({"x": [torch.ones(2, 3), torch.ones(1, 4)]}, batch_size=[2])  # no column
    (one,) = mp.check(images)
    assert "with MaskNestingSpec(None) a field" in one.remedy
    batch["responses"] = eval(remedy, {"torch": torch, "rows": data["responses"]})
    got = mp.decompress(mp.compress(batch, strict_mask_nesting=True))
    assert [row.tolist() for row in got["responses"].unbind()] == [[1, 2, 3], [1, 2]]
    assert got["uid"] == ["a", "b"]


def test_one_entry_a_row_is_no_failure():
    batch = TensorDict({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}, batch_size=[3])
    batch["sub", "c"] = torch.ones(3)
    assert paths(batch, {}) == []
    mp.nest_batch_by_mask(batch, {}, strict_mask_nesting=True)
    mp.compress(batch, registry={}, strict_mask_nesting=True)
    batch["d"] = torch.ones(3, 1)
    assert paths(batch, {}) == [("d",)]


def test_jagged_fields_are_no_failure():
    assert paths(mp.nest_batch_by_mask(rollout(), pad_token_id=PAD)) == []
    own = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert paths(TensorDict({"unknown": own}, batch_size=[2])) == []


def test_a_sparse_tensor_is_dense_to_us():
    """It can be neither nested nor packed; it stays as it is, or the error has a name."""
    batch = TensorDict({"graph": torch.eye(3).to_sparse()}, batch_size=[3])
    (found,) = mp.check(batch, {})
    assert "sparse" in found.seen
    with pytest.warns(mp.errors.MaskpackWarning, match="graph"):
        nested = mp.nest_batch_by_mask(batch, {})
    assert nested["graph"] is batch["graph"]
    with pytest.raises(mp.errors.LayoutError, match='"graph"'):
        mp.compress(batch, registry={})


# -------------------------------------------------------------------- declared dense


ALLOWED = [
    ([], {("x",), ("a", "x"), ("a", "b", "x"), ("o", "t")}),
    (["x"], {("o", "t")}),
    ([("a", "x")], {("x",), ("a", "b", "x"), ("o", "t")}),
    ([("a", "b", "x"), "o"], {("x",), ("a", "x")}),
    ({"x", "o"}, set()),
    (("unknown",), {("x",), ("a", "x"), ("a", "b", "x"), ("o", "t")}),
]


@pytest.mark.parametrize(("allowed", "left"), ALLOWED, ids=range(len(ALLOWED)))
def test_fields_without_a_mask_by_path_and_by_last_name(allowed, left):
    batch = TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])
    batch["a", "x"] = torch.ones(2, 4)
    batch["a", "b", "x"] = torch.ones(2, 5)
    batch.set("o", entry({"t": torch.ones(2)}))
    registry = dict.fromkeys(allowed, mp.MaskNestingSpec(None))
    assert set(paths(batch, registry)) == left
    if left:
        with pytest.raises(mp.errors.CoverageError, match=rf"{len(left)} field\(s\)"):
            mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True)
    else:
        nested = mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True)
        assert_same(mp.unnest_batch_by_mask(nested), batch)
        packed = mp.compress(batch, registry=registry, strict_mask_nesting=True)
        assert_same(mp.decompress(packed), batch)


def test_records_go_nowhere_unless_the_program_says_so() -> None:
    code = (
        "import logging, maskpack; log = logging.getLogger('maskpack.dispatch.call'); log.error('lost');"
        "print([type(handler).__name__ for handler in logging.getLogger('maskpack').handlers], logging.root.handlers)"
    )
    done = subprocess.run([*warm_workers.python(), "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("['NullHandler'] []\n", "")


# -------------------------------------------------------------------- declared fields off their axis

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)


def masked(**more):
    return TensorDict({"responses": MASK * 7, "response_mask": MASK, **more}, [2])


def of_slime(*lengths):
    counts = {"total_lengths": torch.tensor([5, 6]), "response_lengths": torch.tensor([3, 4])}
    return TensorDict({"tokens": jagged(5, 6), "rollout_log_probs": jagged(*lengths), **counts}, [2])


def nested(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)
        return mp.nest_batch_by_mask(batch, pad_token_id=0)


OFF = {
    "jagged": (lambda *n: masked(values=jagged(*n)), mp.RL_FIELDS, "response"),
    "on the sequence": (
        lambda *n: TensorDict({"attention_mask": MASK, "values": jagged(*n)}, [2]),
        mp.RL_FIELDS,
        "sequence",
    ),
    "in a sub-batch": (lambda *n: masked(sub=TensorDict({"values": jagged(*n)}, [2])), mp.RL_FIELDS, "response"),
    "new in a nested batch": (lambda *n: nested(masked()).update({"values": jagged(*n)}), mp.RL_FIELDS, "response"),
    "nested before": (lambda *n: nested(masked(values=jagged(*n))), mp.RL_FIELDS, "response"),
    "lengths": (of_slime, fields.slime, "response"),
}
CALLS = {"compress": lambda batch, registry, **more: mp.compress(batch, registry=registry, **more)}
CALLS["nest_batch_by_mask"] = mp.nest_batch_by_mask


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("make", "registry", "mask"), OFF.values(), ids=OFF)
def test_a_declared_jagged_field_of_other_rows_than_its_mask(make, registry, mask, call):
    """Also where batches of the same fields were seen before, with these rows or with others."""
    for lengths, seen in (
        ((3, 4), None),
        ((2, 4), "row 0 has 2 tokens; mask"),
        ((3, 4), None),
        ((3, 5), "row 1 has 5"),
    ):
        batch, options = make(*lengths), {"pad_token_id": 0, "strict_mask_nesting": True}
        if seen is None:
            call(batch, registry, **options)
            continue
        with pytest.warns(
            MaskpackWarning, match=rf'fields have other rows than their mask: "[\w/]+" \(mask "{mask}"\)'
        ):
            call(batch, registry, pad_token_id=0)
        with pytest.raises(mp.errors.CoverageError, match=seen) as caught:
            call(batch, registry, **options)
        assert "Fix the producer" in str(caught.value)
        with pytest.raises(AssertionError, match=seen) as told:
            assert_covered(batch, registry, pad_token_id=0)
        assert str(told.value).splitlines()[2:] == [
            "Fix the producer of a field that has other rows, or give it another mask in the registry."
        ]
        (off,) = mp.check(batch, registry, pad_token_id=0)
        assert (off.kind, off.rows) == ("axis", (int(seen[4]),))
        call(batch, registry | {off.path[-1]: mp.MaskNestingSpec(None)}, **options)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_declared_line_of_other_tokens_than_its_bounds(call):
    """[T] with cu_seqlens; a number a row, and one for all, are no lines."""
    bounds = {"cu_seqlens": torch.tensor([0, 4, 4, 9]), "token_ids": torch.ones(9, dtype=torch.long)}
    options = {"pad_token_id": 0, "strict_mask_nesting": True}
    for size in ((9,), (3,), ()):
        call(TensorDict({**bounds, "logprobs": torch.ones(size), "unknown": torch.ones(6)}), fields.prime_rl, **options)
    batch = TensorDict({**bounds, "logprobs": torch.ones(6)})
    with pytest.warns(MaskpackWarning, match=r'fields have other rows than their mask: "logprobs" \(mask "sequence"\)'):
        call(batch, fields.prime_rl, pad_token_id=0)
    with pytest.raises(mp.errors.CoverageError, match=r'"logprobs" \(6,\).*: it has 6 tokens; mask "sequence" has 9'):
        call(batch, fields.prime_rl, **options)
    with pytest.raises(AssertionError, match='"logprobs"'):
        assert_covered(batch, fields.prime_rl)
    call(batch, fields.prime_rl | {"logprobs": mp.MaskNestingSpec(None)}, **options)


def test_results_of_other_rows_than_the_batch_that_they_are_like():
    like = mp.compress(masked(), pad_token_id=0)
    mp.compress(TensorDict({"values": jagged(3, 4)}, [2]), like=like, strict_mask_nesting=True)
    with pytest.raises(mp.errors.CoverageError, match=r'row 0 has 2 tokens; mask "response" has 3'):
        mp.compress(TensorDict({"values": jagged(2, 4)}, [2]), like=like, strict_mask_nesting=True)


def test_fields_of_an_axis_that_jagged_columns_give_are_no_failure():
    """The response axis of a batch of verl whose responses are jagged; a number a row beside them."""
    batch = TensorDict({"attention_mask": MASK, "input_ids": MASK, "responses": jagged(2, 1).long()}, [2])
    batch["old_log_probs"], batch["advantages"] = jagged(2, 1), torch.ones(2)
    for call in CALLS.values():
        call(batch, mp.RL_FIELDS, pad_token_id=0, strict_mask_nesting=True)
        with pytest.raises(mp.errors.CoverageError, match=r'"values" .*: row 0 has 3 tokens; mask "response" has 2'):
            call(batch.copy().update({"values": jagged(3, 2)}), mp.RL_FIELDS, pad_token_id=0, strict_mask_nesting=True)


# -------------------------------------------------------------------- warnings


@pytest.mark.parametrize("call", [mp.compress, mp.nest_batch_by_mask])
def test_a_warning_says_what_the_batch_takes_all_the_same_once_a_schema(call) -> None:
    """Of a batch with rows of other shapes, which have no stack."""

    def batch(width: int) -> TensorDict:
        mask = torch.arange(width) < 2
        fields = {
            "attention_mask": mask.expand(4, -1).long(),
            "position_ids": (torch.arange(width) * mask).expand(4, -1),
        }
        out = TensorDict({**fields, f"once {call.__name__}": torch.zeros(4, 5)}, [4])
        return out.set("lazy", lazy_stack([TensorDict({"a": torch.ones(row + 1)}) for row in range(4)]))

    with pytest.warns(MaskpackWarning) as first:
        done = call(batch(100))
    with pytest.warns(MaskpackWarning) as second:
        call(batch(300))
    padded = 4 * (2 * 100 * 8 + 5 * 4)
    packed = done.nbytes if call is mp.compress else 4 * (2 * 2 * 8 + 5 * 4)
    said = [str(one.message) for one in first]
    assert len(said) == 1
    assert said[0].endswith(f"; the first such batch takes {packed:,} bytes instead of {padded:,} all the same")
    assert [str(one.message) for one in second] == said, "Python shows equal texts once"


# -------------------------------------------------------------------- planted mistakes

EOS = 2


class Rows(test_presets.Maker):
    """Rows of two or more prompt tokens and of a scored response token; a seed draws the rest."""

    def __init__(self, seed, count=6, most=9):
        super().__init__(seed, count=count, most=most, empty=False)
        for row in self.rows:
            row.ids, row.prompt, row.scored = [3, 4, *row.ids], row.prompt + 2, [0, 0, *row.scored]
            row.ids, row.scored[row.prompt] = [max(token, 3) for token in row.ids], 1
        self.log_probs = [[-1 - self.rng.random() for _ in row.ids] for row in self.rows]


def v1(make):
    """verl's V1: jagged columns without masks, each with offsets of its own."""
    padded = test_presets.verl(make)
    on, columns = padded["attention_mask"] != 0, padded["prompts"].shape[1]
    places = {"prompts": on[:, :columns], "input_ids": on, "position_ids": on}
    values = {name: (x, places.get(name, on[:, columns:])) for name, x in padded.exclude("attention_mask").items()}
    rows = {name: [own[at] for own, at in zip(x, place, strict=True)] for name, (x, place) in values.items()}
    return TensorDict(
        {name: torch.nested.as_nested_tensor(own, layout=torch.jagged) for name, own in rows.items()}, [len(padded)]
    )


TRAINERS = {**test_presets.CASES, "verl v1": v1}


def sound(trainer, seed=0, **more):
    torch.manual_seed(seed)
    return TRAINERS[trainer](Rows(seed, **more))


def findings(batch, trainer, **options):
    registry = test_presets.registry_of(trainer) | options.pop("registry", {})
    return mp.check(batch, registry, pad_token_id=PAD, **{"eos_token_id": EOS, **options})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_sound_batches_have_no_findings(trainer):
    """2,000 of them: left and right pads, holes, log-probs of 0, weights as masks, groups, rows of one token."""
    for seed in range(-(-2000 // len(TRAINERS))):
        batch = sound(trainer, seed, count=2 + seed % 5, most=1 + seed % 9)
        if seed % 3 == 0:
            batch.set(
                "uid", per_row([str(row // 2) for row in range(len(batch) // 2 * 2)] + ["last"] * (len(batch) % 2))
            )
        if seed % 4 == 0 and trainer in ("verl", "verl v1"):
            batch["response_mask"] = batch["response_mask"] * 0.5
        if seed % 5 == 0 and trainer == "verl":
            batch["old_log_probs"][:, ::2] = 0
        assert findings(batch, trainer) == [], seed


def test_prompts_alone_empty_rows_and_batches_without_rows():
    prompts = rollout(((3, 0), (0, 0), (5, 0)), objects=False).exclude("position_ids")
    assert mp.check(prompts, pad_token_id=PAD, eos_token_id=PAD) == []
    assert mp.check(rollout((), objects=False), pad_token_id=PAD, eos_token_id=PAD) == []


def short_row(mask):
    """A row of several tokens that ends before the width."""
    return next(row for row, on in enumerate(mask != 0) if int(on.sum()) > 1 and not on[-1])


def with_field(name, value):
    def change(batch):
        batch.set(name, value)

    return change


def of_rows(name, make, row=None):
    """A column of Python objects."""

    def change(batch):
        batch.set(name, per_row([make(batch, at) for at in range(len(batch))]))
        return row

    return change


def put(name, row, column, value):
    def change(batch):
        x = batch[name]
        (x.unbind()[row] if x.is_nested else x[row])[column] = value
        return row

    return change


def rolled(name, by):
    def change(batch):
        batch[name] = batch[name].roll(by, 1)
        return 0

    return change


def narrow(batch):
    batch["advantages"] = batch["advantages"][:, 1:].clone()


def wide(batch):
    batch["advantages"] = torch.nn.functional.pad(batch["advantages"], (1, 0))


def cut(by):
    def change(batch):
        whole = batch["log_probs"].unbind()
        rows = [own[: len(own) - by * (at == 2)] for at, own in enumerate(whole)]
        batch["rollout_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return 2

    return change


def mask_beyond(batch):
    row = short_row(batch["attention_mask"])
    batch["response_mask"][row, -1] = 1
    return row


def mask_of_tokens(batch):
    batch["response_mask"] *= batch["attention_mask"][:, batch["prompts"].shape[1] :]


def loss_beyond(batch):
    batch["token_mask"][:, -1] = 1
    return int((batch["input_lengths"] < batch["token_mask"].shape[1]).nonzero()[0])


def loss_of_tokens(batch):
    batch["token_mask"] *= torch.arange(batch["token_mask"].shape[1]) < batch["input_lengths"][:, None]


def numbered(batch):
    columns = batch["attention_mask"][1].nonzero()[:, 0]
    batch["attention_mask"][1, columns[2:]] = 2
    return 1


def bounds(batch):
    """The row alone, beside the lengths of its documents."""
    on = batch["attention_mask"][1]
    return TensorDict({**batch[1:2], "seq_lens": torch.unique_consecutive(on[on > 0], return_counts=True)[1]}, [])


def positions_again(batch):
    batch["position_ids"][1, 2 : int(batch["attention_mask"][1].sum())] -= 2
    return 1


def positions_from_1(batch):
    batch["position_ids"][5] += 1
    return 5


def later(by):
    def change(batch):
        batch["position_ids"].unbind()[3].add_(by)
        return 3

    return change


def counted(batch):
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)


def counted_right(batch):
    counted(batch)
    batch["position_ids"] *= batch["attention_mask"]


def token_beyond(batch):
    row = short_row(batch["completion_mask"])
    batch["completion_ids"][row, -1] = 9
    return row


def pads_beyond(batch):
    batch["completion_ids"][batch["completion_mask"] == 0] = PAD


def ends_of_pads(batch):
    """Each row ends with the pad token, which its mask of `ids != pad` hides."""
    return short_row(batch["completion_mask"])


def ends_in_mask(batch):
    lengths = batch["completion_mask"].sum(1)
    batch["completion_mask"][torch.arange(batch["completion_mask"].shape[1]) == lengths[:, None]] = 1


def unscored(name, row):
    def change(batch):
        batch[name][row] = 0
        return row

    return change


def without(row):
    return lambda batch: batch[[at for at in range(len(batch)) if at != row]]


def responses_again(batch):
    if not batch["responses"].is_nested:
        batch["responses"] = batch["input_ids"][:, batch["prompts"].shape[1] :].clone()
        return
    for own, whole in zip(batch["responses"].unbind(), batch["input_ids"].unbind(), strict=True):
        own.copy_(whole[len(whole) - len(own) :])


def image(patches):
    grid = torch.tensor([[1, 2, 2]])
    return lambda batch, row: {"pixel_values": torch.ones(patches if row == 2 else 4, 3), "image_grid_thw": grid}


def experts(less):
    return lambda batch, row: np.zeros((int(batch["input_lengths"][row]) - less * (row == 3), 2), np.int64)


class Planted(NamedTuple):
    """A mistake: the trainer, what makes it (and returns its row, if it is of rows), the field and the kind that are
    found, and what the remedy says: a change of the batch, or a spec of the field."""

    trainer: str
    plant: Any
    field: str
    kind: str
    mend: Any


KEPT, NAN, INFINITE = mp.MaskNestingSpec(None), float("nan"), float("-inf")
UIDS, MINE = (lambda batch, row: "abcdef"[row]), (lambda batch, row: [torch.ones(2)])
PLANTED = {
    "another width": Planted("nemo_rl", narrow, "advantages", "axis", wide),
    "other row lengths": Planted("slime jagged", cut(1), "rollout_log_probs", "axis", cut(0)),
    "stays padded": Planted("trl", with_field("mine", torch.ones(6, 3)), "mine", "padded", KEPT),
    "hidden": Planted("slime", of_rows("mine", MINE), "mine/[0]/[0]", "hidden", KEPT),
    "a mask of pads": Planted("verl", mask_beyond, "response_mask", "mask", mask_of_tokens),
    "a mask of its own axis": Planted("nemo_rl", loss_beyond, "token_mask", "mask", loss_of_tokens),
    "a mask to the left": Planted(
        "areal rollout", rolled("loss_mask", -1), "loss_mask", "shift", rolled("loss_mask", 1)
    ),
    "a mask with numbers": Planted("verl", numbered, "attention_mask", "documents", bounds),
    "positions again": Planted("prime_rl", positions_again, "position_ids", "documents", counted_right),
    "a token under the mask": Planted("trl", token_beyond, "completion_ids", "lossy", pads_beyond),
    "a hidden end": Planted("trl rows", ends_of_pads, "completion_ids", "eos", ends_in_mask),
    "nothing scored": Planted("verl", unscored("response_mask", 4), "response_mask", "unscored", without(4)),
    "no loss": Planted("areal rollout", unscored("loss_mask", 2), "loss_mask", "unscored", without(2)),
    "experts": Planted(
        "nemo_rl",
        of_rows("routed_experts", experts(1), 3),
        "routed_experts",
        "counts",
        of_rows("routed_experts", experts(0)),
    ),
    "patches": Planted(
        "verl v1",
        of_rows("multi_modal_inputs", image(5), 2),
        "multi_modal_inputs",
        "counts",
        of_rows("multi_modal_inputs", image(4)),
    ),
    "NaN": Planted(
        "slime",
        put("rollout_log_probs", 3, 0, NAN),
        "rollout_log_probs",
        "nonfinite",
        put("rollout_log_probs", 3, 0, -1.0),
    ),
    "infinite": Planted(
        "verl v1", put("old_log_probs", 2, 0, INFINITE), "old_log_probs", "nonfinite", put("old_log_probs", 2, 0, -1.0)
    ),
    "a uid twice": Planted(
        "verl", of_rows("uid", lambda batch, row: "abcdee"[row], 4), "uid", "groups", of_rows("uid", UIDS)
    ),
    "positions from 1": Planted("verl", positions_from_1, "position_ids", "positions", counted),
    "jagged positions": Planted("verl v1", later(2), "position_ids", "positions", later(-2)),
    "another response": Planted("verl v1", put("responses", 0, 0, 7), "responses", "tail", responses_again),
    "another padded response": Planted("verl", put("responses", 3, 0, 8), "responses", "tail", responses_again),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_gone_after_the_remedy(name):
    trainer, plant, field, kind, mend = PLANTED[name]
    batch, eos = sound(trainer), PAD if kind == "eos" else EOS
    assert kind == "eos" or findings(batch, trainer, eos_token_id=eos) == []
    row = plant(batch)
    before = freeze(batch)
    (one,) = findings(batch, trainer, eos_token_id=eos)
    assert freeze(batch) == before
    assert ("/".join(one.path), one.kind) == (field, kind)
    assert one.rows == () if row is None else row in one.rows
    assert str(one).startswith(f"{kind}: ")
    assert f'"{field}" ' in str(one)
    assert str(one).endswith(f". {one.remedy}")
    assert "\n" not in str(one)
    registry = {one.path[0]: mend} if isinstance(mend, mp.MaskNestingSpec) else {}
    changed = None if registry else mend(batch)
    assert (
        findings(changed if isinstance(changed, TensorDict) else batch, trainer, eos_token_id=eos, registry=registry)
        == []
    )


def test_names_of_ones_own_are_judged_by_their_axes():
    """Token ids are the field of the sequence with the pad token, scored tokens those of the response's mask."""
    registry = mp.MaskNestingRegistry(
        {
            "ids": mp.MaskNestingSpec("sequence", mp.PAD_TOKEN_ID),
            "real": mp.MaskNestingSpec("sequence"),
            "train": mp.MaskNestingSpec("response"),
            "weights": mp.MaskNestingSpec("response", mp.ZERO),
        },
        axes={"sequence": mp.MaskAxis("real"), "response": mp.MaskAxis("train")},
    )
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    train = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 0, 0], [0, 1, 1, 1, 0]])
    batch = TensorDict({"ids": 7 * real, "real": real, "train": train, "weights": train * 0.5}, [3])
    assert mp.check(batch, registry, pad_token_id=0) == []
    batch["weights"][2, 1] = NAN
    (one,) = mp.check(batch, registry, pad_token_id=0)
    assert (one.path, one.kind, one.rows) == (("weights",), "nonfinite", (2,))
    batch["weights"][2, 1] = 0.5
    batch["train"][1, 4] = 1
    (one,) = mp.check(batch, registry, pad_token_id=0)
    assert (one.path, one.kind, one.rows) == (("train",), "mask", (1,))
    batch["train"] *= batch["real"]  # the remedy
    batch["train"][0] = batch["weights"][0] = 0
    (one,) = mp.check(batch, registry, pad_token_id=0)
    assert (one.path, one.kind, one.rows) == (("train",), "unscored", (0,))


def test_sections_that_torch_took_for_tokens():
    """As it does with rows [4, T] of one length."""
    ids, rows = [torch.tensor([5, 6, 7])] * 2, [torch.arange(3).expand(4, 3)] * 2
    turned = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged), "position_ids": turned}, [2]
    )
    (one,) = mp.check(batch, pad_token_id=PAD)
    assert (one.path, one.kind, one.rows) == (("position_ids",), "axis", (0, 1))
    assert "has rows [4, 3]: torch took the first dim for tokens" in one.line
    assert "torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)" in one.remedy
    values, offsets = torch.cat(rows, 1), batch["input_ids"].offsets()
    batch["position_ids"] = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    assert mp.check(batch, pad_token_id=PAD) == []


@pytest.mark.parametrize("shape", [(2,), (2, 4, 3), (2, 2)])
def test_rows_of_one_other_length_are_not_taken_for_sections(shape):
    """Rows of two tokens beside three: only [n, T] may be turned."""
    ids, rows = [torch.tensor([5, 6, 7])] * 2, [torch.ones(shape, dtype=torch.int32)] * 2
    batch = TensorDict({"input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged)}, [2])
    batch["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    (one,) = mp.check(batch, pad_token_id=PAD)
    assert (one.path, one.kind, one.rows) == (("routed_experts",), "axis", (0, 1))
    assert 'row 0 has 2 tokens; mask "sequence" has 3' in one.line
    assert "jagged_dim" not in one.remedy


ALL, SOME = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], [[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]
SOUND = {
    "NaN where nothing is scored": (ALL, SOME, [[NAN, -1, -1, -1, NAN], [NAN, 0, -1, -1, NAN]], EOS),
    "certain tokens, and log-probs of all tokens": (ALL, SOME, [[-1, 0, -1, -1, -1], [-1, -1, 0, -1, -1]], EOS),
    "rows without a prompt": (ALL, [[1, 1, 1, 1, 0]] * 2, [[0, -1, -1, -1, -1]] * 2, EOS),
    "prompts alone": (ALL, [[0] * 5] * 2, [[0] * 5] * 2, EOS),
    "rows of one limit": ([[1, 1, 1, 0, 0]] * 2, [[0, 1, 1, 0, 0]] * 2, [[0, -1, -1, 0, 0]] * 2, 0),
    "a short prompt alone": ([[1, 1, 0, 0, 0], ALL[0]], [[0] * 5, SOME[0]], [[0] * 5, [0, -1, -1, -1, 0]], 0),
}


@pytest.mark.parametrize(("mask", "loss", "log_probs", "eos"), SOUND.values(), ids=SOUND)
def test_what_looks_like_a_mistake_and_is_none(mask, loss, log_probs, eos):
    """Fields of AReaL, whose ids are padded with 0."""
    mask = torch.tensor(mask)
    batch = TensorDict({"attention_mask": mask, "input_ids": mask * 7, "loss_mask": torch.tensor(loss)}, [2])
    batch["logprobs"] = torch.tensor(log_probs, dtype=torch.float32)
    kinds = {one.kind for one in mp.check(batch, fields.areal, pad_token_id=0, eos_token_id=eos)}
    assert kinds == ({"unscored"} if any(map(any, loss)) and not all(map(any, loss)) else set())


def test_one_field_of_another_width_does_not_stop_the_rest():
    batch = sound("nemo_rl")
    narrow(batch)
    batch["prev_logprobs"] = batch["prev_logprobs"][:, 2:].clone()
    batch["generation_logprobs"][batch["token_mask"] != 0] = INFINITE
    batch["generation_logprobs"][0, 2] = -1.0
    assert {(one.path[0], one.kind) for one in findings(batch, "nemo_rl")} == {
        ("advantages", "axis"),
        ("prev_logprobs", "axis"),
        ("generation_logprobs", "nonfinite"),
    }


def test_an_end_token_that_is_no_number_is_refused():
    with pytest.raises(mp.errors.RegistryError, match=r"check: eos_token_id is '</s>'.*Pass tokenizer\.eos_token_id\."):
        mp.check(rollout(), pad_token_id=PAD, eos_token_id="</s>")
