"""Dispatch over two Ray nodes: each gets the rows of its ranks, and rows go from rank to rank, not through the driver.

node 0: driver, object store, ranks 0 1        node 1: object store, ranks 2 3
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from fault_ranks import kill, until
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from samples import PAD, assert_same, freeze, workload
from tensordict import TensorDict

import maskpack as mp
from maskpack.dispatch import Broadcast, WorkerGroup, endpoint, placement
from maskpack.dispatch import call as dispatch_call
from maskpack.dispatch.placement import Placement, nodes_alive
from maskpack.errors import WorkerError

RANKS = 4
B = 192  # rows in all; what a node gets from another is an object above the 100 KB that Ray sends within a call
NODE = {"object_store_memory": 200 * 2**20}
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}  # to see that a node is gone
ROWS = [list(range(rank * B // RANKS, (rank + 1) * B // RANKS)) for rank in range(RANKS)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import the tests


class Worker:
    def __init__(self, name: str = "") -> None:
        self.name = name

    @endpoint
    def echo(self, batch):
        return batch

    @endpoint
    def who(self, batch):
        return self.name, batch["row"].tolist()

    @endpoint
    def scribble(self, batch, whole, table):
        """What was in the batch; then everything that can be seen is overwritten."""
        before = batch.clone()
        for value in (*batch.values(), *whole.values()):
            value.fill_(1)
        with pytest.raises(ValueError, match="read-only"):
            table[:] = 1
        return before

    @endpoint
    def sleep_in_the_last_rank(self, batch, began):
        if self.name == "gone":
            Path(began).touch()
            time.sleep(3600)
        return batch

    def wait(self):
        time.sleep(3600)

    def read_only(self, packed):
        """Whether the arrays of a packed batch, as they lie in the object store, refuse to be written."""
        return [not array.flags.writeable for array in packed.table.arrays()]


Remote = ray.remote(num_cpus=0)(Worker)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr("sys.stdout", sys.stderr)
        head = {"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK, **NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, **NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(cluster):
    """That of the driver, and the other one."""
    here = ray.get_runtime_context().get_node_id()
    return [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]


def on(node, name="", **options):
    return Remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options).remote(name)


@pytest.fixture(scope="module")
def actors(nodes):
    return [on(nodes[rank * 2 // RANKS], f"actor {rank}") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def group(actors):
    return WorkerGroup(actors, pad_token_id=PAD)


@pytest.fixture(scope="module")
def whole_batch():
    batch = workload(rows=B, prompt=512, response=6144)
    batch["row"] = torch.arange(B)
    return batch


@pytest.fixture
def batch(whole_batch):
    """It is after every test what it was before."""
    before = freeze(whole_batch)
    yield whole_batch
    assert freeze(whole_batch) == before


@pytest.fixture
def needed(monkeypatch):
    """What the nodes of a site were told to fetch: pairs of site and source."""
    settled, seen = Placement.settled, []

    def told(self, view, site, again=False):
        placed, nbytes = settled(self, view, site, again)
        seen.extend((site, source) for group in placed.groups for source in group.parts)
        return placed, nbytes

    monkeypatch.setattr(Placement, "settled", told)
    return seen


def lies(reference):
    """The nodes that have an object, and its bytes."""

    def found():
        return ray.experimental.get_object_locations([reference])[reference]

    until(lambda: found()["node_ids"])  # Ray hears of it a little later
    return found()["node_ids"], found()["object_size"]


def sources(view):
    return [source for group in view.groups for source in group.parts]


# -------------------------------------------------------------------- rows that stay on the ranks


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_go_from_rank_to_rank(group, nodes, batch, puts, needed, seed):
    """Kept, permuted, divided otherwise and dispatched again: every node receives its rows, and no other."""
    rng = np.random.default_rng(seed)
    kept = group.call("echo", batch, format="view")
    homes = [lies(source.held)[0] for source in sources(kept)]
    assert homes == [[nodes[0]], [nodes[0]], [nodes[1]], [nodes[1]]]
    per_row = sum(lies(source.held)[1] for source in sources(kept)) / B
    perm = rng.permutation(B)
    balance = [np.sort(part) for part in np.split(rng.permutation(B), [30, 96, 146])]
    puts.clear(), needed.clear()
    out = group.call("echo", kept.take(perm), balance=balance)
    assert_same(out, batch[perm])
    assert puts == []

    home = np.repeat([0, 0, 1, 1], B // RANKS)  # the node of each row
    for node, ranks in ((0, (0, 1)), (1, (2, 3))):
        wanted = home[perm[np.concatenate([balance[rank] for rank in ranks])]]
        given = [source for site, source in needed if site == {nodes[node]}]
        stayed = [source for source in given if any(source.held == known.held for known in sources(kept))]
        came = [source for source in given if source not in stayed]
        assert len(stayed) == 2
        assert sum(source.meta.num_rows for source in came) == (wanted != node).sum()
        for source in came:
            places, nbytes = lies(source.held)
            assert set(places) == set(nodes)  # cut on one, sent to the other
            assert 100_000 < nbytes < 1.3 * per_row * source.meta.num_rows
    for source, there in zip(sources(kept), homes, strict=True):
        assert lies(source.held)[0] == there  # no object was moved whole


def test_rows_that_stay_where_they_are_move_nothing(group, batch, puts, needed):
    kept = group.call("echo", batch, format="view")
    before = [lies(source.held)[0] for source in sources(kept)]
    puts.clear(), needed.clear()
    shuffled = np.concatenate([np.random.default_rng(0).permutation(B // 2), B // 2 + np.arange(B // 2)])
    out = group.call("echo", kept.take(shuffled))
    assert_same(out, batch[shuffled])
    assert puts == []
    assert {source.held for _, source in needed} == {source.held for source in sources(kept)}
    assert [lies(source.held)[0] for source in sources(kept)] == before
    assert group.metrics["maskpack/dispatch/bytes_sent"] == 0


def test_a_node_that_needs_all_rows_gets_the_object(group, nodes, batch, needed):
    """Cutting would copy what is sent whole."""
    kept = group.call("echo", batch, format="view")
    needed.clear()
    swapped = [ROWS[2], ROWS[3], ROWS[0], ROWS[1]]
    assert_same(group.call("echo", kept, balance=swapped), batch)
    assert {source.held for _, source in needed} == {source.held for source in sources(kept)}
    assert all(set(lies(source.held)[0]) == set(nodes) for source in sources(kept))


def test_the_driver_holds_none_of_the_rows(group, batch):
    """Rows kept, permuted and dispatched again, ten times: its memory grows by less than 1 % of the padded batch."""
    padded = sum(field.nbytes for field in batch.values())
    kept = group.call("echo", batch, format="view")
    rng = np.random.default_rng(0)

    def step(view):
        return group.call("echo", view.take(rng.permutation(B)), format="view")

    for _ in range(10):
        kept = step(kept)
    gc.collect()
    before = resident()
    for _ in range(10):
        kept = step(kept)
    gc.collect()

    assert resident() - before < padded // 100
    assert sorted(row for _, rows in group.call("who", kept) for row in rows) == list(range(B))


def resident():
    """Bytes of this process in memory, those of the object store that it has read among them."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


# -------------------------------------------------------------------- what the driver puts


def test_a_site_is_one_put(group, nodes, batch, puts, needed):
    assert_same(group.call("echo", batch), batch)
    assert [len(packed) for packed in puts] == [B // 2, B // 2]
    assert [site for site, _ in needed] == [{nodes[0]}, {nodes[1]}]
    here, there = (lies(source.held) for _, source in needed)
    assert here[0] == [nodes[0]]  # the rows of one node never reach the other
    assert set(there[0]) == set(nodes)
    assert min(here[1], there[1]) > 100_000
    assert group.metrics["maskpack/dispatch/bytes_sent"] == pytest.approx(
        sum(packed.nbytes for packed in puts), rel=1e-3
    )


def test_what_was_put_is_not_put_again(group, batch, puts):
    packed = group.pack(batch)
    for _ in range(2):
        assert_same(group.call("echo", packed), batch)
    assert len(puts) == 2
    placed = group.put(batch)
    assert len(puts) == 4
    for _ in range(2):
        assert_same(group.call("echo", placed), batch)
    perm = np.random.default_rng(0).permutation(B)
    assert_same(group.call("echo", placed.take(perm)), batch[perm])
    assert len(puts) == 4


def test_only_new_fields_are_put_onto_a_view(group, batch, puts, monkeypatch):
    monkeypatch.setattr(placement, "INLINED", 0)  # nothing is so small that it travels in messages
    group.call("who", batch)  # it learns where the ranks are
    placed = group.put(batch)
    puts.clear()
    more = group.put(TensorDict({"advantages": batch["advantages"] * 3}, batch_size=[B]), onto=placed)
    assert [[form.path for form in part.schema.forms] for part in puts] == [[("advantages",)]] * 2
    puts.clear()
    expected = batch.clone()
    expected["advantages"] *= 3
    assert_same(group.call("echo", more), expected)
    assert_same(group.call("echo", placed), batch)
    assert puts == []


# -------------------------------------------------------------------- ranks of several actors


@pytest.mark.parametrize(
    ("dp_ranks", "collect", "speakers"),
    [
        ([0, 0, 1, 1], [False, True, False, True], [1, 3]),
        ([0, 1, 0, 1], None, [0, 1]),
        ([1, 0, 0, 1], [False, False, True, True], [2, 3]),
    ],
    ids=["same node, second speaks", "two nodes", "crossed"],
)
def test_ranks_of_two_actors(actors, batch, dp_ranks, collect, speakers):
    group = WorkerGroup(actors, dp_ranks=dp_ranks, collect=collect, pad_token_id=PAD)
    assert_same(group.call("echo", batch), batch)
    perm = np.random.default_rng(1).permutation(B)
    kept = group.call("echo", batch, format="view").take(perm)
    assert_same(group.call("echo", kept), batch[perm])
    assert group.call("who", kept) == [
        (f"actor {speaker}", rows.tolist()) for speaker, rows in zip(speakers, np.split(perm, 2), strict=True)
    ]


# -------------------------------------------------------------------- what a rank may write


def test_the_store_keeps_what_ranks_overwrite(group, actors, batch):
    placed = group.put(batch)
    kept = group.call("echo", batch, format="view")
    few, table = group.put(batch[:5]), np.arange(2**18, dtype=np.float32)
    for view in (placed, kept):
        for _ in range(2):
            assert_same(group.call("scribble", view, Broadcast(few), table), batch)
        assert_same(view.materialize(get=ray.get), batch)
    assert_same(few.materialize(get=ray.get), batch[:5])
    for source in (*sources(placed), *sources(kept)):
        flags = ray.get([actor.read_only.remote(source.held) for actor in actors])
        assert flags[0]
        assert all(all(flag) for flag in flags)


# -------------------------------------------------------------------- a node that is gone


@pytest.mark.parametrize("graceful", [True, False], ids=["drained", "killed"])
def test_a_node_is_removed_while_rows_lie_on_it(cluster, actors, batch, tmp_path, graceful):
    node = cluster.add_node(num_cpus=1, **NODE)
    group = WorkerGroup([*actors[:3], on(node.node_id, "gone")], pad_token_id=PAD)
    kept = group.call("echo", batch, format="view")
    running = group.submit("sleep_in_the_last_rank", batch, str(tmp_path / "began"))
    until((tmp_path / "began").exists)
    cluster.remove_node(node, allow_graceful=graceful)
    for attempt in (running.result, lambda: group.call("echo", batch)):
        with pytest.raises(WorkerError, match=r" on 1 of 4 ranks: rank 3 \(rows 144 to 191\)") as caught:
            attempt()
        assert isinstance(caught.value.failures[0].error, ray.exceptions.RayActorError)
        assert_same(caught.value.call.retry().result(), batch)
    rest = WorkerGroup(actors[:3], pad_token_id=PAD)
    with pytest.raises(WorkerError, match=r'"echo" failed on 1 of 3 ranks: rank 2 \(rows 128 to 191\)') as caught:
        rest.call("echo", kept)
    assert isinstance(caught.value.failures[0].error, ray.exceptions.ObjectLostError)
    with pytest.raises(ray.exceptions.ObjectLostError):
        kept.materialize(get=ray.get)
    assert_same(rest.call("echo", kept[:128]), batch[:128])
    there = rest.put(batch[144:])
    assert_same(rest.call("echo", mp.views.BatchView.cat([kept[:144], there])), batch)


@pytest.mark.parametrize("own_group", [True, False], ids=["own ranks", "another group"])
def test_one_retry_after_a_node_died_whose_first_rank_had_answered(
    cluster, actors, batch, tmp_path, monkeypatch, own_group
):
    """The rows that were kept there are sent again, and the ranks there get none."""
    node = cluster.add_node(num_cpus=1, **NODE)
    group = WorkerGroup([actors[0], on(node.node_id, "first"), on(node.node_id, "gone")], pad_token_id=PAD)
    group.call("echo", batch)
    call = group.submit("sleep_in_the_last_rank", batch, str(tmp_path / "began"), format="view")
    until(lambda: (tmp_path / "began").exists() and bool(ray.wait(call.parts[1].replies, timeout=0)[0]))
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(WorkerError, match=r"rank 2 \(rows 128 to 191\)") as caught:
        call.result()
    fetched = dispatch_call.fetched

    def fetched_and_seen(references, timeout):
        """Returns when Ray has put its error for lost rows on this node, and names it as one that holds them."""
        found, until = fetched(references, timeout), time.monotonic() + 60
        while references == [call.parts[1].packed] and not placement.nodes_of(references[0]):
            assert time.monotonic() < until, "Ray puts no error"
            time.sleep(0.01)
        return found

    monkeypatch.setattr(dispatch_call, "fetched", fetched_and_seen)
    again = (
        caught.value.call.retry() if own_group else caught.value.call.retry(WorkerGroup(actors[1:2], pad_token_id=PAD))
    )
    view = again.result()
    assert {part.held for part in sources(view)}.isdisjoint({call.parts[1].packed})
    assert any(part.held == call.parts[0].packed for part in sources(view)), "those here are kept"
    assert_same(view.materialize(get=ray.get), batch)


def test_rows_that_went_with_their_node_are_not_handed_out(cluster, actors, batch):
    node = cluster.add_node(num_cpus=1, **NODE)
    group = WorkerGroup([actors[0], on(node.node_id)], pad_token_id=PAD)
    call = group.submit("echo", batch, format="view")
    until(call.done)
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: node.node_id not in nodes_alive())
    with pytest.raises(WorkerError, match=r"failed on 1 of 2 ranks: rank 1 \(rows 96 to 191\)") as caught:
        call.result()
    assert_same(caught.value.call.retry().result().materialize(get=ray.get), batch)


# -------------------------------------------------------------------- where ranks are


def test_submit_waits_for_no_actor(nodes, actors, batch):
    """One is dead, one is at work in something long: both before the first call of the group."""
    busy, dead = on(nodes[1], "busy"), on(nodes[1], "dead")
    kill(dead)
    held = busy.wait.remote()
    group = WorkerGroup([actors[0], busy, dead, actors[3]], pad_token_id=PAD)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "wait"):
            patch.setattr(ray, name, lambda *args, **more: asked.append(args))
        calls = [group.submit("echo", batch) for _ in range(2)]
    assert asked == []
    until(lambda: [part.rank for part in calls[0].parts if part.unanswered()] == [1])
    with pytest.raises(WorkerError, match=r"on 2 of 4 ranks: rank 1 .* rank 2 ") as caught:
        calls[0].result(5)  # that of rank 3 is there, but must be fetched
    assert_same(caught.value.call.retry().result(), batch)
    assert not ray.wait([held], timeout=0)[0]
    ray.kill(busy)


def test_sites_are_learnt_from_the_first_answers(nodes, actors, batch, puts, needed):
    group = WorkerGroup(actors, pad_token_id=PAD)
    assert_same(group.call("echo", batch), batch)
    assert [len(packed) for packed in puts] == [B // RANKS] * RANKS, "each rank for itself"
    puts.clear(), needed.clear()
    assert_same(group.call("echo", batch), batch)
    assert [len(packed) for packed in puts] == [B // 2] * 2
    assert [site for site, _ in needed] == [{nodes[0]}, {nodes[1]}]


# -------------------------------------------------------------------- shuffled rows of many objects


def test_shuffled_rows_come_out_of_one_object_on_each_node(
    cluster, nodes, actors, group, batch, puts, needed, tmp_path
):
    """Six ranks on three nodes, whose rows lie in twelve objects. Then the third node dies in a call."""
    third = cluster.add_node(num_cpus=1, **NODE)
    six = WorkerGroup([*actors, on(third.node_id), on(third.node_id, "gone")], pad_token_id=PAD)
    batch = batch[:48]
    # so that Ray inlines no object
    batch["noise"] = torch.rand(48, 20_000, generator=torch.Generator().manual_seed(0))
    six.call("echo", batch)
    kept = mp.views.BatchView.cat([six.call("echo", part, format="view") for part in (batch[:25], batch[25:])])
    homes = [lies(source.held)[0] for source in sources(kept)]
    assert homes == [[node] for node in (*nodes, third.node_id) for _ in range(2)] * 2
    perm = np.random.default_rng(0).permutation(48)
    puts.clear(), needed.clear()
    assert_same(six.call("echo", kept.take(perm)), batch[perm])
    assert [lies(source.held)[0] == [*site] for site, source in needed] == [True] * 3
    assert [source.meta.num_rows for _, source in needed] == [16] * 3
    placed = six.put(kept.take(perm))
    assert_same(placed.materialize(get=ray.get), batch[perm])
    needed.clear()
    assert_same(six.call("echo", placed), batch[perm])
    assert [source.held for _, source in needed] == [source.held for source in sources(placed)]
    assert puts == []

    here = mp.views.BatchView.cat([group.call("echo", batch[n : n + 16], format="view") for n in (0, 16, 32)])
    running = six.submit("sleep_in_the_last_rank", here.take(perm), str(tmp_path / "began"))
    until((tmp_path / "began").exists)
    cluster.remove_node(third, allow_graceful=False)
    with pytest.raises(WorkerError, match=r"rank 5 \(rows 40 to 47\)") as caught:
        running.result()
    assert_same(caught.value.call.retry().result(), batch[perm])
