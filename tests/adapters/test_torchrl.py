"""Replay buffers of TorchRL: what is sampled from packed rows has the bits that padded storages give."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from needs import needs
from tensordict import TensorDict, lazy_stack
from torch import Tensor

needs("torchrl")

from samples import PAD, ROWS, assert_same, calls_of, per_row, rollout
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import History
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl.modules.llm.policies.common import Tokens

import maskpack as mp
from maskpack import unnest_batch_by_mask as unnest
from maskpack.adapters.torchrl import PackedStorage
from maskpack.store import RolloutLog

OPTIONS = {"pad_token_id": PAD}


def batch(seed: int, rows: int = 7, *, prompt: int = 5, response: int = 6) -> TensorDict:
    """A padded batch whose rows have lengths and values of their own."""
    torch.manual_seed(seed)
    shapes = [(int(torch.randint(prompt + 1, ())), int(torch.randint(response + 1, ()))) for _ in range(rows)]
    made = rollout(shapes, prompt, response, objects=False)
    made["old_log_probs"] += seed * (made["old_log_probs"] != 0)
    made["reward_baselines"] = torch.arange(rows) + 100.0 * seed
    return made.to("cpu")  # a device of its own, which padded storages give to every sample


class Tree:
    """A segment tree by hand, for a torch that the compiled trees of TorchRL do not load with."""

    def __init__(self, size: int, fold, empty: float) -> None:
        self.fold, self.held = fold, np.full(size, empty, np.float32)

    def __getitem__(self, index):
        return torch.from_numpy(self.held)[index]

    def __setitem__(self, index, value) -> None:
        self.held[np.asarray(index)] = np.asarray(value)

    def query(self, begin: int, end: int) -> float:
        return float(self.fold(self.held[begin:end]))

    def scan_lower_bound(self, masses):
        sums = np.cumsum(self.held.astype(np.float64))
        return np.array([next((i for i, total in enumerate(sums) if total > mass), len(sums)) for mass in masses])


@pytest.fixture(autouse=True)
def trees(monkeypatch):
    """The compiled ones where they load: the samplers themselves are those of TorchRL either way."""
    for name, fold, empty in (("Sum", np.sum, 0.0), ("Min", np.min, np.inf)):
        for kind in ("Fp32", "Fp64"):
            if getattr(prioritized, f"{name}SegmentTree{kind}") is None:
                monkeypatch.setattr(prioritized, f"{name}SegmentTree{kind}", partial(Tree, fold=fold, empty=empty))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (prioritized samplers draw from here)


def storage(size: int = 16, **options) -> PackedStorage:
    return PackedStorage(size, **OPTIONS, **options)


def both(size: int, make=ReplayBuffer, **options) -> tuple[ReplayBuffer, ReplayBuffer]:
    """The same buffer over padded tensors and over packed rows."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    twin = copy.deepcopy(options)
    return make(storage=LazyTensorStorage(size), **options), make(storage=storage(size), **twin)


def same_samples(padded: ReplayBuffer, packed: ReplayBuffer, times: int = 6) -> None:
    for seed in range(times):
        seed_all(seed)
        expected, there = padded.sample(return_info=True)
        seed_all(seed)
        seen, here = packed.sample(return_info=True)
        assert_same(torch.as_tensor(here["index"]), torch.as_tensor(there["index"]))
        assert_same(seen.to_tensordict(), expected.to_tensordict())


SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(16, 0.7, 0.9),
}


@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_are_those_of_padded_tensors(make, sampler):
    padded, packed = both(16, make, sampler=SAMPLERS[sampler], batch_size=5)
    for seed, rows in enumerate([7, 3, 5, 9]):  # the fourth goes around the ring
        for buffer in (padded, packed):
            buffer.extend(batch(seed, rows))
        assert len(padded) == len(packed)
        same_samples(padded, packed)


@pytest.mark.parametrize(
    "index",
    [slice(2, 9, 3), [5, 0, 5], torch.tensor([9, 1, 1, 4]), range(3, 6), torch.tensor([True] * 3 + [False] * 7), 4, -1],
    ids=str,
)
def test_any_index_gives_the_rows_of_padded_tensors(index):
    padded, packed = both(10)
    for buffer in (padded, packed):
        buffer.extend(batch(3, 6))
        buffer.extend(batch(4, 4))
    expected = padded[torch.tensor(list(index))] if isinstance(index, range) else padded[index]
    assert_same(packed[index], expected)
    if isinstance(index, Tensor):
        assert_same(packed.storage.get((index,)), expected)


def chats(rows: int) -> TensorDict:
    """Conversations and tokens in the classes that TorchRL has for them; rows have tokens of their own lengths."""
    spoken = [
        History(role=["user", "assistant"], content=[f"q{row}", "a" * row], batch_size=[2]) for row in range(rows)
    ]
    tokens = [
        Tokens(prompt=torch.arange(row + 1), response=torch.arange(row), full=torch.arange(2 * row + 1))
        for row in range(rows)
    ]
    fields = {"history": torch.stack(spoken), "tokens": lazy_stack(tokens), "reward": torch.arange(float(rows))}
    return TensorDict(fields, batch_size=[rows])


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("logged", [False, True])
def test_the_classes_of_torchrl_follow_their_rows(tmp_path, logged):
    log = RolloutLog(tmp_path / "log", allow_pickle=True) if logged else None
    buffers = [ReplayBuffer(storage=made) for made in (LazyStackStorage(9), PackedStorage(9, log=log))]
    for buffer in buffers:
        buffer.extend(chats(4))
        buffer.extend(chats(3))
    for rows in ([6, 3, 1, 1], [2, 0], [5]):
        expected, seen = (buffer[torch.tensor(rows)] for buffer in buffers)
        assert type(seen["history"]) is type(expected["history"]) is History
        assert type(seen["tokens"]) is type(expected["tokens"]) is Tokens
        assert_same(seen["history"].role, expected["history"].role)
        assert_same(seen["history"].content, expected["history"].content)
        assert_same(seen["reward"], expected["reward"])
        for name in ("prompt", "response", "full"):
            own, other = ([getattr(row, name) for row in sample["tokens"].unbind(0)] for sample in (seen, expected))
            assert [row.tolist() for row in own] == [row.tolist() for row in other]


def test_slots_are_written_and_read_by_hand():
    packed = storage(8)
    packed.set(range(5), batch(1, 5))
    new = batch(2, 3)
    packed[[4, 1, 4]] = new  # the later row stays
    expected = torch.stack([batch(1, 5)[0], new[1], batch(1, 5)[2], batch(1, 5)[3], new[2]])
    assert_same(packed.get(slice(None)), expected)
    revision = packed._mutation_revision  # by which samplers know that what they remember is old
    packed.set(5, new[0])
    assert packed._mutation_revision > revision
    assert_same(packed[5], new[0])
    packed.set(slice(0, 2), [new[2], new[0]])
    assert_same(packed[[1, 0]], torch.stack([new[0], new[2]]))
    assert [index in packed for index in (0, 5, 6, -6, -7)] == [True, True, False, True, False]
    assert packed.contains(torch.tensor([0, 6])).tolist() == [True, False]
    assert [row["reward_baselines"].item() for row in packed][3:] == [103.0, 202.0, 200.0]


def test_any_order_of_writes_gives_what_a_list_of_rows_gives():
    rng = random.Random(0)
    for _ in range(8):
        size = rng.randint(1, 40)
        kept, rows = storage(size), []
        for step in range(12):
            new = batch(step, rng.randint(1, size))
            first = rng.randint(0, len(rows))
            slots = [(first + number) % size for number in range(len(new))]
            kept.set(torch.tensor(slots), new)
            for slot, row in zip(slots, new, strict=True):
                rows[slot : slot + 1] = [row]
            index = [rng.randrange(len(rows)) for _ in range(5)]
            assert len(kept) == len(rows)
            assert_same(kept.get(index), torch.stack([rows[slot] for slot in index]))


# -------------------------------------------------------------------- forms


def test_samples_come_nested_and_restore_to_the_padded_rows():
    packed = storage(format="nested")
    packed.set(range(7), batch(1))
    picked = packed.get([6, 0, 3])
    assert picked["responses"].is_nested
    assert picked["responses"].offsets() is picked["old_log_probs"].offsets()
    assert_same(unnest(picked), batch(1)[[6, 0, 3]])


def test_nested_and_packed_batches_go_in():
    packed = storage()
    packed.set(range(7), mp.nest_batch_by_mask(batch(1), **OPTIONS))
    buffer = ReplayBuffer(storage=packed, batch_size=2)
    buffer.writer._cursor = 7
    buffer.extend(mp.compress(batch(2), **OPTIONS))
    assert_same(buffer[:], torch.cat([batch(1), batch(2)]))


def test_only_the_fields_named_are_decoded():
    packed = storage(fields=["responses", "advantages"])
    packed.set(range(7), batch(1))
    assert_same(packed.get([2, 2]), batch(1)[[2, 2]].select("responses", "advantages"))


def test_rows_of_several_widths_meet_at_the_widest_for_good():
    packed = storage(5)
    packed.set(range(2), batch(1, 2, prompt=3, response=4))
    packed.set(range(2, 4), batch(2, 2, prompt=5, response=9))
    seen = packed.get([0])
    assert seen["responses"].shape == (1, 9)
    assert_same(seen["responses"][:, :4], batch(1, 2, prompt=3, response=4)[:1]["responses"])
    assert_same(seen["prompts"][:, 2:], batch(1, 2, prompt=3, response=4)[:1]["prompts"])
    assert bool((seen["responses"][:, 4:] == PAD).all())
    assert bool((seen["prompts"][:, :2] == PAD).all())
    assert_same(packed.get([3, 2]), batch(2, 2, prompt=5, response=9)[[1, 0]])
    packed.set(range(2, 4), batch(1, 2, prompt=3, response=4))
    assert packed.get([0])["responses"].shape == (1, 9)


def test_python_objects_follow_their_rows():
    whole = rollout()
    buffer = ReplayBuffer(storage=storage(), batch_size=3)
    buffer.extend(whole)
    sample, info = buffer.sample(return_info=True)
    index = torch.as_tensor(info["index"]).tolist()
    assert sample["uid"] == [f"row-{number // 2}" for number in index]
    assert [extra["index"] for extra in sample["extra_info"]] == index
    assert sample["temperature"] == 0.7
    assert sample["global_token_num"] == [sum(row) for row in ROWS]
    one = whole.exclude("temperature", "global_token_num")
    buffer = ReplayBuffer(storage=storage(), batch_size=3)
    buffer.add(one[3])
    buffer.add(one[5])
    assert_same(buffer[:], one[[3, 5]])


# -------------------------------------------------------------------- memory


def test_rows_are_kept_small_and_what_is_overwritten_goes():
    wide = {"prompt": 40, "response": 400}
    rows = rollout([(4, 30)] * 64, **wide, objects=False)
    packed, padded = storage(64), LazyTensorStorage(64)
    for kept in (packed, padded):
        kept.set(range(64), rows)
    one = packed.nbytes
    assert one * 8 < padded._storage.bytes()
    for start in range(0, 640, 24):
        packed.set([(start + step) % 64 for step in range(24)], rows[:24])
        assert packed.nbytes < 2.6 * one
    held = {id(source.held) for group in packed.rows.groups for source in group.parts}
    assert len(held) < 8


def test_overwritten_rows_are_released():
    packed = storage(400)
    first = mp.compress(batch(1, 300), **OPTIONS)
    body = first.table.body
    while body.base is not None:
        body = body.base
    gone = weakref.ref(body)
    packed.set(range(300), first)
    del first, body
    packed.set(range(200), batch(2, 200))
    gc.collect()
    assert gone() is None
    assert_same(packed.get(range(200, 300)), batch(1, 300)[200:])


def test_many_small_segments_are_joined():
    packed = storage(1000)
    rows = batch(1, 300)
    for number in range(300):
        packed.set(number, rows[number])
    (group,) = packed.rows.groups
    assert len(group.parts) < 80
    assert_same(packed.get(slice(None)), rows)


# -------------------------------------------------------------------- states


def filled(**options) -> PackedStorage:
    kept = storage(12, **options)
    kept.set(range(7), batch(1))
    kept.set([5, 6, 7, 8], batch(2, 4))
    return kept


def test_the_state_comes_back(tmp_path):
    kept = filled()
    expected = kept.get(slice(None))
    torch.save(kept.state_dict(), tmp_path / "state.pt")
    again = storage(12)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same(again.get(slice(None)), expected)
    assert_same(pickle.loads(pickle.dumps(kept)).get(slice(None)), expected)
    again.load_state_dict(storage(12).state_dict())
    assert len(again) == 0


def test_buffers_are_saved_and_go_on(tmp_path):
    padded, packed = both(16, TensorDictReplayBuffer, sampler=lambda: PrioritizedSampler(16, 0.7, 0.9), batch_size=5)
    for buffer in (padded, packed):
        buffer.extend(batch(1, 12))
    packed.dumps(tmp_path / "buffer")
    again = TensorDictReplayBuffer(storage=storage(16), sampler=PrioritizedSampler(16, 0.7, 0.9), batch_size=5)
    again.loads(tmp_path / "buffer")
    for buffer in (padded, again):
        buffer.extend(batch(2, 7))
    same_samples(padded, again)
    again.dumps(tmp_path / "buffer")  # over the file that rows are read from
    third = TensorDictReplayBuffer(storage=storage(16), sampler=PrioritizedSampler(16, 0.7, 0.9), batch_size=5)
    third.load_state_dict(again.state_dict())
    same_samples(padded, third)


def test_empty_storages_are_saved_and_loaded(tmp_path):
    kept = filled()
    kept.dumps(tmp_path / "s")
    storage(12).dumps(tmp_path / "s")
    kept.loads(tmp_path / "s")
    assert len(kept) == 0
    with pytest.raises(mp.errors.LayoutError, match="is not a folder"):
        kept.loads(tmp_path / "nowhere")


def test_a_buffer_is_emptied():
    buffer = ReplayBuffer(storage=storage(), batch_size=2)
    buffer.extend(batch(1))
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(batch(2))
    assert_same(buffer[:], batch(2))


def test_python_objects_that_json_cannot_say_need_leave():
    rows = rollout(objects=False).set("made", per_row([complex(number, 1) for number in range(7)]))
    kept = storage()
    kept.set(range(7), rows)
    assert_same(kept.get(slice(None)), rows)
    with pytest.raises(mp.MaskpackError, match="allow_pickle"):
        kept.state_dict()
    kept, again = storage(allow_pickle=True), storage(allow_pickle=True)
    kept.set(range(7), rows)
    again.load_state_dict(kept.state_dict())
    assert_same(again.get(slice(None)), rows)


# -------------------------------------------------------------------- rows on a disk


@pytest.fixture
def opened(tmp_path):
    """`opened()` closes the log of the storage that it gave before, and gives a storage of the same log."""
    logs = []

    def storage_of_log(size: int = 16, **options) -> PackedStorage:
        for log in logs:
            log.close()
        logs.append(RolloutLog(tmp_path / "log", segment_bytes=1 << 12))
        return storage(size, log=logs[-1], **options)

    yield storage_of_log
    for log in logs:
        log.close()


def test_any_order_of_writes_to_a_log_gives_what_memory_gives(opened):
    """Rows of several widths, slots that are named twice, a new process in between, and compaction."""
    rng = random.Random(3)
    kept = storage(24)
    logged = opened(24)
    for step in range(30):
        rows = rng.randint(1, 24)
        new = batch(step, rows, prompt=rng.randint(2, 5), response=6)
        first = rng.randint(0, len(kept))
        slots = [(first + number) % 24 for number in range(rows)]
        slots += rng.sample(slots, 1)
        new = torch.cat([new, new[-1:]])
        for one in (kept, logged):
            one.set(torch.tensor(slots), new)
        assert len(kept) == len(logged) == len(logged._logged.log)
        index = [rng.randrange(-len(kept), len(kept)) for _ in range(5)]
        assert_same(logged.get(index), kept.get(index))
        if step % 7 == 3:
            logged._logged.log.compact()
            assert_same(logged.get(slice(None)), kept.get(slice(None)))
        if step % 10 == 9:
            logged, widths = opened(24), kept.get([0])["input_ids"].shape
            assert logged.get([0])["input_ids"].shape <= widths
            kept.restore(logged.rows.to_packed())  # of widths that no row has any more, a new process knows nothing
            assert_same(logged.get(slice(None)), kept.get(slice(None)))
    assert_same(pickle.loads(pickle.dumps(logged)).get(slice(None)), kept.get(slice(None)))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_buffer_goes_on_in_another_process(opened, sampler):
    padded, packed = both(16, sampler=SAMPLERS[sampler], batch_size=5)
    packed = ReplayBuffer(storage=opened(), sampler=SAMPLERS[sampler](), batch_size=5)
    for seed, rows in enumerate([7, 3, 5, 9]):
        for buffer in (padded, packed):
            buffer.extend(batch(seed, rows))
        same_samples(padded, packed, 2)
        packed = ReplayBuffer(storage=opened(), sampler=SAMPLERS[sampler](), batch_size=5)
        packed.storage.resume(packed)
        padded = ReplayBuffer(storage=padded.storage, sampler=SAMPLERS[sampler](), batch_size=5, writer=padded.writer)
        padded.sampler.extend(torch.arange(len(padded)))
        same_samples(padded, packed, 2)


def test_a_slot_that_was_written_twice_has_the_newer_row(opened, monkeypatch):
    """As after a kill between the new row and the deletion of the old one."""
    logged = opened()
    logged.set(range(7), batch(1))

    def killed(rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(logged._logged.log, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        logged.set([2, 6, 7], batch(2, 3))
    again = opened()
    expected = torch.cat([batch(1), batch(2, 3)[2:]])
    expected[2], expected[6] = batch(2, 3)[0], batch(2, 3)[1]
    assert_same(again.get(slice(None)), expected)
    assert again._logged.log.rows.tolist() == [0, 1, 3, 4, 5, 7, 8, 9]  # what was overwritten is deleted now
    assert again._logged.next_slot == 8


def test_objects_of_a_batch_are_read_from_a_log(tmp_path):
    kept, logged = storage(), storage(log=RolloutLog(tmp_path / "objects"))
    for heat in (0.7, 0.7, 0.2):
        for one in (kept, logged):
            rows = rollout()[:3].exclude("temperature", "global_token_num").set_non_tensor("temperature", heat)
            one.set(range(len(one), len(one) + 3), rows)
        for index in ([0], [1, 0], range(len(kept))):
            assert_same(logged.get(index), kept.get(index))


def test_states_of_a_log(opened, tmp_path):
    kept, logged = filled(), opened(12)
    logged.set(range(7), batch(1))
    logged.set([5, 6, 7, 8], batch(2, 4))
    expected = kept.get(slice(None))
    again = storage(12)
    again.load_state_dict(logged.state_dict())
    assert_same(again.get(slice(None)), expected)
    logged.dumps(tmp_path / "s")
    logged.set(range(3), batch(3, 3))
    logged.loads(tmp_path / "s")
    assert_same(logged.get(slice(None)), expected)
    assert_same(opened(12).get(slice(None)), expected)
    logged = opened(12)
    logged._empty()
    assert len(logged) == len(logged._logged.log) == len(opened()) == 0
    with pytest.raises(mp.errors.LayoutError, match="no rows"):
        logged.get(0)


def test_logs_that_no_storage_wrote_are_refused(opened, tmp_path):
    logged = opened(12)
    logged.set(range(7), batch(1))
    with pytest.raises(mp.errors.LayoutError, match="each slot below 6"):
        opened(6)
    logged = opened(12)
    logged._logged.log.delete([1])
    with pytest.raises(mp.errors.LayoutError, match="each slot below 12"):
        opened(12)
    with RolloutLog(tmp_path / "other", **OPTIONS) as log:
        log.append(batch(1), {"step": 1})
        with pytest.raises(mp.errors.LayoutError, match='without the tag "slot"'):
            storage(log=log)


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        (range(3), batch(1, 4)),
        ([9, 11], batch(1, 2)),
        ([12], batch(1, 1)),
        ([-1], batch(1, 1)),
        (range(2), batch(1, 2).exclude("advantages")),
        (range(2), batch(1, 2).set("values", torch.zeros(2, 6))),
        (range(2), batch(1, 2).set("advantages", torch.zeros(2, 6, dtype=torch.float64))),
        (range(2), batch(1, 2).set("reward_baselines", torch.zeros(2, 3))),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_not_stored(slots, rows):
    kept = filled()
    before = kept.get(slice(None))
    with pytest.raises(mp.errors.LayoutError):
        kept.set(slots, rows)
    assert_same(kept.get(slice(None)), before)


@pytest.mark.parametrize("logged", [False, True])
def test_rows_of_other_fields_are_not_stored(logged, opened):
    """The names that are too many or missing, and what the error says to do."""
    kept = opened(9) if logged else storage(9)
    kept.set(range(7), batch(1))
    before, row = kept.get(slice(None)), batch(2, rows=1)
    more, less = row.clone().set("d", torch.zeros(1)), row.exclude("advantages")
    for wrong, seen in ((more, r'also "d"'), (less, r'no "advantages"')):
        with pytest.raises(mp.errors.LayoutError, match=rf"PackedStorage.set: the rows have {seen}; .* Write the same"):
            kept.set([3], wrong)
    assert_same(kept.get(slice(None)), before)
    kept.set([3], more.exclude("d"))


def test_the_batch_is_not_changed():
    rows = batch(1)
    storage().set(range(7), rows)
    assert_same(rows, batch(1))  # not a clone, which may lose the sign of -0.0


@pytest.mark.parametrize("times", [1, 2])
def test_a_rejected_extend_leaves_the_buffer_as_it_was(times):
    """The writer moves on before it stores; it is set back. (After three times it would be in place by chance.)"""
    buffer = ReplayBuffer(storage=storage(6))
    rows = batch(1, rows=4)
    buffer.extend(rows)
    wrong = batch(2, rows=4)
    wrong["old_log_probs"] = wrong["old_log_probs"].double()
    for _ in range(times):
        with pytest.raises(mp.errors.LayoutError):
            buffer.extend(wrong)
    assert len(buffer) == 4
    more = batch(3, rows=2)
    buffer.extend(more)
    assert len(buffer) == 6
    assert_same(buffer[torch.arange(4)]["input_ids"], rows["input_ids"])
    assert_same(buffer[torch.arange(4, 6)]["input_ids"], more["input_ids"])


MISUSES = """
PackedStorage(4, …) <- format="jagged" ; fields="responses" ; fields=3 ; device="nowhere" ; allow_pickle="no" ;
    log="folder" ; verify="x"
PackedStorage(4).rows
PackedStorage(4).get(0)
filled().get(…) <- 9 ; "x" ; None ; [0.5] ; (0, 1) ; torch.zeros(2, device="meta") ; slice("a", "b")
filled(fields=["nope"]).get(0)
filled().set(…) <- 9, rows[:1] ; "x", rows ; None, rows ; [0.5], rows[:1] ; [[0, 1], [0]], rows[:1]
filled().set([0, 1], …) <- None ; torch.zeros(2) ; rows[:1]
filled().contains("x")
filled().load_state_dict(…) <- {} ; {"packed": 3} ; {"packed": torch.zeros(3)}
filled().restore(…) <- rows ; mp.PackedBatch.cat([packed] * 3)
"""


@pytest.mark.parametrize("line", calls_of(MISUSES))
def test_misuse_is_a_named_error(line):
    rows = batch(1, rows=2)

    def filled(**options):
        made = PackedStorage(4, pad_token_id=PAD, **options)
        made.set(slice(0, 2), rows)
        return made

    given = {"rows": rows, "filled": filled, "packed": mp.compress(rows, pad_token_id=PAD)}
    with pytest.raises(mp.MaskpackError) as caught:
        eval(line, globals() | given)
    assert str(caught.value).endswith(".")
