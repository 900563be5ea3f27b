"""What a group remembers of what it put, where threads share it, and where its ranks are. Without Ray: objects are
Python objects."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from maskpack import MaskNestingSpec, PackedBatch, compress
from maskpack.dispatch import placement
from maskpack.dispatch.division import planned_lengths
from maskpack.dispatch.messages import RowsAt, own_rows
from maskpack.dispatch.placement import Placement, Site
from maskpack.views import BatchMeta, BatchView

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
A, B, C, ALONE = "a" * 56, "b" * 56, "c" * 56, Site()


class Put:
    """An object in the store; `on_release` is called when nothing refers to it any more."""

    on_release: Any = None
    node: str | None = None

    def __init__(self, value: PackedBatch) -> None:
        self.value = value

    def __del__(self) -> None:
        if Put.on_release is not None:
            Put.on_release()


@pytest.fixture
def store(monkeypatch):
    """A store of 4000 bytes on each of the nodes in `alive`; what was put, by name of the node. No batch is too small
    for it."""
    alive = {A: 4000.0}
    puts: list[PackedBatch] = []
    monkeypatch.setattr(placement, "nodes_alive", lambda: alive)
    monkeypatch.setattr(placement, "this_node", lambda: A)
    monkeypatch.setattr(placement, "INLINED", 0)
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or Put(value))
    yield alive, puts
    Put.on_release = None


def numbers(rows: int, begin: int = 0) -> PackedBatch:
    return compress(TensorDict({"x": (torch.arange(rows) + begin).double().sqrt()}, [rows]), registry={})


def field_of(view: BatchView, name: str = "x") -> torch.Tensor:
    return view.materialize(name, get=lambda refs: [ref.value for ref in refs])[name]


def rows_of(view: BatchView) -> list[int]:
    seen = field_of(view)
    return (seen * seen).round().long().tolist()


def settled(place: Placement, view: BatchView, site: Site = ALONE) -> list[int]:
    return rows_of(place.settled(view, site)[0])


def test_rows_that_a_site_needs_twice_are_sent_once(store):
    _, puts = store
    rows = [5, 1, 5, 5, 2, 1]
    assert settled(Placement(1), BatchView.of(numbers(64)).take(rows), Site([A])) == rows
    assert [part.num_rows for part in puts] == [3]


def test_a_cut_gets_the_spans_that_its_site_needs(store, monkeypatch):
    """Where the batch lies, by a task that is told no others."""
    mask = (torch.arange(9) < torch.tensor([[9], [4], [7]])).long()
    packed = compress(
        TensorDict({"m": mask, "x": mask * torch.arange(1, 10)}, [3]),
        registry={name: MaskNestingSpec("m") for name in "mx"},
    )
    told: list[Any] = []
    run = placement._cut._function

    class Task:
        def options(self, scheduling_strategy):
            assert scheduling_strategy.node_id == B
            return self

        def remote(self, held, rows):
            told.append(rows)
            return Put(run(held.value, rows))

    monkeypatch.setattr(placement, "_cut", Task())
    monkeypatch.setattr(placement, "nodes_of", lambda reference: [B])
    view = BatchView.at(Put(packed), BatchMeta.of(packed)).take_tokens([(0, 0, 3), (2, 1, 4), (1, 2, 4), (0, 8, 9)])
    there, _ = Placement(1).settled(view.take([3, 1, 3]), Site([A]))
    assert [row.tolist() for row in field_of(there).unbind()] == [[9], [2, 3, 4], [9]]
    (cut,) = told
    assert cut.spans.row.tolist() == [2, 0]


def test_a_plan_counts_prompts_and_responses():
    masks = {"prompt": torch.tensor([[1, 1, 0], [1, 1, 1]]), "response": torch.tensor([[1, 0], [0, 0]])}
    packed = compress(TensorDict(masks, [2]), registry={name: MaskNestingSpec(name) for name in masks})
    assert planned_lengths(BatchView.of(packed)).tolist() == [3, 3]


def test_a_put_of_another_thread_while_the_old_one_is_released(store):
    """Ray lets other threads run while it releases an object."""
    place, view = Placement(1), BatchView.of(numbers(64))
    first, second, third = np.arange(0, 8), np.arange(8, 16), np.arange(16, 24)
    settled(place, view.take(first))
    others: list[list[int]] = []

    def released() -> None:
        Put.on_release = None
        thread = threading.Thread(target=lambda: others.append(settled(place, view.take(third))))
        thread.start()
        thread.join(300)
        assert not thread.is_alive(), "the other thread waits for this one"

    Put.on_release = released
    assert settled(place, view.take(second)) == second.tolist()
    assert others == [third.tolist()]


def test_threads_that_put_different_rows(store):
    place, view = Placement(1), BatchView.of(numbers(64))
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(200):
            rows = np.sort(rng.choice(64, 32, replace=False))
            if settled(place, view.take(rows)) != rows.tolist():
                wrong.append(rows)
            if rng.random() < 0.1:
                settled(place, BatchView.of(numbers(3)))
                place.ran_on(0, [A])
                place.sites()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# -------------------------------------------------------------------- what is remembered


def test_what_was_used_longest_ago_is_forgotten_first(store):
    _, puts = store
    place = Placement(1)
    batches = [numbers(50, 50 * n) for n in range(4)]
    views = [BatchView.of(packed) for packed in batches]
    size = batches[0].nbytes
    assert 300 < size < 500, "two fit into a quarter of the store"
    for n in (0, 1, 0, 2):  # 2 takes the room of 1
        assert settled(place, views[n]) == list(range(50 * n, 50 * n + 50))
    assert len(puts) == 3
    del puts[:]
    for n in (0, 2, 0, 1, 0):
        assert settled(place, views[n]) == list(range(50 * n, 50 * n + 50))
    assert puts == [batches[1]]
    del puts[:]
    large = BatchView.of(numbers(500))  # larger than the room: it is remembered until another comes
    for view in (large, large, views[0], large):
        settled(place, view)
    assert [len(packed) for packed in puts] == [500, 50, 500]


def test_a_batch_that_dies_is_forgotten(store):
    place, packed = Placement(1), numbers(5)
    settled(place, BatchView.of(packed)[:3])
    gone: list[str] = []
    Put.on_release = lambda: gone.append("object")
    del packed
    store[1].clear()
    gc.collect()
    assert gone == ["object"]


# -------------------------------------------------------------------- where ranks are


def test_sites_are_those_of_the_last_receipts(store):
    alive, _ = store
    place = Placement(3)
    assert place.sites() == [Site()] * 3
    place.ran_on(0, [A])
    assert place.sites() == [Site()] * 3, "one node"
    alive[B] = 4000.0  # the cluster grows
    unknown = place.sites()
    assert unknown[0] == {A}
    assert len(set(unknown)) == 3, "nobody knows whether they share a node"
    place.ran_on(1, [A])
    place.ran_on(2, [B, A])
    assert place.sites() == [{A}, {A}, {A, B}]
    assert place.ranks_off(alive) == set()
    del alive[B]
    assert place.ranks_off(alive) == {2}
    assert place.sites() == [{A}, {A}, {A, B}]
    place.ran_on(2, [A])  # started again elsewhere
    assert place.ranks_off(alive) == set()
    assert place.sites() == [{A}] * 3


def test_what_was_put_for_a_rank_that_moved_is_forgotten(store):
    alive, puts = store
    alive[B] = 4000.0
    place, packed = Placement(2), numbers(6)
    view = BatchView.of(packed)

    def send() -> None:
        for site, rows in zip(place.sites(), ([0, 1, 2], [3, 4, 5]), strict=True):
            assert settled(place, view.take(rows), site) == rows

    send()
    send()
    assert len(puts) == 2
    gone: list[str] = []
    Put.on_release = lambda: gone.append("object")
    del puts[:]
    place.ran_on(0, [B])
    assert gone == ["object"]
    send()
    assert [len(part) for part in puts] == [3]


# -------------------------------------------------------------------- shuffled rows of many objects


class Tasks:
    """In the place of tasks: they run at once, on the node that they were given."""

    def __init__(self, function: Any, log: list[tuple[str | None, int, int]]) -> None:
        self.function, self.log, self.given = function, log, dict[str, Any]()

    def options(self, **given: Any) -> Tasks:
        own = Tasks(self.function, self.log)
        own.given = given
        return own

    def remote(self, *args: Any) -> Any:
        values = [arg.value if isinstance(arg, Put) else arg for arg in args]
        out = self.function(*values)
        strategy, count = self.given.get("scheduling_strategy"), self.given.get("num_returns", 1)
        node = None if strategy is None else strategy.node_id
        self.log.append((node, sum(isinstance(arg, Put) for arg in args), count))
        made = [Put(pickle.loads(pickle.dumps(value))) for value in (out if count > 1 else [out])]
        for put in made:
            put.node = node
        return made if count > 1 else made[0]


@pytest.fixture
def three_nodes(store, monkeypatch):
    """Three nodes, and the tasks that are run: the node, the objects that are read and made."""
    alive, _ = store
    alive |= {B: 4000.0, C: 4000.0}
    log: list[tuple[str | None, int, int]] = []
    for name in ("_join", "_cut"):
        monkeypatch.setattr(placement, name, Tasks(getattr(placement, name)._function, log))

    def locations(refs: list[Put]) -> dict[Put, Any]:
        return {ref: {"node_ids": [] if ref.node is None else [ref.node]} for ref in refs}

    monkeypatch.setattr(ray.experimental, "get_object_locations", locations)
    return log


def scattered(places: list[str | None], rows: int) -> BatchView:
    """A view of `rows` rows in each of several objects, which are numbered one after the other."""
    views: list[BatchView] = []
    for number, node in enumerate(places):
        packed = numbers(rows, rows * number)
        put = Put(packed)
        put.node = node
        views.append(BatchView.at(put, BatchMeta.of(packed)))
    return BatchView.cat(views)


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_rows_are_joined_by_node(three_nodes, seed):
    """Some rows are needed twice, others nowhere; a site of two nodes."""
    rng = np.random.default_rng(seed)
    view = scattered([A] * 4 + [B] * 4 + [C] * 4, 8)
    index = rng.integers(0, 96, 120)
    sites = list(zip([Site([A]), Site([B]), Site([C, A])], np.split(rng.permutation(120), [30, 75]), strict=True))
    there, nbytes = Placement(3).spread(view.take(index), sites)
    for part, (_, rows) in zip(there, sites, strict=True):
        assert rows_of(part) == index[rows].tolist()
        (group,) = part.groups
        assert len(group.parts) <= 1
        assert sum(source.meta.num_rows for source in group.parts) == np.unique(index[rows]).size
    assert nbytes == sum(source.meta.nbytes for part in there for source in part.groups[0].parts)
    homes = np.repeat([A, B, C], 4)  # of the objects
    objects = [np.unique(index[rows] // 8) for _, rows in sites]
    cuts = [(node, {at for at, (site, _) in enumerate(sites) if node not in site}) for node in (A, B, C)]
    expected = [
        (node, sum(homes[one] == node for one in np.unique(np.concatenate([objects[at] for at in to]))), len(to))
        for node, to in cuts
    ]
    for (site, _), own in zip(sites, objects, strict=True):
        there = [node in site for node in homes[own]]
        expected.append((min(site), sum(there) + len({*homes[own]} - site), 1))
    assert three_nodes == expected


def test_rows_in_order_or_of_few_objects_are_not_joined(three_nodes):
    view = scattered([A] * 6 + [B] * 6, 8)
    halves = [(Site([A]), np.arange(48)), (Site([B]), np.arange(48, 96))]
    within = np.concatenate([8 * part + np.random.default_rng(part).permutation(8) for part in range(12)])
    for given in (view, view.take(within)):
        there, nbytes = Placement(2).spread(given, halves)
        assert [*rows_of(there[0]), *rows_of(there[1])] == rows_of(given)
        assert (nbytes, three_nodes) == (0, [])
    few = scattered([A] * 4 + [B] * 4, 12).take(np.random.default_rng(0).permutation(96))
    there, _ = Placement(2).spread(few, halves)
    assert [*rows_of(there[0]), *rows_of(there[1])] == rows_of(few)
    assert [read for _, read, _ in three_nodes] == [1] * 8, "cuts of one object each"


def test_small_objects_and_unknown_sites_are_joined_anywhere(three_nodes):
    """Ray does not say where objects are that it sends within a call."""
    view = scattered([None] * 5 + [B] * 5, 8)
    order = np.random.default_rng(0).permutation(80)
    sites = [(Site(["of rank 0"]), order[:30]), (Site([B]), order[30:])]
    there, _ = Placement(2).spread(view, sites)
    assert [rows_of(part) for part in there] == [order[:30].tolist(), order[30:].tolist()]
    assert three_nodes == [(B, 5, 1), (None, 6, 1), (B, 10, 1)]
    del three_nodes[:]
    (there,), _ = Placement(2).spread(view, [(ALONE, order)])
    assert rows_of(there) == order.tolist()
    assert three_nodes == [(None, 10, 1)]


def test_fields_of_other_objects_are_joined_apart(three_nodes):
    view = scattered([A] * 5 + [B] * 5, 8)
    more = BatchView.of(compress(TensorDict({"y": torch.arange(80)}, [80]), registry={}))
    order = np.random.default_rng(0).permutation(80)
    given = view.with_fields(more).take(order)
    there, _ = Placement(1).spread(given, [(Site([A]), np.arange(40)), (Site([B]), np.arange(40, 80))])
    seen = torch.cat([field_of(part, "y") for part in there])
    assert seen.tolist() == order.tolist()
    assert [*rows_of(there[0]), *rows_of(there[1])] == order.tolist()


def test_small_batches_stay_here_and_travel_in_messages(store, monkeypatch):
    _, puts = store
    monkeypatch.setattr(placement, "INLINED", 2000)
    place, small = Placement(2), numbers(64)
    for rows in ([5, 1, 5], list(range(64))):
        there, nbytes = place.settled(BatchView.of(small).take(rows), Site([A]))
        (source,) = there.groups[0].parts
        assert source.held is small
        assert rows_of(there) == rows
        assert nbytes == (small.nbytes if rows[0] == 5 else 0), "the bytes are made once"
    sent = pickle.loads(place.pickled(small))
    assert rows_of(BatchView.of(sent)) == list(range(64))
    assert puts == []
    assert settled(place, BatchView.of(numbers(256))) == list(range(256))
    assert settled(place, BatchView.of(small.take([3, 4]))) == [3, 4], "rows of a larger body"
    assert len(puts) == 2


class Held:
    """An object of a class that ranks may not know."""


@pytest.mark.parametrize(
    ("value", "travels"),
    [("text", True), (7, True), ("x" * 5000, False), (Held(), False), ([1], False), ({"a": 1}, False)],
)
def test_batches_with_objects_travel_in_messages_if_these_are_plain_and_small(store, monkeypatch, value, travels):
    monkeypatch.setattr(placement, "INLINED", 2000)
    batch = TensorDict({"x": torch.arange(2.0)}, [2])
    batch["object"] = NonTensorStack(NonTensorData(value), NonTensorData(value))
    packed = compress(batch, registry={})
    sent = Placement(1).pickled(packed)
    assert bool(sent) == travels
    if travels:
        assert BatchView.of(pickle.loads(sent)).materialize()["object"] == [value, value]


@pytest.mark.parametrize("order", [range(12), [5, 6, 7, 1, 2, 9], [3], []])
def test_a_rank_finds_its_rows(order):
    """Every slice of a view, of one batch or of two, of all fields or one."""
    first, second = numbers(12), numbers(12, 12)
    for whole in (BatchView.of(first), BatchView.cat([BatchView.of(first), BatchView.of(second)])):
        view = whole.take(list(order))
        for begin in range(view.num_rows + 1):
            for end in range(begin, view.num_rows + 1):
                objects: list[Any] = []

                def add(held: Any, objects: list[Any] = objects) -> int:
                    objects.append(pickle.dumps(held) if held is first else held)
                    return len(objects) - 1

                at = RowsAt.of(0, [view], False, empty=begin == end)
                own = [own_rows(group, slice(begin, end), add) for group in view.groups]
                at, own = pickle.loads(pickle.dumps((at, own)))
                packed = at.packed(own, objects, ["x"], "test")
                assert rows_of(BatchView.of(packed)) == list(order)[begin:end]
