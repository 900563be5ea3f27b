"""The benchmark of TransferQueue's storage puts what verl puts, sees every lost bit, and counts what is moved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

pytest.importorskip("transfer_queue")

import transfer_queue as tq
import zstandard

from bench import dataplane
from bench.dataplane_queue import CPUS, MASKPACK, SIMPLE, OwnedQueue, counted, stored_bytes
from bench.dataplane_rows import GROUP, batched, require_rows, trajectories
from bench.dispatch_forms import local_ray
from bench.measure import NotExact, require_same_tensor

SMALL = {"prompt_width": 37, "response_width": 229}
ROWS = trajectories(11, **SMALL)
FIELDS = [row.fields for row in ROWS]


# -------------------------------------------------------------------- trajectories


def test_trajectories_have_the_fields_and_values_of_verl():
    for number, row in enumerate(ROWS):
        fields = row.fields
        tokens, reward = len(fields["input_ids"]), fields["rm_scores"]
        assert torch.equal(fields["input_ids"], torch.cat([fields["prompts"], fields["responses"]]))
        assert torch.equal(fields["position_ids"], torch.arange(tokens))
        assert fields["loss_mask"] is fields["response_mask"]
        assert not reward[:-1].any()
        assert reward[-1] in (0, 1)
        assert (fields["rollout_log_probs"].dtype, reward.dtype) == (torch.float32, torch.float32)
        assert row.key == f"{fields['uid']}_{number % GROUP}_0"
        assert (row.tag["seq_len"], row.tag["prompt_len"]) == (tokens, len(fields["prompts"]))
        assert torch.equal(ROWS[number // GROUP * GROUP].fields["prompts"], fields["prompts"])
        start = len(fields["prompts"]) - 1
        assert torch.equal(row.logits["log_probs"][start:-1], row.later["old_log_probs"])
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert len({row.fields["uid"] for row in ROWS}) == 2
    require_rows("same seed", batched([row.fields for row in trajectories(11, **SMALL)]), FIELDS)


def test_experts_differ_in_each_layer_and_the_last_token_has_none():
    for row in trajectories(2, experts=True, **SMALL):
        experts = row.fields["routed_experts"]
        assert (experts.dtype, experts.shape) == (torch.int16, (len(row.fields["input_ids"]), 48, 8))
        assert not experts[-1].any()
        assert (experts[:-1].sort(-1).values.diff(dim=-1) > 0).all()
        assert experts.max() < 128


def test_pictures_are_those_of_a_processor_and_neither_noise_nor_constant():
    first, second = trajectories(2, image=True, **SMALL)
    pixels = first.fields["multi_modal_inputs"]["pixel_values"]
    assert pixels.shape == (1296, 3 * 2 * 14 * 14)
    assert first.fields["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 36, 36]]
    frames = pixels.view(1296, 3, 2, 196)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    assert all(100 < len(frames[:, channel].unique()) <= 256 for channel in range(3))
    levels = (frames[:, 0, 0] * 0.26862954 + 0.48145466).mul(255).round().byte()
    assert 1.05 < levels.numel() / len(zstandard.compress(levels.numpy().tobytes(), 1)) < 4
    assert (first.fields["input_ids"] == 151_655).sum() == 324
    positions = first.fields["position_ids"]
    assert positions.shape == (4, len(first.fields["input_ids"]))
    assert positions[1:, -1].unique().numel() == 1
    assert second.fields["multi_modal_inputs"]["pixel_values"].data_ptr() != pixels.data_ptr()
    require_same_tensor("of a group", second.fields["multi_modal_inputs"]["pixel_values"], pixels)


def test_a_batch_is_stacked_where_shapes_agree():
    assert batched(FIELDS[:1])["input_ids"].shape == (1, len(FIELDS[0]["input_ids"]))
    batch = batched(FIELDS)
    assert batch["input_ids"].is_nested
    assert batch["dummy_tensor"].shape == (11, 1)
    assert isinstance(batch.get("metrics"), NonTensorStack)


def test_rows_that_differ_are_named():
    def changed(**fields):
        return batched([{**row, **{name: change(row[name]) for name, change in fields.items()}} for row in FIELDS])

    def pictures(value):
        return batched([{"images": {"pixels": torch.tensor([value]), "name": "a"}}])

    require_rows("all", batched(FIELDS), FIELDS)
    with pytest.raises(NotExact, match=r'field "rm_scores", row 0'):
        require_rows("sign", changed(rm_scores=lambda x: -x), FIELDS)
    with pytest.raises(NotExact, match=r'field "prompts", row 0'):
        require_rows("dtype", changed(prompts=lambda x: x.int()), FIELDS)
    with pytest.raises(NotExact, match=r'field "num_turns", row 0 is 2.0'):
        require_rows("type", changed(num_turns=float), FIELDS)
    with pytest.raises(NotExact, match=r'field "metrics", row 0'):
        require_rows("keys", changed(metrics=lambda x: x | {"more": 1}), FIELDS)
    with pytest.raises(NotExact, match=r'field "images", row 0, pixels'):
        require_rows("in a dict", pictures(0.0), [{"images": {"pixels": torch.tensor([-0.0]), "name": "a"}}])
    with pytest.raises(NotExact, match="expected 11 rows"):
        require_rows("fewer", batched(FIELDS[:-1]), FIELDS)
    with pytest.raises(NotExact, match="expected 11 rows"):
        require_rows("missing", batched(FIELDS).exclude("uid"), FIELDS)


# -------------------------------------------------------------------- the command


def test_the_command_reports_bytes_times_and_a_step(measured):
    rows = measured("dataplane", partial(dataplane.run, **SMALL))
    for kind in ("text", "experts", "images", "zstd images"):
        cases = {case for case, _ in rows if case.startswith(f"dataplane {kind}") and "puts of" in case}
        assert len(cases) == 2
        for case in cases:
            stored = [rows[case, f"stored, {name}"]["value"] for name in (SIMPLE, MASKPACK)]
            assert rows[case, f"stored, {SIMPLE} / {MASKPACK}"]["value"] == pytest.approx(stored[0] / stored[1])
            assert rows[case, f"moved, {SIMPLE}"]["value"] > 2 * stored[0]
            target = rows[case, f"moved, {SIMPLE} / {MASKPACK}"]["target"]
            assert target == {"text": ">= 4", "experts": None}.get(kind, ">= 20")
    for kind, size, target in (
        ("text", "1 sample", ">= 0.77"),
        ("text", "5 samples", ">= 2"),
        ("images", "8 samples", None),
    ):
        for call in ("put", "get"):
            case = f"dataplane {kind}, {size} a call"
            assert rows[case, f"{call}, {SIMPLE} / {MASKPACK}"]["target"] == target
            assert ((case, f"{call}, TransferQueue without storage") in rows) == (kind == "text")
    assert rows["dataplane step, 5 samples, 8 ranks", f"step, {SIMPLE} / {MASKPACK}"]["target"] == ">= 2"


# -------------------------------------------------------------------- queues


@pytest.fixture(scope="module")
def queues():
    """Both, until the end of the module: the command, which starts a Ray of its own, comes before."""
    with local_ray(TensorDict({}), num_cpus=CPUS):
        queues = {name: OwnedQueue(name) for name in (SIMPLE, MASKPACK)}
        yield queues
        for queue in queues.values():
            queue.stop()


def test_both_backends_are_used_in_turn_and_hold_their_own(queues):
    keys = [row.key for row in ROWS]
    for queue in queues.values():
        with queue:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=batched(FIELDS))
    held = {name: stored_bytes(queue) for name, queue in queues.items()}
    tensors = sum(x.nbytes for row in FIELDS for x in row.values() if isinstance(x, torch.Tensor))
    assert tensors < held[SIMPLE] < 1.5 * tensors + 11 * 2000
    assert 0 < held[MASKPACK] < held[SIMPLE]
    for queue in queues.values():
        with queue:
            require_rows(queue.backend, tq.kv_batch_get(keys=keys[::-1], partition_id="train"), FIELDS[::-1])
            tq.kv_clear(keys=keys[1:], partition_id="train")
            assert list(tq.kv_list("train")["train"]) == keys[:1]
            assert stored_bytes(queue) < held[queue.backend]
            tq.kv_clear(keys=keys, partition_id="train")
        assert stored_bytes(queue) == 0
        with pytest.raises(AssertionError, match="has not been initialized"):
            tq.kv_list("train")  # outside of `with`, no queue is used


def test_frames_are_counted_by_peer_while_asked_to(queues):
    queue = queues[SIMPLE]
    values = torch.zeros(1, 1000, dtype=torch.int64)
    with queue:
        tq.kv_batch_put(keys=["a"], partition_id="train", fields=TensorDict({"x": values}, batch_size=[1]))
        with counted() as bytes_of:
            tq.kv_batch_get(keys=["a"], partition_id="train")
        tq.kv_clear(keys=["a"], partition_id="train")
    assert bytes_of[controller_of(queue)] > 0
    assert 8000 < by_units(queue, bytes_of) < 9500


def test_frames_are_those_that_the_units_of_maskpack_count(queues):
    queue, manager = queues[MASKPACK], queues[MASKPACK].client.storage_manager

    def counted_by_units():
        figures = queue.client._run_coroutine(manager.figures())
        return sum(one["received_bytes"] + one["sent_bytes"] for one in figures)

    before = counted_by_units()
    with queue, counted() as bytes_of:
        tq.kv_batch_put(keys=[row.key for row in ROWS], partition_id="train", fields=batched(FIELDS))
        tq.kv_batch_get(keys=[row.key for row in ROWS], partition_id="train")
    moved = by_units(queue, bytes_of)
    assert moved == pytest.approx(counted_by_units() - before, abs=2000)  # less the messages that ask for figures
    assert moved > stored_bytes(queue)


def controller_of(queue):
    return queue.config.controller.zmq_info.to_addr("request_handle_socket")


def by_units(queue, bytes_of):
    return sum(count for peer, count in bytes_of.items() if peer != controller_of(queue))
