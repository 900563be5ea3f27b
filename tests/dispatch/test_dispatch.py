"""Dispatch over a local Ray: every row once, in order, bit for bit, and what goes wrong on a rank is raised here."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import ray
import samples
import torch
from ray import cloudpickle
from samples import PAD, ROWS, assert_same, freeze, per_row, rollout
from tensordict import NonTensorData, TensorDict, tensorclass
from test_docs import BLOCK, DOCS

import maskpack as mp
from maskpack.dispatch import Broadcast, WorkerGroup, endpoint
from maskpack.dispatch import call as calls
from maskpack.planning import PlanOptions, PrefixTree

RANKS = 3
B = len(ROWS)

for module in (sys.modules[__name__], samples):  # the ranks cannot import the tests
    cloudpickle.register_pickle_by_value(module)


class Worker:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    @endpoint
    def echo(self, batch):
        return batch

    @endpoint(format="nested")
    def echo_nested(self, batch):
        return batch

    @endpoint
    def scale(self, batch, factor, *, less=0.0):
        return TensorDict({"values": batch["old_log_probs"] * factor * self.factor - less}, batch_size=batch.batch_size)

    @endpoint(format="nested")
    def scale_nested(self, batch, factor):
        out = TensorDict({}, batch_size=batch.batch_size)
        return out.set("values", batch["old_log_probs"] * factor * self.factor)

    @endpoint(format="nested")
    def score_every_token(self, batch):
        return TensorDict({"entropys": batch["input_ids"].to(torch.float32)}, batch_size=batch.batch_size)

    @endpoint
    def response_outputs(self, batch):
        return batch.select("response_mask", "old_log_probs")

    @endpoint
    def metrics(self, batch, *args, **kwargs):
        kinds = sorted({type(value).__name__ for value in batch.values() if isinstance(value, torch.Tensor)})
        return {"rows": len(batch), "kinds": kinds, "args": args, "kwargs": kwargs, "uid": list(batch["uid"])}

    @endpoint
    def unknown_field(self, batch):
        return TensorDict({"found": torch.ones(len(batch), 4)}, batch_size=batch.batch_size)

    @endpoint(micro_batches=True)
    def unknown_field_in_parts(self, batch):
        return TensorDict({"found": torch.ones(len(batch), 4)}, batch_size=batch.batch_size)

    @endpoint
    def values_under_the_mask(self, batch):
        return batch.select("old_log_probs").apply(lambda x: torch.full_like(x, 7.0))

    @endpoint
    def both(self, batch, other):
        values = batch["old_log_probs"] + other["old_log_probs"]
        return TensorDict({"values": values}, batch_size=batch.batch_size)

    @endpoint
    def nothing(self, batch):
        return None

    @endpoint(micro_batches=True)
    def scale_in_parts(self, batch, factor, other=None, *, whole=None):
        if other is not None:
            assert same_bits(other["old_log_probs"], batch["old_log_probs"])
        assert whole is None or len(whole) == B
        values = TensorDict({"values": batch["old_log_probs"] * factor}, batch_size=batch.batch_size)
        return values, len(batch), batch["attention_mask"].sum().item()

    @endpoint(format="nested", micro_batches=True)
    def scale_nested_in_parts(self, batch):
        assert batch["old_log_probs"].offsets() is batch["responses"].offsets()
        out = TensorDict({}, batch_size=batch.batch_size)
        return out.set("values", batch["old_log_probs"] * 2)

    @endpoint(micro_batches=True)
    def count_in_parts(self, batch):
        return len(batch)

    @endpoint(micro_batches=True)
    def differ_in_parts(self, batch):
        return batch.select("responses") if len(batch) > 1 else {}

    @endpoint(micro_batches=True)
    def echo_in_parts(self, batch):
        return batch

    @endpoint(micro_batches=True)
    def differ_on_a_peer(self, batch):
        return None if self.factor == 2.0 and "row-3" in list(batch["uid"]) else {}

    @endpoint(micro_batches=True)
    def tensors_in_parts(self, batch):
        return batch["old_log_probs"], 1

    @endpoint
    def planned(self, batch, plan):
        parts = [part["attention_mask"].sum().item() for part in plan.apply(batch)]
        return {
            "uid": list(batch["uid"]),
            "micro_batches": plan.micro_batches,
            "tokens": parts,
            "counts": plan.counts,
            "weights": plan.loss_weights("token-mean", gradients="sum") if plan.loss else None,
        }

    @endpoint(micro_batches=True)
    def fail_once_in_parts(self, batch, path):
        if batch["uid"][0] == "row-0" and not os.path.exists(path):
            open(path, "w").close()
            raise ValueError("once")
        return batch.select("old_log_probs")

    @endpoint
    def objects(self, batch):
        out = TensorDict({}, batch_size=batch.batch_size)
        out.set("answer", per_row([f"to {uid}" for uid in batch["uid"]])) if len(batch) else None
        return out.set("model", NonTensorData("one", batch_size=batch.batch_size))

    @endpoint
    def scores_and_metrics(self, batch, *more):
        values = TensorDict({"values": batch["old_log_probs"] * self.factor}, batch_size=batch.batch_size)
        return values, {"rows": len(batch)}, *more

    @endpoint
    def rows_alone_in_a_tuple(self, batch):
        return (batch.select("old_log_probs", "attention_mask"),)

    @endpoint
    def differ(self, batch, how):
        out, first = batch.select("old_log_probs"), batch["uid"][0] == "row-0"
        if how == "tuples":
            return (out, {}) if first else out
        if how == "lengths":
            return (out, {}) if first else (out, {}, {})
        if how == "kinds":
            return out if first else {}
        return out if first else out.apply(lambda x: x.double())

    @endpoint
    def add(self, batch, other, *, more=None):
        assert other.batch_size == (B,)
        return [len(batch), other["responses"].sum().item(), None if more is None else list(more["uid"])]

    @endpoint
    def fail_once(self, batch, held):
        if len(batch) == 3:  # the first rank of the first call
            raise ValueError("once")
        return held["step"]

    def undecorated(self, batch):
        return batch["responses"]

    def undecorated_with_any_arguments(self, *args):
        return args[0]["responses"]

    @endpoint
    def too_deep(self, batch):
        return _at(list(batch["uid"]), 10) if batch["uid"][0] == "row-0" else _elsewhere()

    def plain(self, *args, **kwargs):
        return self.factor, args, kwargs

    def fail_plainly(self, value):
        if self.factor == value:
            _elsewhere()

    @endpoint
    def lose_a_row(self, batch):
        return batch[:-1]

    @endpoint
    def no_rows(self, batch):
        return TensorDict({"loss": torch.tensor(1.0)}, batch_size=[])

    @endpoint
    def fail(self, batch):
        if batch["uid"][0] == "row-1":
            raise ValueError("this rank failed")

    @endpoint
    def sleep(self, batch, seconds):
        time.sleep(seconds)

    @endpoint
    def scribble(self, batch):
        return _scribbled(batch)

    @endpoint(format="nested")
    def scribble_nested(self, batch):
        return _scribbled(batch)


class OnGpu(Worker):
    """A rank that returns CUDA tensors, as far as a machine without CUDA can tell: what it packs says so."""

    def __init__(self):
        super().__init__()
        from maskpack.dispatch import endpoints as serving

        compress = serving.compress
        serving.compress = lambda batch, **options: said_to_be_on_a_gpu(compress(batch, **options))

    @endpoint
    def keeps_its_device(self, batch):
        """The TensorDict and the one within say where they are."""
        inner = TensorDict({"x": batch["old_log_probs"].clone()}, batch_size=batch.batch_size, device="cpu")
        out = TensorDict({"inner": inner}, batch_size=batch.batch_size, device="cpu")
        return out.set("old_log_probs", batch["old_log_probs"])

    @endpoint
    def tensors_elsewhere(self, batch):
        values = batch["old_log_probs"]
        apart = {"tensor": far(values[0]), "parts": [far(values[1]), (far(values[-1]), 3)]}
        return batch.select("old_log_probs"), apart

    @endpoint
    def tensors_alone(self, batch):
        return far(batch["old_log_probs"])

    @endpoint
    def tensors_in_objects(self, batch):
        items = [{"x": far(row)} for row in batch["old_log_probs"]]
        return TensorDict({"item": per_row(items)}, batch_size=batch.batch_size)

    @endpoint(micro_batches=True)
    def losses(self, batch):
        return batch.select("old_log_probs"), far(torch.tensor(float(len(batch))))

    @endpoint
    def fails_once(self, batch, path):
        if batch["uid"][0] == "row-0" and not os.path.exists(path):
            open(path, "w").close()
            raise ValueError("once")
        return batch.select("old_log_probs")


def said_to_be_on_a_gpu(packed):
    def there(node):
        return None if node is None else replace(node, device=node.device and "cuda:0")

    forms = [replace(form, device=form.device and "cuda:0", node=there(form.node)) for form in packed.schema.forms]
    return replace(packed, schema=replace(packed.schema, root=there(packed.schema.root), forms=tuple(forms)))


class Far(torch.Tensor):
    """A tensor that says it is on a GPU, and that no other process can read."""

    device = property(lambda self: torch.device("cuda:0"))

    def to(self, *args, **kwargs):
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol):
        raise RuntimeError("a process without this GPU cannot read the tensor")


def far(x):
    return x.clone().as_subclass(Far)


def _at(values, place):
    return values[place]


def _elsewhere():
    raise KeyError("no such key")


def _scribbled(batch):
    """What was in the batch; then every tensor of it is overwritten."""
    before = batch.clone()
    for value in batch.exclude("_maskpack").values(include_nested=True, leaves_only=True):
        if isinstance(value, torch.Tensor):
            (value.values() if value.is_nested else value).fill_(1)
    return before


@pytest.fixture(scope="module")
def group(local_ray):
    return WorkerGroup.launch(Worker, RANKS, pad_token_id=PAD)


@pytest.fixture(autouse=True)
def untouched_batch(request):
    """The batch on the driver is after every test what it was before."""
    if "batch" not in request.fixturenames:
        yield
        return
    batch = request.getfixturevalue("batch")
    before = freeze(batch)
    yield
    assert freeze(batch) == before


@pytest.fixture
def batch():
    return rollout(holes=True)


# -------------------------------------------------------------------- tensorclasses


@tensorclass
class Turn:
    ids: torch.Tensor
    text: str


def turns() -> Turn:
    return Turn(ids=torch.arange(2 * B).view(B, 2), text=[f"turn {row}" for row in range(B)], batch_size=[B])


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_tensorclasses_in_a_batch_are_divided(group, batch):
    held = batch.copy().set("turn", turns())
    for number, back in enumerate((group.call("echo", held), group.call("echo", held[[2, 1]]))):
        rows = [2, 1] if number else list(range(B))
        assert type(back["turn"]) is Turn
        assert back["turn"].ids.tolist() == [[2 * row, 2 * row + 1] for row in rows]
        assert list(back["turn"].text) == [f"turn {row}" for row in rows]


def test_a_tensorclass_as_an_argument_is_refused_or_given_whole(group, batch):
    for given in ((turns(),), (0, turns())):
        with pytest.raises(mp.errors.LayoutError, match=r"tensorclass Turn.*would not be divided.*Broadcast\(value\)"):
            group.call("metrics", batch, *given)
    with pytest.raises(mp.errors.LayoutError, match="tensorclass Turn"):
        group.call("metrics", batch, turn=turns())
    whole = group.call("metrics", batch, Broadcast(turns()))
    assert [len(one["args"][0]) for one in whole] == [B] * RANKS
    assert {type(one["args"][0]) for one in whole} == {Turn}


# -------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("method", ["echo", "echo_nested"])
def test_rows_there_and_back(group, batch, method):
    assert_same(group.call(method, batch), batch)
    assert_same(mp.unnest_batch_by_mask(group.call(method, batch, format="nested")), batch)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 0])
def test_rows_that_do_not_divide(group, rows):
    batch = rollout(ROWS[:rows], objects=False)
    assert_same(group.call("echo", batch), batch)
    assert_same(group.call("echo_nested", batch), batch)
    assert_same(group.call("scale", batch, 1.0)["values"], batch["old_log_probs"])


def test_parts_differ_by_one_row_and_keep_their_order(group, batch):
    results = group.call("metrics", batch, 1, "two", three=[3])
    assert [result["rows"] for result in results] == [3, 2, 2]
    assert [uid for result in results for uid in result["uid"]] == list(batch["uid"])
    for result in results:
        assert (result["args"], result["kwargs"]) == ((1, "two"), {"three": [3]})
        assert result["kinds"] == ["Tensor"]  # padded: no jagged tensor
    few = group.call("metrics", batch[:2])
    assert [result["rows"] for result in few] == [1, 1, 0]


@pytest.mark.parametrize("method", ["scale", "scale_nested"])
@pytest.mark.parametrize("rows", [B, 2])
def test_new_fields_come_back_padded_or_nested(group, batch, method, rows):
    part = batch[:rows]
    factor = 2.0
    expected = part["old_log_probs"] * factor
    out = group.call(method, part, factor)
    assert list(out.keys()) == ["values"]
    assert out.batch_size == (rows,)
    assert_same(out["values"], expected)
    nested = group.call(method, part, factor, format="nested")
    assert nested["values"].is_nested
    assert_same(mp.unnest_batch_by_mask(nested)["values"], expected)


@pytest.mark.parametrize("rows", [B, 2, 1])
def test_outputs_on_the_sequence_axis(group, batch, rows):
    """Also where some ranks have no rows."""
    part = batch[:rows]
    expected = part["input_ids"].to(torch.float32) * part["attention_mask"]
    out = group.call("score_every_token", part)
    assert_same(out["entropys"], expected)


def test_outputs_with_a_response_mask_lie_under_the_axis_of_the_batch(group):
    """The mask of the responses is data; the layout is that of the batch, as on the way there."""
    batch = rollout(((2, 4), (3, 2), (1, 4)), 3, 4, holes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = group.call("response_outputs", batch, format="nested")
    assert out["old_log_probs"].is_nested
    assert [len(row) for row in samples.row_list(out["old_log_probs"])] == [4, 2, 4]
    assert_same(mp.unnest_batch_by_mask(out), batch.select("response_mask", "old_log_probs"))


def test_none_comes_back_as_none(group, batch):
    assert group.call("nothing", batch) is None


def test_objects_come_back(group, batch):
    out = group.call("objects", batch)
    assert list(out["answer"]) == [f"to {uid}" for uid in batch["uid"]]
    assert out["model"] == "one"


def test_a_packed_batch_is_taken_too(group, batch):
    packed = group.pack(batch)
    assert isinstance(packed, mp.PackedBatch)
    assert_same(group.call("echo", packed), batch)
    assert_same(group.call("echo", packed[2:5]), batch[2:5])


def test_what_the_driver_gets_is_its_own(group, batch):
    out = group.call("echo", batch)
    for value in out.values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    assert_same(group.call("echo", batch), batch)


def test_rows_and_more_come_back_as_a_tuple(group, batch):
    values, metrics, more = group.call("scores_and_metrics", batch, "x")
    assert_same(values["values"], batch["old_log_probs"])
    assert (metrics, more) == ([{"rows": 3}, {"rows": 2}, {"rows": 2}], ["x"] * 3)
    (alone,) = group.call("rows_alone_in_a_tuple", batch)
    assert_same(alone, batch.select("old_log_probs", "attention_mask"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tuples", r'"differ" does not fit together: the ranks returned tuples of \[2, None, None\]'),
        ("lengths", r"tuples of \[2, 3, 3\]"),
        ("kinds", r"ranks \[0\] returned a TensorDict and the others none"),
        ("dtypes", r"old_log_probs.* has dtypes \['float32', 'float64'"),
    ],
)
def test_results_that_do_not_fit_together(group, batch, how, message):
    with pytest.raises(mp.errors.WorkerError, match=message) as caught:
        group.call("differ", batch, how)
    assert caught.value.method == "differ"
    assert [len(part.rows) for part in caught.value.call.parts] == [3, 2, 2]  # they are kept


def test_what_every_rank_gets_whole(group, batch):
    total = batch["responses"].sum().item()
    results = group.call("add", batch, Broadcast(batch))
    assert results == [[3, total, None], [2, total, None], [2, total, None]]
    given = group.call("metrics", batch, Broadcast({"a": 1}), [1, 2])
    assert [found["args"] for found in given] == [({"a": 1}, [1, 2])] * 3


def test_several_batches_are_divided_alike(group, batch):
    rows = [[6, 0], [3, 1, 2], [5, 4]]
    results = group.call("add", batch, Broadcast(batch), more=batch.select("uid"), balance=rows)
    assert [found[2] for found in results] == [[list(batch["uid"])[row] for row in own] for own in rows]
    with pytest.raises(mp.errors.LayoutError, match="a batch of 3 rows beside one of 7"):
        group.call("metrics", batch, batch[:3])


def test_equal_tokens(group, batch):
    assert_same(group.call("echo", batch, balance="tokens"), batch)
    tokens = [p + r for p, r in ROWS]
    sums = [group.metrics[f"maskpack/dispatch/tokens/rank_{rank}"] for rank in range(RANKS)]
    assert sum(sums) == sum(tokens)
    assert max(sums) - min(sums) <= max(tokens)
    assert group.metrics["maskpack/dispatch/imbalance"] == max(sums) * RANKS / sum(sums)


# -------------------------------------------------------------------- plans


def test_micro_batches_planned_on_the_driver(group, batch):
    rows = group.put(batch)
    lengths = batch["attention_mask"].sum(-1)
    budget = int(lengths.max()) + 3
    plan = group.plan(rows, budget, loss_tokens=batch["response_mask"].sum(-1), options=PlanOptions(num_updates=2))
    told = group.call("planned", rows, plan=plan)
    assert [each["uid"] for each in told] == [[batch["uid"][row] for row in own] for own in plan.rows]
    assert sorted(row for own in plan.rows for row in own) == list(range(B))
    assert len({tuple(each["counts"]) for each in told}) == 1
    assert max(tokens for each in told for tokens in each["tokens"]) <= budget
    total = batch["response_mask"].sum().item()
    per_update = [{weight for each in told for part in update(each) for weight in part} for update in (_first, _second)]
    assert all(len(weights - {0.0}) == 1 for weights in per_update)
    assert sum(1 / max(weights) for weights in per_update) == pytest.approx(total)
    assert group.metrics["plan/micro_batches"] == sum(len(each["micro_batches"]) for each in told)
    assert group.metrics["plan/rank_imbalance"] >= 1


def same_bits(x, y):
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def _first(told):
    return told["weights"][: told["counts"][0]]


def _second(told):
    return told["weights"][told["counts"][0] :]


BY_ROWS = PlanOptions(cost=np.ones_like)
"""A budget is a number of rows."""


@pytest.mark.parametrize("multiple", [1, 5])
def test_a_method_for_micro_batches(group, batch, multiple):
    rows = group.put(batch)
    plan = group.plan(rows, int(batch["attention_mask"].sum(-1).max()), options=PlanOptions(multiple_of=multiple))
    values, sizes, tokens = group.call("scale_in_parts", rows, 3.0, plan=plan)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    assert [len(own) for own in sizes] == [own.counts[0] - sum(own.dummies) for own in plan.plans]
    assert sum(map(sum, sizes)) == B
    assert sum(map(sum, tokens)) == batch["attention_mask"].sum().item()
    assert max(max(own) for own in tokens) <= int(batch["attention_mask"].sum(-1).max())


@pytest.mark.parametrize("budget", [20, 1000])
def test_micro_batches_that_share_prefixes(group, batch, budget, tmp_path):
    rows, lengths = group.put(batch), batch["attention_mask"].sum(-1)
    prompts = lengths - batch["response_mask"].sum(-1)
    tree = PrefixTree.from_groups(lengths, [row // 2 for row in range(B)], prompts, min_shared=1)
    plan = group.plan(rows, budget, tree=tree, loss_tokens=batch["response_mask"].sum(-1))
    values, sizes, _ = group.call("scale_in_parts", rows, 3.0, plan=plan)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    assert sum(map(sum, sizes)) == B
    computed = sum(sum(own.loads()) for own in plan.plans)
    assert group.metrics["plan/shared_tokens"] == lengths.sum() - computed
    assert [told["micro_batches"] for told in group.call("planned", rows, plan=plan)] == [
        own.micro_batches for own in plan.plans
    ]
    plan = group.plan(rows, budget, tree=tree)
    with pytest.raises(mp.errors.WorkerError, match="once") as caught:
        group.call("fail_once_in_parts", rows, str(tmp_path / "failed"), plan=plan)
    result = caught.value.call.retry().result()
    assert same_bits(result["old_log_probs"], batch["old_log_probs"])


def test_a_plan_that_shares_prefixes_needs_the_tree_of_its_rows(group, batch):
    rows = group.pack(batch)
    tree = PrefixTree.from_groups([4] * B, [0] * B, [2] * B)
    with pytest.raises(
        mp.errors.PlanError, match=r"row \d has \d+ tokens, in the tree 4; expected the tree of these rows"
    ):
        group.plan(rows, 100, tree=tree)


def test_several_batches_for_micro_batches(group, batch):
    plan = group.plan(group.pack(batch), 2, options=BY_ROWS)
    result = group.call("scale_in_parts", batch, 2.0, group.pack(batch), plan=plan, whole=Broadcast(batch))[0]
    assert same_bits(result["values"], batch["old_log_probs"] * 2.0)


def test_nested_micro_batches(group, batch):
    plan = group.plan(group.pack(batch), 40)
    for layout in ("padded", "nested"):
        result = group.call("scale_nested_in_parts", batch, plan=plan, format=layout)
        result = result if layout == "padded" else mp.unnest_batch_by_mask(result)
        assert same_bits(result["values"], batch["old_log_probs"] * 2)


def test_a_method_for_micro_batches_without_a_plan(group, batch):
    assert sorted(group.call("count_in_parts", batch)) == [[2], [2], [3]]
    values, sizes, _ = group.call("scale_in_parts", batch, 3.0)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    assert sum(map(sum, sizes)) == B


def test_results_of_micro_batches_that_do_not_fit(group, batch):
    plan = group.plan(group.pack(batch), 2, options=BY_ROWS)
    with pytest.raises(mp.errors.WorkerError, match=r"returned a TensorDict, something else for its micro-batches"):
        group.call("differ_in_parts", batch, plan=plan)
    with pytest.raises(mp.errors.WorkerError, match=r"returned a tensor for its micro-batches; expected a TensorDict"):
        group.call("tensors_in_parts", batch, plan=plan)


def test_everything_comes_back_from_micro_batches(group, batch):
    packed = group.pack(batch)
    for plan in (group.plan(packed, 1, options=BY_ROWS), group.plan(packed, 1000, options=PlanOptions(multiple_of=4))):
        assert_same(group.call("echo_in_parts", packed, plan=plan), batch)


@pytest.mark.parametrize("speaker", [0, 1])
def test_only_results_that_are_wanted_are_joined(local_ray, batch, speaker):
    actors = [ray.remote(num_cpus=0)(Worker).remote(factor) for factor in (1.0, 2.0)]
    collect = [speaker == actor for actor in range(2)]
    peers = WorkerGroup(actors, dp_ranks=[0, 0], collect=collect, pad_token_id=PAD)
    plan = peers.plan(peers.pack(batch), 4, options=BY_ROWS)
    if speaker == 0:
        assert peers.call("differ_on_a_peer", batch, plan=plan) == [[{}, {}]]
    else:
        with pytest.raises(mp.errors.WorkerError, match=r"returned None, something else for its micro-batches"):
            peers.call("differ_on_a_peer", batch, plan=plan)


@pytest.mark.parametrize("what", ["groups", "loss_tokens"])
def test_a_plan_whose_rows_belong_together_is_not_retried_in_part(group, batch, tmp_path, what):
    of_groups = {"token_budget": 1000, "groups": list(batch["uid"])}
    of_loss = {"token_budget": 1, "options": BY_ROWS, "loss_tokens": batch["response_mask"].sum(-1)}
    plan = group.plan(group.pack(batch), **(of_groups if what == "groups" else of_loss))
    with pytest.raises(mp.errors.WorkerError, match=r"once.*Run the whole call again") as caught:
        group.call("fail_once_in_parts", batch, str(tmp_path / "failed"), plan=plan)
    with pytest.raises(mp.MaskpackError, match=r"loss tokens or groups; expected one whose rows .*Run the whole call"):
        caught.value.call.retry()


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_plans_that_do_not_fit_the_call(group, batch):
    rows = group.put(batch)
    plan = group.plan(rows, 100)
    with pytest.raises(
        mp.errors.PlanError, match=rf"plan of {B} rows on {RANKS} ranks with balance 'rows'; expected {B - 1}"
    ):
        group.call("planned", rows[1:], plan=plan)
    with pytest.raises(mp.errors.PlanError, match="and no balance"):
        group.call("planned", rows, plan=plan, balance="tokens")
    with pytest.raises(mp.errors.LayoutError, match=r"got a TensorDict and no lengths; expected a PackedBatch or"):
        group.plan(batch, 100)
    alone = group.pack(batch.select("response_mask", "old_log_probs"))
    with pytest.raises(
        mp.errors.PlanError, match=r"has layouts \['response'\]; expected the sequence, or the prompt and"
    ):
        group.plan(alone, 100)
    with pytest.raises(
        mp.errors.PlanError, match=r"row \d has \d+ tokens, in the plan \d+; expected the plan of these rows"
    ):
        group.call("planned", rows.sort_by_length("sequence"), plan=plan)
    with pytest.raises(mp.errors.PlanError, match=r"plan is a MicroBatchPlan; expected RankPlans"):
        group.call("planned", rows, plan=plan.plans[0])
    with pytest.raises(mp.errors.PlanError, match=r"Pass plan=plan"):
        group.call("planned", rows, plan)
    with pytest.raises(
        mp.errors.WorkerError, match=r"echo: called with a plan, and takes none; expected a parameter `plan`"
    ):
        group.call("echo", rows, plan=plan)
    with pytest.raises(mp.errors.PlanError, match=r"ranks \[2\] have no row to run"):
        group.plan(rows[:2], 100)
    longer = group.plan(rows, 100, lengths=plan.lengths + 1)
    assert sum(len(told["uid"]) for told in group.call("planned", rows, plan=longer)) == B
    lengths = batch["attention_mask"].sum(-1)
    for given in (batch, mp.nest_batch_by_mask(batch, pad_token_id=PAD), alone):
        assert group.plan(given, 100, lengths=lengths).rows == plan.rows
        with pytest.raises(mp.errors.PlanError, match=rf"plan: lengths of {B - 1} rows for a batch of {B}; expected"):
            group.plan(given, 100, lengths=lengths[1:])


def test_calls_are_awaited_together(group, batch):
    async def both():
        return await asyncio.gather(group.submit("scale", batch, 2.0), group.submit("echo", batch))

    scaled, same = asyncio.run(both())
    assert_same(scaled["values"], batch["old_log_probs"] * 2.0)
    assert_same(same, batch)


@pytest.fixture
def slow_decoding(monkeypatch):
    """The number of parts of each result that is put together, which takes its time."""
    gathered, seen = calls._gathered, []

    def slowly(parts, request):
        seen.append(len(parts))
        time.sleep(0.3)
        return gathered(parts, request)

    monkeypatch.setattr(calls, "_gathered", slowly)
    return seen


def test_all_who_wait_for_a_call_get_its_result(group, batch, slow_decoding):
    call = group.submit("echo", batch)
    with ThreadPoolExecutor(4) as threads:
        results = [waiting.result() for waiting in [threads.submit(call.result) for _ in range(4)]]
    assert_same(results[0], batch)
    assert [result is results[0] for result in results] == [True] * 4
    assert call.result() is results[0]
    assert slow_decoding == [RANKS]


def test_a_call_is_awaited_again_after_one_gave_up(group, batch, slow_decoding):
    async def twice():
        call = group.submit("echo", batch)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)
        return await call, await call

    first, second = asyncio.run(twice())
    assert_same(first, batch)
    assert first is second
    assert slow_decoding == [RANKS]


def test_each_who_waits_has_a_time_of_his_own(group, batch):
    call = group.submit("sleep", batch, 1.0)
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(call.result)
        with pytest.raises(mp.errors.WorkerError, match="no answer"):
            call.result(timeout=0.1)
        assert patient.result() is None
    assert call.result(timeout=0) is None


def test_a_call_that_is_done_keeps_only_its_result(group, batch):
    call = group.submit("echo", batch)
    first = call.result()
    assert call.done()
    assert call.parts == []
    assert call.result() is first
    assert call.retry() is call


def test_of_the_rows_of_a_packed_batch_the_last_are_remembered(group, batch):
    packed = group.pack(batch)
    view = mp.views.BatchView.of(packed)
    for rows in ([1, 2], [3], [0, 6], [0, 6]):
        group.call("nothing", view.take(rows))
    group.call("nothing", packed)
    assert len(group._store._put[packed]) == 2
    assert group.metrics["maskpack/dispatch/bytes_sent"] > 0
    group.call("nothing", packed)
    assert group.metrics["maskpack/dispatch/bytes_sent"] == 0


# -------------------------------------------------------------------- which rows they are


def kept_by(group, batch, tmp_path, how):
    """Results of a view, whose rows stay where they are."""
    if how == "plan":
        plan = group.plan(batch, 30)
        return group.call("scale_in_parts", batch, 2.0, plan=plan, format="view")[0]
    if how == "retry":
        with pytest.raises(mp.errors.WorkerError) as caught:
            group.call("fail_once_in_parts", batch, str(tmp_path / str(len(list(tmp_path.iterdir())))), format="view")
        return caught.value.call.retry().result()
    if how == "onto":
        values = batch.materialize("returns", get=ray.get)
        return group.put(values, onto=batch)
    return group.call("scale", batch, 2.0, format="view", balance="tokens" if how == "tokens" else "rows")


@pytest.mark.parametrize("how", ["rows", "tokens", "plan", "retry", "onto"])
@pytest.mark.parametrize("put", [True, False], ids=["put", "here"])
def test_results_in_another_order_are_refused(group, batch, tmp_path, how, put):
    """Also where all rows are as long."""
    even = rollout([(2, 3)] * B)
    view = group.put(even) if put else mp.views.BatchView.of(group.pack(even))
    turned = kept_by(group, view[::-1], tmp_path, how)
    with pytest.raises(
        mp.errors.LayoutError, match=r"with_fields: row 0 of the fields is row 6 of the batch that it comes"
    ):
        view.with_fields(turned)
    assert len(view.with_fields(turned[::-1])) == B
    assert len(view[::-1].repeat(2).with_fields(turned.repeat(2))) == 2 * B
    part = kept_by(group, view[1:], tmp_path, how)
    with pytest.raises(mp.errors.LayoutError, match=r"row 0 of the fields is row 1 .* row 0 of the view is row 0"):
        view[:-1].with_fields(part)
    assert len(view[1:].with_fields(part)) == B - 1


def test_put_onto_other_rows_is_refused_before_anything_is_put(group, batch, monkeypatch):
    view = group.put(batch)
    monkeypatch.setattr(ray, "put", None)
    with pytest.raises(mp.errors.LayoutError, match="row 0 of the fields is row 6"):
        group.put(view[::-1], onto=view)


def test_what_was_put_is_released(group, batch):
    packed = group.pack(batch)
    group.call("nothing", packed)
    group.release(packed)
    group.call("nothing", packed)
    assert group.metrics["maskpack/dispatch/bytes_sent"] > 0
    group.release()
    assert_same(group.call("echo", packed), batch)
    assert group.metrics["maskpack/dispatch/bytes_sent"] > 0
    with pytest.raises(
        mp.errors.LayoutError, match=r"WorkerGroup\.release: got a TensorDict; expected a PackedBatch that was"
    ):
        group.release(batch)


# -------------------------------------------------------------------- devices


@pytest.fixture(scope="module")
def gpus(local_ray):
    return WorkerGroup.launch(OnGpu, RANKS, pad_token_id=PAD, actor_options={"num_cpus": 0})


@pytest.mark.parametrize("method", ["echo", "echo_nested", "echo_in_parts"])
def test_results_come_to_the_host(gpus, batch, method):
    """From whatever device the ranks returned them."""
    options = {"plan": gpus.plan(gpus.pack(batch), 2, options=BY_ROWS)} if method == "echo_in_parts" else {}
    for device in (None, "cpu", torch.device("cpu")):
        out = gpus.call(method, batch, device=device, **options)
        assert out.device == (None if device is None else torch.device("cpu"))
        assert_same(out.clear_device_(), batch)
        nested = gpus.call(method, batch, format="nested", device=device, **options)
        assert_same(mp.unnest_batch_by_mask(nested).clear_device_(), batch)
    assert_same(gpus.submit(method, batch, **options).result(), batch)

    async def waited():
        return await gpus.submit(method, batch, **options)

    assert_same(asyncio.run(waited()), batch)


def test_rows_that_stay_where_they_are_come_to_the_host(gpus, group, batch):
    """The driver decodes them there; so do ranks that take them next."""
    view = gpus.call("echo", batch, format="view")
    assert {form.device for form in view.head.schema.forms} <= {"cpu", None}
    assert_same(view.materialize(get=ray.get), batch)
    assert_same(mp.unnest_batch_by_mask(view.materialize(get=ray.get, format="nested")), batch)
    assert_same(group.call("echo", view), batch)
    both = gpus.put(batch).with_fields(gpus.call("scale", batch, 2.0, format="view"))
    assert_same(both.materialize("values", "responses", get=ray.get)["values"], batch["old_log_probs"] * 2.0)


def test_batches_that_say_their_device_say_the_host(gpus, batch):
    out = gpus.call("keeps_its_device", batch)
    assert out.device == out["inner"].device == torch.device("cpu")
    assert_same(out["inner"]["x"], batch["old_log_probs"])
    assert gpus.call("scale", batch, 2.0).device is None


def test_tensors_beside_the_rows_come_to_the_host(gpus, batch):
    values = batch["old_log_probs"]
    rows, apart = gpus.call("tensors_elsewhere", batch)
    assert_same(rows["old_log_probs"], values)
    for found, first, last in zip(apart, (0, 3, 5), (2, 4, 6), strict=True):
        assert_same(found["tensor"], values[first])
        assert_same(found["parts"][0], values[first + 1])
        assert type(found["parts"][1]) is tuple
        assert_same(found["parts"][1][0], values[last])
        assert found["parts"][1][1] == 3
    assert_same(torch.cat(gpus.call("tensors_alone", batch)), values)
    items = gpus.call("tensors_in_objects", batch)["item"]
    assert_same(torch.stack([item["x"] for item in items]), values)


def test_losses_of_micro_batches_come_to_the_host(gpus, batch):
    plan = gpus.plan(gpus.pack(batch), 2, options=BY_ROWS)
    rows, losses = gpus.call("losses", batch, plan=plan)
    assert_same(rows["old_log_probs"], batch["old_log_probs"])
    assert [type(loss) for own in losses for loss in own] == [torch.Tensor] * sum(map(len, losses))
    assert sum(float(loss) for own in losses for loss in own) == B


def test_a_retry_comes_to_the_host(gpus, batch, tmp_path):
    with pytest.raises(mp.errors.WorkerError, match="once") as caught:
        gpus.call("fails_once", batch, str(tmp_path / "failed"), device="cpu")
    again = caught.value.call.retry().result()
    assert again.device == torch.device("cpu")
    assert_same(again["old_log_probs"], batch["old_log_probs"])


def test_a_device_that_the_driver_does_not_have_is_refused_before_anything_is_sent(batch):
    nobody = WorkerGroup([None] * RANKS, pad_token_id=PAD)
    for device in ("cuda:9", "gpu"):
        with pytest.raises(
            mp.errors.LayoutError, match=f'WorkerGroup: device is "{device}", which this process does not have'
        ):
            nobody.submit("echo", batch, device=device)
    with pytest.raises(
        mp.errors.LayoutError, match=r'device is "cpu" with format="view", whose rows stay .*materialize'
    ):
        nobody.submit("echo", batch, device="cpu", format="view")


# -------------------------------------------------------------------- what a worker may write


@pytest.mark.parametrize("method", ["scribble", "scribble_nested"])
def test_writing_on_a_rank_does_not_reach_the_store(group, batch, method):
    view = group.put(batch.exclude("uid", "extra_info"))
    for _ in range(3):
        assert_same(group.call(method, view), batch.exclude("uid", "extra_info"))
    assert_same(view.materialize(get=ray.get), batch.exclude("uid", "extra_info"))


# -------------------------------------------------------------------- what goes wrong


@pytest.mark.skipif("tensor_transport" not in str(ray.method.__doc__), reason="Ray without tensor transport")
def test_a_method_with_a_tensor_transport_is_refused(local_ray, batch):
    class Direct:
        @ray.method(tensor_transport="gloo")
        @endpoint
        def echo(self, batch):
            return batch

    group = WorkerGroup([ray.remote(num_cpus=0)(Direct).remote()], pad_token_id=PAD)
    for send in (group.call, group.submit):
        with pytest.raises(mp.MaskpackError, match=r'by "echo": .*transport.*; expected .* without tensor_transport'):
            send("echo", batch)


def test_a_wrong_number_of_rows_is_an_error(group, batch):
    with pytest.raises(
        mp.errors.WorkerError, match=r"lose_a_row: returned a TensorDict of (2|1) rows for a batch of (3|2)"
    ):
        group.call("lose_a_row", batch)
    with pytest.raises(mp.errors.WorkerError, match="no_rows: returned a TensorDict of None rows") as caught:
        group.call("no_rows", batch)
    assert isinstance(caught.value.__cause__, mp.errors.LayoutError)


def printed(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_an_error_prints_the_lines_of_every_rank(group, batch):
    with pytest.raises(mp.errors.WorkerError) as caught:
        group.call("too_deep", batch)
    text = printed(caught.value)
    assert "in _at\n    return values[place]" in text
    assert 'in _elsewhere\n    raise KeyError("no such key")' in text
    assert text.count("return values[place]") == text.count("raise KeyError(") == 1
    assert "rank 2 (rows 5 to 6)" in text.partition("no such key")[2]
    assert "dispatch/endpoints.py" not in text
    assert "site-packages/ray" not in text
    failures = caught.value.failures
    assert ["in _at" in one.traceback for one in failures] == [True, False, False]
    assert ["in _elsewhere" in printed(one.error) for one in failures] == [False, True, True]


def test_a_worker_error_pickles(group, batch):
    with pytest.raises(mp.errors.WorkerError) as caught:
        group.call("too_deep", batch)
    error = caught.value
    back = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert type(back) is mp.errors.WorkerError
    assert (str(back), back.method, back.call) == (str(error), "too_deep", None)
    seen = [(one.rank, one.rows.tolist(), type(one.error), one.traceback) for one in back.failures]
    assert seen == [(one.rank, one.rows.tolist(), type(one.error), one.traceback) for one in error.failures]
    for part in ("return values[place]", 'raise KeyError("no such key")', "rank 2 (rows 5 to 6): the same"):
        assert printed(back).count(part) == printed(error).count(part)


@ray.remote(num_cpus=0)
def in_a_task(group, batch, method):
    return group.call(method, batch)


def test_a_group_works_in_a_task_and_its_errors_cross(group, batch):
    assert_same(ray.get(in_a_task.remote(group, batch, "echo")), batch)
    with pytest.raises(mp.errors.WorkerError) as caught:
        ray.get(in_a_task.remote(group, batch, "too_deep"))
    assert (caught.value.method, caught.value.call) == ("too_deep", None)
    assert [one.rank for one in caught.value.failures] == [0, 1, 2]
    assert "return values[place]" in caught.value.failures[0].traceback
    assert "return values[place]" in printed(caught.value)


class Counter:
    done = 0

    @endpoint
    def only_here(self, batch):
        self.done += 1

    @endpoint
    def both(self, batch):
        self.done += 1
        return batch

    def count(self):
        return self.done

    def own_repr(self):
        return repr(self)


class NoCounter:
    def both(self):
        pass


def test_an_error_of_sending_leaves_no_rank_at_work_unseen(local_ray, batch):
    counter, other = (ray.remote(num_cpus=0)(kind).remote() for kind in (Counter, NoCounter))
    mixed = WorkerGroup([counter, other], pad_token_id=PAD)
    with pytest.raises(mp.errors.MethodError, match=r'actors \[1\] have no method "only_here"'):
        mixed.call("only_here", batch)
    assert ray.get(counter.count.remote()) == 0
    with pytest.raises(mp.errors.WorkerError, match=r"on 1 of 2 ranks: rank 1 \(rows 4 to 6\): .*@endpoint") as caught:
        mixed.call("both", batch)
    assert ray.get(counter.count.remote()) == 1
    mixed.replace(1, counter)
    assert_same(caught.value.call.retry().result(), batch)
    assert ray.get(counter.count.remote()) == 3


def test_a_retry_has_the_arguments_of_the_call(group, batch):
    held = {"step": 1}
    with pytest.raises(mp.errors.WorkerError) as caught:
        group.call("fail_once", batch, held)
    held["step"] = 2
    assert set(caught.value.call.retry().result()) == {1}


def test_methods_that_do_not_take_packed_rows(group, batch):
    with pytest.raises(mp.errors.MethodError, match=r'have no method "nope".*@endpoint') as caught:
        group.call("nope", batch)
    assert isinstance(caught.value, AttributeError)
    with pytest.raises(mp.MaskpackError, match=r'cannot be called by "undecorated".*@endpoint'):
        group.call("undecorated", batch)
    with pytest.raises(mp.errors.WorkerError, match="Decorate the method with @endpoint"):
        group.call("undecorated_with_any_arguments", batch)
    with pytest.raises(mp.MaskpackError, match="coroutine is an async method"):

        @endpoint
        async def coroutine(self, batch):
            return None

    with pytest.raises(mp.MaskpackError, match="generator is a generator; expected a plain method"):

        @endpoint
        def generator(self, batch):
            yield batch

    with pytest.raises(mp.MaskpackError, match="asynchronously is a generator"):

        @endpoint
        async def asynchronously(self, batch):
            yield batch

    with pytest.raises(mp.errors.LayoutError, match="format is 'jagged'"):
        endpoint(format="jagged")
    with pytest.raises(mp.errors.LayoutError, match="fields is the string 'values'"):
        endpoint(fields="values")(Worker.undecorated)


@pytest.mark.parametrize("balance", [3, "token", [[0, 1], [2]], [[0, 1, 2], [3, 4, 5], [6, 6]], [[0.5], [], []]])
def test_a_balance_that_divides_nothing(group, batch, balance):
    with pytest.raises(mp.errors.LayoutError, match="WorkerGroup: balance"):
        group.call("echo", batch, balance=balance)


@pytest.mark.parametrize(
    "options",
    [
        {"dp_ranks": [0, 2, 1, 3]},
        {"dp_ranks": [0, 2, 2]},
        {"collect": [True, True, False]},
        {"collect": [True]},
        {"dp_ranks": [0, 0, 1], "collect": [True, True, True]},
        {"dp_ranks": [0, 0, 1], "collect": [False, False, True]},
    ],
)
def test_ranks_that_make_no_sense(options):
    with pytest.raises(mp.MaskpackError, match=r"WorkerGroup: (dp_ranks|collect)"):
        WorkerGroup([None] * 3, **options)


def test_a_group_without_actors():
    with pytest.raises(mp.MaskpackError, match="no actors"):
        WorkerGroup([])


def test_errors_of_packing_are_raised_before_anything_is_sent(group, batch):
    strict = WorkerGroup(group.actors, pad_token_id=PAD, strict_mask_nesting=True)
    dense = batch.copy().set("secret", torch.ones(B, 3))
    with pytest.raises(mp.errors.CoverageError, match="secret"):
        strict.call("echo", dense)
    with pytest.raises(mp.errors.RegistryError, match="pad_token_id"):
        WorkerGroup(group.actors).call("echo", batch)
    assert_same(strict.call("echo", batch), batch)


def test_a_nested_batch_is_updated_with_results(group, batch):
    batch = batch.exclude("entropys")
    nested = mp.nest_batch_by_mask(batch, pad_token_id=PAD)
    nested.update(group.call("scale_nested", nested, 2.0, format="nested"))
    nested.update(group.call("score_every_token", nested, format="nested"))
    entropys = torch.where(batch["attention_mask"].bool(), batch["input_ids"].to(torch.float32), 0.0)
    wanted = batch.copy().set("values", batch["old_log_probs"] * 2.0).set("entropys", entropys)
    assert_same(mp.unnest_batch_by_mask(nested), wanted)
    assert_same(group.call("echo", nested), wanted)


def test_strict_on_the_way_back(group, batch):
    options = {"pad_token_id": PAD, "strict_mask_nesting": "both"}
    strict = WorkerGroup(group.actors, **options)
    assert_same(strict.call("echo", batch), batch)
    assert_same(strict.call("scale", batch, 2.0), group.call("scale", batch, 2.0))
    for call in (
        lambda group: group.call("unknown_field", batch),
        lambda group: group.call("unknown_field_in_parts", batch),
        lambda group: group.call("unknown_field", batch, format="view").materialize(get=ray.get),
    ):
        with pytest.raises(mp.errors.WorkerError, match=r'CoverageError: .*"found" \(3, 4\) float32') as caught:
            call(strict)
        assert len(caught.value.failures) == RANKS
        assert_same(
            call(WorkerGroup(group.actors, pad_token_id=PAD, strict_mask_nesting=True))["found"], torch.ones(B, 4)
        )
    with pytest.raises(mp.errors.WorkerError, match=r'LossyPadError: .*field "old_log_probs" holds 7.0'):
        strict.call("values_under_the_mask", batch)
    known = WorkerGroup(group.actors, **options, registry=mp.RL_FIELDS | {"found": mp.MaskNestingSpec(None)})
    assert_same(known.call("unknown_field", batch)["found"], torch.ones(B, 4))
    with pytest.raises(
        mp.errors.RegistryError, match="strict_mask_nesting is 'back'; expected True, False or \"both\""
    ):
        WorkerGroup(group.actors, strict_mask_nesting="back")


def test_a_further_batch_lies_under_the_layouts_of_the_first(group, batch):
    strict = WorkerGroup(group.actors, pad_token_id=PAD, strict_mask_nesting=True)
    packed, rows = mp.compress(batch, pad_token_id=PAD), strict.put(batch)
    other = TensorDict({"old_log_probs": batch["old_log_probs"] * 3}, batch_size=[B])
    for first in (batch, packed, rows, rows[::-1][::-1]):
        for out in (strict.call("both", first, other), strict.call("both", first, other=other)):
            assert_same(out["values"], batch["old_log_probs"] * 3 + batch["old_log_probs"])
    perm = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    out = strict.call("both", rows[perm], TensorDict({"old_log_probs": other["old_log_probs"][perm]}, batch_size=[B]))
    assert_same(out["values"], (batch["old_log_probs"] * 4)[perm])
    with pytest.raises(mp.errors.LossyPadError, match="old_log_probs"):  # not in the order of the first
        strict.call("both", batch, other[perm])
    with (
        pytest.warns(mp.errors.MaskpackWarning, match="old_log_probs"),
        pytest.raises(mp.errors.LayoutError, match=f"a batch of {B - 1} rows beside one of {B}"),
    ):
        group.call("both", batch, other[1:])


def test_a_further_batch_with_a_mask_of_its_own_keeps_it(group, batch):
    """Its rows are others, whose lengths the first batch does not know."""
    strict = WorkerGroup(group.actors, pad_token_id=PAD, strict_mask_nesting=True)
    shorter = batch.select("attention_mask", "responses", "old_log_probs").flip(0)
    out = strict.call("both", batch, shorter)
    assert_same(out["values"], batch["old_log_probs"] + shorter["old_log_probs"])


def test_a_field_that_is_kept_whole(group, batch):
    batch = batch.clone()
    batch["old_log_probs"][0, 5] = 3.0
    with pytest.warns(mp.errors.MaskpackWarning, match="old_log_probs"):
        assert_same(group.call("echo", batch), batch)


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])
def test_a_full_store_is_named(group, batch, monkeypatch, kind):
    """On the way there and on the way back."""

    def full(*args, **kwargs):
        raise getattr(ray.exceptions, kind)("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ray, "put", full)
        for send in (group.put, lambda rows: group.call("echo", rows), lambda rows: group.submit("echo", rows)):
            with pytest.raises(mp.errors.StoreFullError, match=rf"{kind}: no room.*Drop views.*object_store_memory"):
                send(batch)
        with pytest.raises(mp.errors.StoreFullError, match=kind):
            group.run("plain", torch.zeros(3))
    call = group.submit("echo", batch)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", full)
        with pytest.raises(
            mp.errors.WorkerError, match=r"on 3 of 3 ranks: .*StoreFullError: .*object store is full"
        ) as caught:
            call.result()
    assert {type(one.error) for one in caught.value.failures} == {mp.errors.StoreFullError}
    assert_same(caught.value.call.retry().result(), batch)


# -------------------------------------------------------------------- methods without a batch, and the life of actors


def test_methods_without_a_batch(local_ray):
    actors = [ray.remote(num_cpus=0)(Worker).remote(factor) for factor in (1.0, 2.0, 3.0, 4.0)]
    peers = WorkerGroup(actors, dp_ranks=[1, 0, 1, 0], collect=[False, True, True, False], pad_token_id=PAD)
    given = ((7, "x"), {"more": [1]})
    assert peers.run("plain", 7, "x", more=[1]) == [(factor, *given) for factor in (1.0, 2.0, 3.0, 4.0)]
    assert peers.run("plain", rank=1) == [(1.0, (), {}), (3.0, (), {})]
    weights = torch.arange(5.0)
    assert all(torch.equal(args[0], weights) for _, args, _ in peers.run("plain", weights))
    with pytest.raises(
        mp.errors.WorkerError, match=r"on 1 of 4 actors: rank 1, actor 2: KeyError: 'no such key'"
    ) as caught:
        peers.run("fail_plainly", 3.0)
    assert 'raise KeyError("no such key")' in printed(caught.value)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.rows, failure.actor, caught.value.call) == (1, None, 2, None)
    assert pickle.loads(pickle.dumps(caught.value)).failures[0].actor == 2
    with pytest.raises(mp.errors.MethodError, match='no method "nope"'):
        peers.run("nope")
    with pytest.raises(mp.errors.MethodError, match=r'"fail_plainly" cannot be called so: .*value'):
        peers.run("fail_plainly")
    for rank in (2, -1, "a"):
        with pytest.raises(mp.errors.LayoutError, match=r"WorkerGroup.run: rank is"):
            peers.run("plain", rank=rank)
    actors[2].sleep.remote(None, 1.0)
    with pytest.raises(mp.errors.WorkerError, match=r"rank 1, actor 2: TimeoutError: no answer"):
        peers.run("plain", timeout=0.1)


class Unbuildable:
    def __init__(self, rank=None):
        if rank is None or "rank 1" in repr(self):
            _elsewhere()

    def plain(self):
        pass


def test_ready_says_which_constructors_fail(local_ray):
    free = {"num_cpus": 0}
    with (
        WorkerGroup.launch(Unbuildable, 2, actor_options=free) as none,
        pytest.raises(
            mp.errors.WorkerError, match=r'"__init__" failed on 2 of 2 actors: rank 0, actor 0: .*KeyErr'
        ) as caught,
    ):
        none.ready()
    assert 'raise KeyError("no such key")' in printed(caught.value)
    with (
        WorkerGroup.launch(Unbuildable, 2, worker_kwargs={"rank": 1}, actor_options=free) as half,
        pytest.raises(
            mp.errors.WorkerError, match=r"failed on 1 of 2 actors: rank 1, actor 1: ActorDiedError: KeyError"
        ),
    ):
        half.ready()
    nowhere = WorkerGroup.launch(Worker, 1, actor_options={"num_cpus": 1000})
    with pytest.raises(mp.errors.WorkerError, match=r"no answer in .*resources.*ray status"):
        nowhere.ready(timeout=0.5)


def test_a_group_says_what_it_is_and_closes_what_it_launched(local_ray, batch):
    with WorkerGroup.launch(Worker, 2, peers=2, pad_token_id=PAD, codec="zstd", actor_options={"num_cpus": 0}) as own:
        assert repr(own) == f"WorkerGroup(2 ranks, 4 actors of Worker, pad_token_id={PAD}, codec=zstd)"
        own.ready()
        node = ray.get_runtime_context().get_node_id()[:8]
        assert f"4 actors of Worker, nodes {[node] * 4}" in repr(own)
        assert_same(own.call("echo", batch), batch)
        with pickle.loads(pickle.dumps(own)) as copy:
            assert repr(copy) == repr(own)
        with WorkerGroup(own.actors[::2], pad_token_id=PAD) as others:
            assert_same(others.call("echo", batch), batch)
        assert_same(own.call("echo", batch), batch)  # neither killed an actor
    own.close()
    with pytest.raises(mp.errors.WorkerError, match="ActorDiedError"):
        own.call("echo", batch)


def test_other_actors_take_the_place_of_a_rank(local_ray, batch):
    with WorkerGroup.launch(Worker, 2, 2.0, pad_token_id=PAD, actor_options={"num_cpus": 0}) as own:
        rows = own.put(batch)
        ray.kill(own.actors[1])
        with pytest.raises(mp.errors.WorkerError, match=r"on 1 of 2 ranks: rank 1"):
            own.call("scale", rows, 1.0)
        new = ray.remote(num_cpus=0)(Worker).remote(2.0)
        own.replace(1, new)
        assert own.actors[1] is new
        assert_same(own.call("scale", rows, 1.0)["values"], batch["old_log_probs"] * 2.0)
        with pytest.raises(mp.MaskpackError, match=r"got 2 actors for rank 0; expected 1"):
            own.replace(0, new, new)
        with pytest.raises(mp.errors.LayoutError, match=r"replace: rank is 2; expected a whole number from 0 to 1"):
            own.replace(2, new)
    assert ray.get(new.plain.remote()) == (2.0, (), {})


# -------------------------------------------------------------------- the docs


def test_the_page_runs(local_ray):
    blocks = BLOCK.findall((DOCS / "dispatch.md").read_text())
    names = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "dispatch.md", "exec"), names)
    assert_same(names["again"], names["log_probs"])
    assert_same(names["result"], names["log_probs"])
    assert_same(names["here"]["advantages"], torch.zeros(4, 6))
    assert [found["clip"] for found in names["metrics"]] == [0.2, 0.2]


def test_the_page_of_plans_runs(local_ray):
    for block in BLOCK.findall((DOCS / "planning.md").read_text()):
        exec(compile(block, "planning.md", "exec"), {"__name__": "__main__"})


# -------------------------------------------------------------------- without Ray, and launching


def test_a_method_called_with_a_batch_runs_undecorated(batch):
    worker = Worker(3.0)
    assert worker.echo(batch) is batch
    assert worker.echo_nested(batch) is batch
    assert_same(worker.scale(batch, 2.0, less=1.0)["values"], batch["old_log_probs"] * 2.0 * 3.0 - 1.0)
    assert worker.lose_a_row(batch).batch_size == (B - 1,)
    with pytest.raises(ValueError, match="this rank failed"):
        worker.fail(batch[2:])
    assert Worker.scale.__name__ == "scale"


def test_launch_tells_options_from_arguments_of_the_class(local_ray, batch):
    group = WorkerGroup.launch(Worker, 1, worker_kwargs={"factor": 3.0}, pad_token_id=PAD)
    assert group.run("plain") == [(3.0, (), {})]
    with pytest.raises(mp.MaskpackError, match=r"no option is called 'factor'; .*worker_kwargs=\{'factor': ...\}"):
        WorkerGroup.launch(Worker, 1, factor=3.0)
    with pytest.raises(mp.MaskpackError, match=r"worker_kwargs is 3; expected a dict"):
        WorkerGroup.launch(Worker, 1, worker_kwargs=3)


def test_what_launched_actors_print_has_their_rank(local_ray):
    """Ray writes the repr of an actor in front of it."""
    with WorkerGroup.launch(Counter, 2, peers=2, actor_options={"num_cpus": 0}) as group:
        assert group.run("own_repr") == ["Counter rank 0"] * 2 + ["Counter rank 1"] * 2
    with WorkerGroup.launch(Said, 1, actor_options={"num_cpus": 0}) as group:
        assert group.run("own_repr") == ["as it likes"]


class Said:
    def __repr__(self):
        return "as it likes"

    def own_repr(self):
        return repr(self)


def test_launch_starts_a_local_ray(local_ray, monkeypatch):
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(ray, "remote", lambda kind: Remote)
    WorkerGroup.launch(Worker, 2)
    WorkerGroup.launch(Worker, 2, num_cpus=5)
    assert [options["num_cpus"] for options in started] == [2, 5]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    WorkerGroup.launch(Worker, 2)
    assert len(started) == 2


class Remote:
    @staticmethod
    def remote(*args):
        return args
