"""Replay buffers of TorchRL: what is sampled from packed rows has the bits that padded storages give."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

pytest.importorskip("torchrl")

from samples import PAD, ROWS, assert_same, per_row, rollout
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import History
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement
from torchrl.modules.llm.policies.common import Tokens

import maskpack as mp
from maskpack import unnest_batch_by_mask as unnest
from maskpack.adapters.torchrl import PackedStorage

OPTIONS = {"pad_token_id": PAD}


def batch(seed: int, rows: int = 7, *, prompt: int = 5, response: int = 6) -> TensorDict:
    """A padded batch whose rows have lengths and values of their own."""
    torch.manual_seed(seed)
    shapes = [(int(torch.randint(prompt + 1, ())), int(torch.randint(response + 1, ()))) for _ in range(rows)]
    made = rollout(shapes, prompt, response, objects=False)
    made["old_log_probs"] += seed * (made["old_log_probs"] != 0)
    made["reward_baselines"] = torch.arange(rows) + 100.0 * seed
    return made.to("cpu")  # a device of its own, which padded storages give to every sample


def storage(size: int = 16, **options) -> PackedStorage:
    return PackedStorage(size, **OPTIONS, **options)


def both(size: int, make=ReplayBuffer, **options) -> tuple[ReplayBuffer, ReplayBuffer]:
    """The same buffer over padded tensors and over packed rows."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    twin = copy.deepcopy(options)
    return make(storage=LazyTensorStorage(size), **options), make(storage=storage(size), **twin)


def same_samples(padded: ReplayBuffer, packed: ReplayBuffer, times: int = 6) -> None:
    for seed in range(times):
        torch.manual_seed(seed)
        expected, there = padded.sample(return_info=True)
        torch.manual_seed(seed)
        seen, here = packed.sample(return_info=True)
        assert_same(torch.as_tensor(here["index"]), torch.as_tensor(there["index"]))
        assert_same(seen.to_tensordict(), expected.to_tensordict())


SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
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
def test_the_classes_of_torchrl_follow_their_rows():
    buffers = [ReplayBuffer(storage=made) for made in (LazyStackStorage(9), PackedStorage(9))]
    for buffer in buffers:
        buffer.extend(chats(4))
        buffer.extend(chats(3))
    index = torch.tensor([6, 3, 1, 1])
    expected, seen = (buffer[index] for buffer in buffers)
    assert type(seen["history"]) is type(expected["history"]) is History
    assert type(seen["tokens"]) is type(expected["tokens"]) is Tokens
    assert [list(row.content) for row in seen["history"]] == [["q2", "aa"], ["q3", "aaa"], ["q1", "a"], ["q1", "a"]]
    assert_same(seen["history"].role, expected["history"].role)
    assert_same(seen["history"].content, expected["history"].content)
    assert_same(seen["reward"], expected["reward"])
    for name in ("prompt", "response", "full"):
        rows = [[getattr(row, name) for row in sample["tokens"].unbind(0)] for sample in (seen, expected)]
        assert [row.tolist() for row in rows[0]] == [row.tolist() for row in rows[1]]


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
    padded, packed = both(16, TensorDictReplayBuffer, sampler=RandomSampler, batch_size=5)
    for buffer in (padded, packed):
        buffer.extend(batch(1, 12))
    packed.dumps(tmp_path / "buffer")
    again = TensorDictReplayBuffer(storage=storage(16), batch_size=5)
    again.loads(tmp_path / "buffer")
    for buffer in (padded, again):
        buffer.extend(batch(2, 7))
    same_samples(padded, again)
    again.dumps(tmp_path / "buffer")  # over the file that rows are read from
    third = TensorDictReplayBuffer(storage=storage(16), batch_size=5)
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
PackedStorage(4, format="jagged")
PackedStorage(4, fields=[3])
PackedStorage(4, device="nowhere")
PackedStorage(4, allow_pickle="no")
PackedStorage(4, registry="x")
PackedStorage(4, verify="x")
PackedStorage(4).get(0)
filled().get(9)
filled().get("x")
filled().get((0, 1))
filled().get(torch.zeros(2, device="meta"))
filled(fields=["nope"]).get(0)
filled().set([0.5], rows[:1])
filled().set([0, 1], torch.zeros(2))
filled().contains("x")
filled().load_state_dict(None)
filled().load_state_dict({"packed": torch.zeros(3)})
filled().restore(rows)
filled().restore(mp.PackedBatch.cat([packed] * 3))
"""


@pytest.mark.parametrize("line", MISUSES.split("\n")[1:-1])
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
