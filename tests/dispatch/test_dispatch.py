"""Dispatch over a local Ray: every row once, in order, bit for bit, and what goes wrong on a rank is raised here."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
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
from fault_ranks import kill
from ray import cloudpickle
from samples import PAD, ROWS, assert_same, freeze, per_row, rollout
from tensordict import NonTensorData, TensorDict, tensorclass

import maskpack as mp
from maskpack.dispatch import Broadcast, WorkerGroup, endpoint, placement
from maskpack.dispatch import call as calls
from maskpack.errors import (
    CoverageError,
    LayoutError,
    LossyPadError,
    MaskpackError,
    MaskpackWarning,
    PlanError,
    RegistryError,
    StorageError,
    WorkerError,
)
from maskpack.planning import PlanOptions, PrefixTree

RANKS = 3
B = len(ROWS)
BY_ROWS = PlanOptions(cost=np.ones_like)
"""A budget is a number of rows."""

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
        """It takes the entries out of its batch."""
        values = batch["old_log_probs"] * factor * self.factor
        for name in list(batch.keys()):
            del batch[name]
        return TensorDict({}, batch_size=batch.batch_size).set("values", values)

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

    def found(self, batch):
        return TensorDict({"found": torch.ones(len(batch), 4)}, batch_size=batch.batch_size)

    unknown_field, unknown_field_in_parts = endpoint(found), endpoint(micro_batches=True)(found)

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
        tokens = [part["attention_mask"].sum().item() for part in plan.apply(batch)]
        return {"uid": list(batch["uid"]), "micro_batches": plan.micro_batches, "tokens": tokens}

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
    def wait(self, batch, file):
        while os.path.exists(file):
            time.sleep(0.005)


class OnGpu(Worker):
    """A rank that returns CUDA tensors, as far as a machine without CUDA can tell: what it packs says so."""

    def __init__(self):
        super().__init__()
        from maskpack.dispatch import endpoints as serving

        compress = serving.compress
        serving.compress = lambda batch, **options: said_to_be_on_a_gpu(compress(batch, **options))

    @endpoint
    def keeps_its_device(self, batch):
        """The TensorDict and the one within say where they are; objects and further results have tensors."""
        inner = TensorDict({"x": batch["old_log_probs"].clone()}, batch_size=batch.batch_size, device="cpu")
        out = TensorDict({"inner": inner}, batch_size=batch.batch_size, device="cpu")
        out.set("item", per_row([{"x": far(row)} for row in batch["old_log_probs"]]))
        return out, {"parts": [far(batch["old_log_probs"]), (far(batch["returns"]), 3)]}

    @endpoint
    def tensors_alone(self, batch):
        return far(batch["old_log_probs"])


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


@pytest.fixture(scope="module")
def group(local_ray):
    return WorkerGroup.launch(Worker, RANKS, pad_token_id=PAD)


@pytest.fixture(scope="module")
def strict(group):
    return WorkerGroup(group.actors, pad_token_id=PAD, strict_mask_nesting=True)


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
    for args, named in (((turns(),), {}), ((0, turns()), {}), ((), {"turn": turns()})):
        with pytest.raises(LayoutError, match=r"tensorclass Turn.*would not be divided.*Broadcast\(value\)"):
            group.call("metrics", batch, *args, **named)
    whole = group.call("metrics", batch, Broadcast(turns()))
    assert [(type(one["args"][0]), len(one["args"][0])) for one in whole] == [(Turn, B)] * RANKS


# -------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("method", ["echo", "echo_nested"])
def test_rows_there_and_back(group, batch, method):
    assert_same(group.call(method, batch), batch)
    assert_same(mp.unnest_batch_by_mask(group.call(method, batch, format="nested")), batch)
    assert_same(group.call(method, batch, balance=[[6, 0], [3, 1, 2], [5, 4]]), batch)
    some = batch.exclude("global_token_num")
    of_two = mp.views.BatchView.cat([group.put(some)[:4], group.put(some)[4:]])  # a rank has rows of both
    assert_same(group.call(method, of_two), some)


@pytest.mark.parametrize("rows", [B, 6, 5, 3, 2, 1, 0])
def test_rows_that_do_not_divide(group, rows):
    """Those that came, and new fields of responses and of sequences; also where some ranks have no rows."""
    batch = rollout(ROWS[:rows], objects=False)
    scaled = TensorDict({"values": batch["old_log_probs"] * 2.0}, [rows])
    scores = TensorDict({"entropys": batch["input_ids"].float() * batch["attention_mask"]}, [rows])
    for method, more, expected in (
        ("echo", (), batch),
        ("echo_nested", (), batch),
        ("scale", (2.0,), scaled),
        ("scale_nested", (2.0,), scaled),
        ("score_every_token", (), scores),
    ):
        assert_same(group.call(method, batch, *more), expected)
        nested = group.call(method, batch, *more, format="nested")
        assert expected is batch or all(nested[name].is_nested for name in expected.keys())  # noqa: SIM118
        assert_same(mp.unnest_batch_by_mask(nested), expected)


def test_parts_differ_by_one_row_and_keep_their_order(group, batch):
    results = group.call("metrics", batch, 1, "two", three=[3])
    assert [result["rows"] for result in results] == [3, 2, 2]
    assert [uid for result in results for uid in result["uid"]] == list(batch["uid"])
    for result in results:
        assert (result["args"], result["kwargs"]) == ((1, "two"), {"three": [3]})
        assert result["kinds"] == ["Tensor"]  # padded: no jagged tensor
    few = group.call("metrics", batch[:2])
    assert [result["rows"] for result in few] == [1, 1, 0]


def test_outputs_with_a_response_mask_lie_under_the_axis_of_the_batch(group):
    """The mask of the responses is data; the layout is that of the batch, as on the way there."""
    batch = rollout(((2, 4), (3, 2), (1, 4)), 3, 4, holes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = group.call("response_outputs", batch, format="nested")
    assert out["old_log_probs"].is_nested
    assert [len(row) for row in samples.row_list(out["old_log_probs"])] == [4, 2, 4]
    assert_same(mp.unnest_batch_by_mask(out), batch.select("response_mask", "old_log_probs"))


def test_none_and_objects_come_back(group, batch):
    assert group.call("nothing", batch) is None
    out = group.call("objects", batch)
    assert list(out["answer"]) == [f"to {uid}" for uid in batch["uid"]]
    assert out["model"] == "one"


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
    with pytest.raises(WorkerError, match=message) as caught:
        group.call("differ", batch, how)
    assert caught.value.method == "differ"
    assert [len(part.rows) for part in caught.value.call.parts] == [3, 2, 2]  # they are kept


def test_what_every_rank_gets_whole_and_what_is_divided(group, batch):
    total = batch["responses"].sum().item()
    rows = [[6, 0], [3, 1, 2], [5, 4]]
    results = group.call("add", batch, Broadcast(batch), more=batch.select("uid"), balance=rows)
    assert results == [[len(own), total, [batch["uid"][row] for row in own]] for own in rows]
    given = group.call("metrics", batch, Broadcast({"a": 1}), [1, 2])
    assert [found["args"] for found in given] == [({"a": 1}, [1, 2])] * 3


def test_spans_of_tokens(group, batch):
    """Of rows here, and of rows in the object store, which are cut there."""
    spans = [(row, 1, int(n)) for row, n in enumerate(batch["attention_mask"].sum(-1)) if n > 1] + [(2, 0, 1)]
    fields = batch.select("input_ids", "attention_mask", "uid")
    stored = group.put(fields)
    returned = group.call("echo", fields, format="view")
    for rows in (group.pack(fields), stored, returned):
        out = group.call("echo", rows.take_tokens(spans))
        for own, (row, start, stop) in zip(out["input_ids"].unbind(), spans, strict=True):
            assert own.tolist() == batch["input_ids"][row][batch["attention_mask"][row].bool()][start:stop].tolist()
        assert list(out["uid"]) == [batch["uid"][row] for row, _, _ in spans]


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
    plan = group.plan(rows, int(batch["attention_mask"].sum(-1).max()) + 3, loss_tokens=batch["response_mask"].sum(-1))
    told = group.call("planned", rows, plan=plan)
    assert [each["uid"] for each in told] == [[batch["uid"][row] for row in own] for own in plan.rows]
    assert [each["micro_batches"] for each in told] == [own.micro_batches for own in plan.plans]
    assert [each["tokens"] for each in told] == [list(own.loads()) for own in plan.plans]
    assert group.metrics["plan/micro_batches"] == sum(len(own.micro_batches) for own in plan.plans)


def same_bits(x, y):
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def check_parts(group, rows, batch, plan):
    """A method for micro-batches sees those with rows, and gives every row once, padded and nested. A plan without
    micro-batches calls it once."""
    assert_same(group.call("echo_in_parts", rows, plan=plan), batch)
    values, sizes, tokens = group.call("scale_in_parts", rows, 3.0, plan=plan)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    assert [len(own) for own in sizes] == [
        sum(own.counts) - sum(own.dummies) if own.micro_batches else 1 for own in plan.plans
    ]
    assert sizes == group.call("count_in_parts", rows, plan=plan)
    assert sum(map(sum, sizes)) == len(batch)
    assert sum(map(sum, tokens)) == batch["attention_mask"].sum().item()
    nested = group.call("scale_nested_in_parts", rows, plan=plan, format="nested")
    assert same_bits(mp.unnest_batch_by_mask(nested)["values"], batch["old_log_probs"] * 2)


@pytest.mark.parametrize("most", [1, 2, None])
def test_a_method_for_micro_batches(group, batch, most):
    """With dummies, where ranks have unlike numbers of rows; a further batch is divided alike, another is not."""
    packed = group.pack(batch)
    plan = group.plan(packed, most or B, options=BY_ROWS)
    check_parts(group, packed, batch, plan)
    other, whole = batch.select("attention_mask", "prompts", "old_log_probs"), Broadcast(batch)
    values, *_ = group.call("scale_in_parts", packed, 3.0, other, plan=plan, whole=whole)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    options = PlanOptions(cost=np.ones_like, num_updates=2, multiple_of=2)  # with dummies in each update
    check_parts(group, packed, batch, group.plan(packed, 1, options=options))


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("updates", [1, 2, 4])
def test_a_plan_of_fewer_rows_than_ranks(group, batch, rows, updates):
    """Ranks without rows run as many micro-batches, none of which has rows; also where no rank has any."""
    few = group.pack(batch)[1 : 1 + rows]
    tokens = batch["response_mask"][1 : 1 + rows].sum(-1)
    plan = group.plan(few, B, options=PlanOptions(num_updates=updates), loss_tokens=tokens)
    assert len({tuple(own.counts) for own in plan.plans}) == 1
    check_parts(group, few, batch[1 : 1 + rows], plan)


def test_dummies_of_ranks_without_rows(group, batch):
    few = group.pack(batch)[1:3]
    plan = group.plan(few, 1, options=PlanOptions(cost=np.ones_like, multiple_of=2))
    assert [own.counts for own in plan.plans] == [[2]] * RANKS
    check_parts(group, few, batch[1:3], plan)
    assert group.call("count_in_parts", few, plan=plan) == [[1] * len(rows) for rows in plan.rows]
    told = group.call("planned", few, plan=plan)
    assert [each["micro_batches"] for each in told] == [own.micro_batches for own in plan.plans]


def test_micro_batches_that_share_prefixes(group, batch, tmp_path):
    """The tree of a plan is divided, also for a retry."""
    rows, lengths = group.put(batch), batch["attention_mask"].sum(-1)
    prompts = lengths - batch["response_mask"].sum(-1)
    tree = PrefixTree.from_groups(lengths, [row // 2 for row in range(B)], prompts, min_shared=1)
    plan = group.plan(rows, 20, tree=tree)
    computed = sum(sum(own.loads()) for own in plan.plans)
    assert [told["micro_batches"] for told in group.call("planned", rows, plan=plan)] == [
        own.micro_batches for own in plan.plans
    ]
    assert group.metrics["plan/shared_tokens"] == lengths.sum() - computed
    with pytest.raises(WorkerError, match="once") as caught:
        group.call("fail_once_in_parts", rows, str(tmp_path / "failed"), plan=plan)
    assert same_bits(caught.value.call.retry().result()["old_log_probs"], batch["old_log_probs"])


def test_a_method_for_micro_batches_without_a_plan(group, batch):
    assert sorted(group.call("count_in_parts", batch)) == [[2], [2], [3]]
    values, sizes, _ = group.call("scale_in_parts", batch, 3.0)
    assert same_bits(values["values"], batch["old_log_probs"] * 3.0)
    assert sum(map(sum, sizes)) == B


def test_a_batch_of_groups_is_one_of_rows_as_the_error_says(group, batch):
    groups = batch.select("attention_mask", "responses", "response_mask", "prompts")[:4].reshape(2, 2)
    with pytest.raises(
        LayoutError, match=r"is \(2, 2, \d+\); expected .* a row of each line of the mask: batch.reshape\(-1\)"
    ):
        group.call("echo", groups)
    assert_same(group.call("echo", groups.reshape(-1)).reshape(2, 2), groups)


def test_results_of_micro_batches_that_do_not_fit(group, batch):
    plan = group.plan(group.pack(batch), 2, options=BY_ROWS)
    with pytest.raises(WorkerError, match=r"returned a TensorDict, something else for its micro-batches"):
        group.call("differ_in_parts", batch, plan=plan)
    with pytest.raises(WorkerError, match=r"returned a tensor for its micro-batches; expected a TensorDict"):
        group.call("tensors_in_parts", batch, plan=plan)


@pytest.mark.parametrize("speaker", [0, 1])
def test_only_results_that_are_wanted_are_joined(local_ray, batch, speaker):
    actors = [ray.remote(num_cpus=0)(Worker).remote(factor) for factor in (1.0, 2.0)]
    collect = [speaker == actor for actor in range(2)]
    peers = WorkerGroup(actors, dp_ranks=[0, 0], collect=collect, pad_token_id=PAD)
    plan = peers.plan(peers.pack(batch), 4, options=BY_ROWS)
    if speaker == 0:
        assert peers.call("differ_on_a_peer", batch, plan=plan) == [[{}, {}]]
    else:
        with pytest.raises(WorkerError, match=r"returned None, something else for its micro-batches"):
            peers.call("differ_on_a_peer", batch, plan=plan)


@pytest.mark.parametrize("what", ["groups", "loss_tokens"])
def test_a_plan_whose_rows_belong_together_is_not_retried_in_part(group, batch, tmp_path, what):
    of_groups = {"token_budget": 1000, "groups": list(batch["uid"])}
    of_loss = {"token_budget": 1, "options": BY_ROWS, "loss_tokens": batch["response_mask"].sum(-1)}
    plan = group.plan(group.pack(batch), **(of_groups if what == "groups" else of_loss))
    with pytest.raises(WorkerError, match=r"once.*Run the whole call again") as caught:
        group.call("fail_once_in_parts", batch, str(tmp_path / "failed"), plan=plan)
    with pytest.raises(MaskpackError, match=r"loss tokens or groups; expected one whose rows .*Run the whole call"):
        caught.value.call.retry()


def test_plans_that_do_not_fit_the_call(group, batch):
    rows = group.put(batch)
    plan = group.plan(rows, 100)
    with pytest.raises(PlanError, match=rf"plan of {B} rows on {RANKS} ranks with balance 'rows'; expected"):
        group.call("planned", rows[1:], plan=plan)
    with pytest.raises(PlanError, match=r"row \d has \d+ tokens, in the plan \d+; expected the plan"):
        group.call("planned", rows.take(rows.lengths("sequence").argsort()), plan=plan)
    with pytest.raises(WorkerError, match=r"echo: called with a plan, and takes none; expected a parameter"):
        group.call("echo", rows, plan=plan)
    longer = group.plan(rows, 100, lengths=plan.lengths + 1)
    assert sum(len(told["uid"]) for told in group.call("planned", rows, plan=longer)) == B
    for given in (batch, mp.nest_batch_by_mask(batch, pad_token_id=PAD)):
        assert group.plan(given, 100, lengths=batch["attention_mask"].sum(-1)).rows == plan.rows
        with pytest.raises(PlanError, match=rf"plan: lengths of {B - 1} rows for a batch of {B}; expected"):
            group.plan(given, 100, lengths=plan.lengths[1:])


def test_calls_are_awaited_together(group, batch):
    async def both():
        return await asyncio.gather(group.submit("scale", batch, 2.0), group.submit("echo", batch))

    scaled, same = asyncio.run(both())
    assert_same(scaled["values"], batch["old_log_probs"] * 2.0)
    assert_same(same, batch)


class Decoding(threading.Event):
    """Results are put together when this is set; the number of parts of each."""

    def __init__(self):
        super().__init__()
        self.seen = []


@pytest.fixture
def decoding(monkeypatch):
    gathered, begin = calls._gathered, Decoding()

    def late(parts, *more):
        begin.seen.append(len(parts))
        begin.wait()
        return gathered(parts, *more)

    monkeypatch.setattr(calls, "_gathered", late)
    yield begin
    begin.set()


def test_all_who_wait_for_a_call_get_its_result(group, batch, decoding):
    call = group.submit("echo", batch)
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(call.result) for _ in range(4)]
        threading.Timer(0.3, decoding.set).start()  # most of them wait by then
        results = [waiting.result() for waiting in waits]
    assert_same(results[0], batch)
    assert [result is results[0] for result in results] == [True] * 4
    assert call.result() is results[0]
    assert decoding.seen == [RANKS]


def test_a_call_is_awaited_again_after_one_gave_up(group, batch, decoding):
    async def twice():
        call = group.submit("echo", batch)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)
        decoding.set()
        return await call, await call

    first, second = asyncio.run(twice())
    assert_same(first, batch)
    assert first is second
    assert decoding.seen == [RANKS]


@pytest.fixture
def held(tmp_path):
    """A file that ranks wait for."""
    file = tmp_path / "held"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def test_each_who_waits_has_a_time_of_his_own(group, batch, held):
    call = group.submit("wait", batch, str(held))
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(call.result)
        try:
            with pytest.raises(WorkerError, match="no answer"):
                call.result(timeout=0.1)
        finally:
            held.unlink()
        assert patient.result() is None
    assert call.result(timeout=0) is None


def test_a_call_that_is_done_keeps_only_its_result(group, batch):
    call = group.submit("echo", batch)
    first = call.result()
    assert call.done()
    assert call.parts == []
    assert call.result() is first
    assert call.retry() is call


# -------------------------------------------------------------------- which rows they are


def kept_by(group, view, path, how):
    """Results of a view, whose rows stay where they are."""
    if how == "plan":
        return group.call("scale_in_parts", view, 2.0, plan=group.plan(view, 30), format="view")[0]
    if how == "onto":
        return group.put(view.materialize("returns", get=ray.get), onto=view)
    if how == "retry":
        path.unlink(missing_ok=True)
        with pytest.raises(WorkerError) as caught:
            group.call("fail_once_in_parts", view, str(path), format="view")
        return caught.value.call.retry().result()
    return group.call("scale", view, 2.0, format="view", balance="tokens")


@pytest.mark.parametrize("how", ["tokens", "plan", "retry", "onto"])
def test_results_in_another_order_are_refused(group, tmp_path, how):
    """Also where all rows are as long."""
    packed = group.pack(rollout([(2, 3)] * B))
    view = group.put(packed) if how == "tokens" else mp.views.BatchView.of(packed)
    turned = kept_by(group, view[::-1], tmp_path / "failed", how)
    with pytest.raises(LayoutError, match="row 0 of the fields is row 6 of the batch that it comes"):
        view.with_fields(turned)
    assert len(view.with_fields(turned[::-1])) == B
    part = kept_by(group, view[1:], tmp_path / "failed", how)
    with pytest.raises(LayoutError, match=r"row 0 of the fields is row 1 .* row 0 of the view is row 0"):
        view[:-1].with_fields(part)


def test_put_onto_other_rows_is_refused_before_anything_is_put(group, batch, monkeypatch):
    view = group.put(batch)
    monkeypatch.setattr(ray, "put", None)
    with pytest.raises(LayoutError, match="row 0 of the fields is row 6"):
        group.put(view[::-1], onto=view)


# -------------------------------------------------------------------- devices


@pytest.fixture(scope="module")
def gpus(local_ray):
    return WorkerGroup.launch(OnGpu, RANKS, pad_token_id=PAD, actor_options={"num_cpus": 0})


@pytest.mark.parametrize("method", ["echo_nested", "echo_in_parts"])
def test_results_come_to_the_host(gpus, group, batch, method):
    """From whatever device the ranks returned them; also of a retry, and where a rank takes them next."""
    options = {"plan": gpus.plan(gpus.pack(batch), 2, options=BY_ROWS)} if method == "echo_in_parts" else {}
    for device in (None, "cpu"):
        out = gpus.call(method, batch, device=device, **options)
        assert out.device == (None if device is None else torch.device("cpu"))
        assert_same(out.clear_device_(), batch)
        nested = gpus.call(method, batch, format="nested", device=device, **options)
        assert_same(mp.unnest_batch_by_mask(nested).clear_device_(), batch)
    view = gpus.call(method, batch, format="view", **options)
    assert {form.device for form in view.head.schema.forms} <= {"cpu", None}
    assert_same(view.materialize(get=ray.get), batch)
    assert_same(group.call("echo", view), batch)


def test_a_retry_has_the_device_of_the_call(gpus, batch, tmp_path):
    with pytest.raises(WorkerError, match="once") as caught:
        gpus.call("fail_once_in_parts", batch, str(tmp_path / "failed"), device="cpu")
    again = caught.value.call.retry().result()
    assert again.device == torch.device("cpu")
    assert_same(again["old_log_probs"], batch["old_log_probs"])


def test_tensors_beside_the_rows_come_to_the_host(gpus, batch):
    values = batch["old_log_probs"]
    out, apart = gpus.call("keeps_its_device", batch)
    assert out.device == out["inner"].device == torch.device("cpu")
    assert_same(out["inner"]["x"], values)
    assert_same(torch.stack([item["x"] for item in out["item"]]), values)
    assert_same(torch.cat([found["parts"][0] for found in apart]), values)
    assert_same(torch.cat([found["parts"][1][0] for found in apart]), batch["returns"])
    assert [type(found["parts"][1]) for found in apart] == [tuple] * RANKS
    assert_same(torch.cat(gpus.call("tensors_alone", batch)), values)


def test_a_device_that_the_driver_does_not_have_is_refused_before_anything_is_sent(batch):
    nobody = WorkerGroup([None] * RANKS, pad_token_id=PAD)
    for options in ({"device": "cuda:9"}, {"device": "gpu"}, {"device": "cpu", "format": "view"}):
        with pytest.raises(LayoutError, match="WorkerGroup: device is"):
            nobody.submit("echo", batch, **options)


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
        with pytest.raises(MaskpackError, match=r'by "echo": .*transport.*; expected .* without tensor_transport'):
            send("echo", batch)


def test_a_wrong_number_of_rows_is_an_error(group, batch):
    with pytest.raises(WorkerError, match=r"lose_a_row: returned a TensorDict of (2|1) rows for a batch of (3|2)"):
        group.call("lose_a_row", batch)
    with pytest.raises(WorkerError, match="no_rows: returned a TensorDict of None rows") as caught:
        group.call("no_rows", batch)
    assert isinstance(caught.value.__cause__, LayoutError)


def printed(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_an_error_prints_the_lines_of_every_rank(group, batch):
    with pytest.raises(WorkerError) as caught:
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


@ray.remote(num_cpus=0)
def in_a_task(group, batch, method):
    return group.call(method, batch)


def test_a_group_works_in_a_task_and_its_errors_cross(group, batch):
    assert_same(ray.get(in_a_task.remote(group, batch, "echo")), batch)
    with pytest.raises(WorkerError) as caught:
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
    with pytest.raises(LayoutError, match=r'actors \[1\] have no method "only_here"'):
        mixed.call("only_here", batch)
    assert ray.get(counter.count.remote()) == 0
    with pytest.raises(WorkerError, match=r"on 1 of 2 ranks: rank 1 \(rows 4 to 6\): .*@endpoint") as caught:
        mixed.call("both", batch)
    assert ray.get(counter.count.remote()) == 1
    mixed.replace(1, counter)
    assert_same(caught.value.call.retry().result(), batch)
    assert ray.get(counter.count.remote()) == 3


def test_a_retry_has_the_arguments_of_the_call(group, batch):
    held = {"step": 1}
    with pytest.raises(WorkerError) as caught:
        group.call("fail_once", batch, held)
    held["step"] = 2
    assert set(caught.value.call.retry().result()) == {1}


def test_methods_that_do_not_take_packed_rows(group, batch):
    with pytest.raises(LayoutError, match=r'have no method "nope".*@endpoint'):
        group.call("nope", batch)
    with pytest.raises(MaskpackError, match=r'cannot be called by "undecorated".*@endpoint'):
        group.call("undecorated", batch)
    with pytest.raises(WorkerError, match="Decorate the method with @endpoint"):
        group.call("undecorated_with_any_arguments", batch)


async def coroutine(self, batch):
    return None


def generator(self, batch):
    yield batch


async def asynchronously(self, batch):
    yield batch


@pytest.mark.parametrize("method", [coroutine, generator, asynchronously])
def test_methods_whose_result_cannot_be_packed(method):
    with pytest.raises(MaskpackError, match=f"{method.__name__} is an async method or a generator; expected a"):
        endpoint(method)


def test_errors_of_packing_are_raised_before_anything_is_sent(group, strict, batch):
    dense = batch.copy().set("secret", torch.ones(B, 3))
    with pytest.raises(CoverageError, match="secret"):
        strict.call("echo", dense)
    with pytest.raises(RegistryError, match="pad_token_id"):
        WorkerGroup(group.actors).call("echo", batch)
    assert_same(strict.call("echo", batch), batch)


def test_strict_on_the_way_back(group, strict, batch):
    options = {"pad_token_id": PAD, "strict_mask_nesting": "both"}
    both = WorkerGroup(group.actors, **options)
    assert_same(both.call("scale", batch, 2.0), group.call("scale", batch, 2.0))
    for method in ("unknown_field", "unknown_field_in_parts"):
        with pytest.raises(WorkerError, match=r'CoverageError: .*"found" \(3, 4\) float32') as caught:
            both.call(method, batch, format="view")
        assert len(caught.value.failures) == RANKS
    assert_same(strict.call("unknown_field", batch)["found"], torch.ones(B, 4))
    with pytest.raises(WorkerError, match=r'LossyPadError: .*field "old_log_probs" holds 7.0'):
        both.call("values_under_the_mask", batch)
    known = WorkerGroup(group.actors, **options, registry=mp.RL_FIELDS | {"found": mp.MaskNestingSpec(None)})
    assert_same(known.call("unknown_field", batch)["found"], torch.ones(B, 4))


def test_a_further_batch_lies_under_the_layouts_of_the_first(group, strict, batch):
    packed, rows = mp.compress(batch, pad_token_id=PAD), strict.put(batch)
    other = TensorDict({"old_log_probs": batch["old_log_probs"] * 3}, batch_size=[B])
    for first in (batch, packed, rows, rows[::-1][::-1]):
        for out in (strict.call("both", first, other), strict.call("both", first, other=other)):
            assert_same(out["values"], batch["old_log_probs"] * 3 + batch["old_log_probs"])
    perm = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    out = strict.call("both", rows[perm], TensorDict({"old_log_probs": other["old_log_probs"][perm]}, batch_size=[B]))
    assert_same(out["values"], (batch["old_log_probs"] * 4)[perm])
    with pytest.raises(LossyPadError, match="old_log_probs"):  # not in the order of the first
        strict.call("both", batch, other[perm])
    with (
        pytest.warns(MaskpackWarning, match="old_log_probs"),
        pytest.raises(LayoutError, match=f"a batch of {B - 1} rows beside one of {B}"),
    ):
        group.call("both", batch, other[1:])


def test_a_further_batch_with_a_mask_of_its_own_keeps_it(strict, batch):
    """Its rows are others, whose lengths the first batch does not know."""
    shorter = batch.select("attention_mask", "responses", "old_log_probs").flip(0)
    out = strict.call("both", batch, shorter)
    assert_same(out["values"], batch["old_log_probs"] + shorter["old_log_probs"])


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])
def test_a_full_store_is_named(group, batch, monkeypatch, kind):
    """On the way there and on the way back."""

    def full(*args, **kwargs):
        raise getattr(ray.exceptions, kind)("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ray, "put", full)
        for send in (group.put, lambda rows: group.call("echo", rows), lambda rows: group.submit("echo", rows)):
            with pytest.raises(StorageError, match=rf"{kind}: no room.*Drop views.*object_store_memory"):
                send(batch)
        with pytest.raises(StorageError, match=kind):
            group.run("plain", torch.zeros(3))
    call = group.submit("echo", batch)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", full)
        with pytest.raises(WorkerError, match=r"on 3 of 3 ranks: .*StorageError: .*object store is full") as caught:
            call.result()
    assert {type(one.error) for one in caught.value.failures} == {StorageError}
    assert_same(caught.value.call.retry().result(), batch)


# -------------------------------------------------------------------- methods without a batch, and the life of actors


def test_methods_without_a_batch(local_ray, held):
    actors = [ray.remote(num_cpus=0)(Worker).remote(factor) for factor in (1.0, 2.0, 3.0, 4.0)]
    peers = WorkerGroup(actors, dp_ranks=[1, 0, 1, 0], collect=[False, True, True, False], pad_token_id=PAD)
    weights = torch.arange(5.0)
    seen = peers.run("plain", weights, more=[1])
    assert [(factor, named) for factor, _, named in seen] == [(float(1 + actor), {"more": [1]}) for actor in range(4)]
    assert all(torch.equal(args[0], weights) for _, args, _ in seen)
    assert peers.run("plain", rank=1) == [(1.0, (), {}), (3.0, (), {})]
    with pytest.raises(WorkerError, match=r"on 1 of 4 actors: rank 1, actor 2: KeyError: 'no such key'") as caught:
        peers.run("fail_plainly", 3.0)
    assert 'raise KeyError("no such key")' in printed(caught.value)
    (failure,) = pickle.loads(pickle.dumps(caught.value)).failures
    assert (failure.rank, failure.rows, failure.actor, caught.value.call) == (1, None, 2, None)
    with pytest.raises(LayoutError, match=r'"fail_plainly" cannot be called so: .*value'):
        peers.run("fail_plainly")
    with pytest.raises(LayoutError, match=r"WorkerGroup.run: rank is 2"):
        peers.run("plain", rank=2)
    actors[2].wait.remote(None, str(held))
    with pytest.raises(WorkerError, match=r"rank 1, actor 2: TimeoutError: no answer"):
        peers.run("plain", timeout=0.1)


class Unbuildable:
    def __init__(self):
        if "rank 1" in repr(self):
            _elsewhere()


def test_ready_says_which_constructors_fail(local_ray):
    with (
        WorkerGroup.launch(Unbuildable, 2, actor_options={"num_cpus": 0}) as half,
        pytest.raises(WorkerError, match=r'"__init__" failed on 1 of 2 actors: rank 1, actor 1: .*KeyErr') as caught,
    ):
        half.ready()
    assert 'raise KeyError("no such key")' in printed(caught.value)
    nowhere = WorkerGroup.launch(Worker, 1, actor_options={"num_cpus": 1000})
    with pytest.raises(WorkerError, match=r"no answer in .*resources.*ray status"):
        nowhere.ready(timeout=0.5)


def test_a_group_closes_what_it_launched(local_ray, batch):
    with WorkerGroup.launch(Worker, 2, peers=2, pad_token_id=PAD, actor_options={"num_cpus": 0}) as own:
        assert repr(own) == "WorkerGroup(2 ranks, 4 actors of Worker)"
        own.ready()
        with pickle.loads(pickle.dumps(own)) as copy, WorkerGroup(own.actors[::2], pad_token_id=PAD) as others:
            assert_same(copy.call("echo", batch), batch)
            assert_same(others.call("echo", batch), batch)
        assert_same(own.call("echo", batch), batch)  # neither killed an actor
    own.close()
    with pytest.raises(WorkerError, match="ActorDiedError"):
        _call_until_it_fails(own, batch)


def _call_until_it_fails(group, batch):
    for _ in range(600):  # Ray ends an actor soon after it was told to
        group.call("echo", batch)
        time.sleep(0.1)


def test_other_actors_take_the_place_of_a_rank(local_ray, batch):
    with WorkerGroup.launch(Worker, 2, worker_kwargs={"factor": 2.0}, pad_token_id=PAD) as own:
        rows = own.put(batch)
        own.ready()  # a rank that starts slowly would be late, too
        kill(own.actors[1])
        with pytest.raises(WorkerError, match=r"on 1 of 2 ranks: rank 1"):
            own.call("scale", rows, 1.0)
        new = ray.remote(num_cpus=0)(Worker).remote(2.0)
        own.replace(1, new)
        assert_same(own.call("scale", rows, 1.0)["values"], batch["old_log_probs"] * 2.0)
        with pytest.raises(MaskpackError, match=r"got 2 actors for rank 0; expected 1"):
            own.replace(0, new, new)
    assert ray.get(new.plain.remote()) == (2.0, (), {})


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


# -------------------------------------------------------------------- small batches


def test_rows_of_small_batches_come_back_whichever_way_they_go(group, batch, puts, monkeypatch):
    """In messages, or through the store."""
    batch = batch.select("prompts", "responses", "attention_mask", "old_log_probs", "uid")
    for limit, objects in ((1 << 20, 0), (0, 1)):
        monkeypatch.setattr(placement, "INLINED", limit)
        rows = group.put(batch)
        assert_same(group.call("echo", rows), batch)
        kept = group.call("scale", rows[::-1], 2.0, format="view")
        both = group.call("echo", rows[::-1].with_fields(kept))
        assert_same(both.select("values"), TensorDict({"values": batch["old_log_probs"].flip(0) * 2.0}, [B]))
        assert_same(rows.materialize(get=ray.get), batch)
        assert len(puts) == objects, "views of small batches are not put"
        assert_same(pickle.loads(cloudpickle.dumps(rows)).materialize(get=ray.get), batch)


def test_a_long_text_is_sent_once_for_all_ranks(group, batch, puts):
    text = "long " * 50_000
    assert [found["args"] for found in group.call("metrics", group.put(batch), text)] == [(text,)] * RANKS
    assert sum(isinstance(value, bytes) for value in puts) == 1
