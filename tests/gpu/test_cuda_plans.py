"""Plans on CUDA batches: the same rows as on the host."""

from __future__ import annotations

import pytest
import torch
from samples import PAD, assert_same, rollout

import maskpack as mp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


@quiet
@pytest.mark.parametrize("form", ["padded", "nested", "packed"])
def test_rows_are_those_of_the_host(form):
    batch = rollout()
    lengths = batch["attention_mask"].sum(-1)
    plan = mp.planning.plan_micro_batches(
        lengths, int(lengths.max()) + 2, options=mp.planning.PlanOptions(num_updates=2)
    ).with_count(4)
    device = torch.device("cuda")
    if form == "packed":
        packed = mp.compress(batch.exclude("global_token_num"), pad_token_id=PAD)
        parts = [mp.decompress(part, device=device) for part in plan.apply(packed)]
        assert_same(plan.restore(parts).to("cpu"), batch.exclude("global_token_num").to("cpu"))
        return
    whole = batch.to(device) if form == "padded" else mp.nest_batch_by_mask(batch.to(device), pad_token_id=PAD)
    parts = list(plan.apply(whole))
    assert all(value.is_cuda for part in parts for value in part.values() if isinstance(value, torch.Tensor))
    joined = plan.restore(parts)
    assert_same((joined if form == "padded" else mp.unnest_batch_by_mask(joined)).to("cpu"), batch.to("cpu"))


def test_jagged_rows_take_one_synchronisation():
    values = torch.arange(12.0, device="cuda")
    offsets = torch.tensor([0, 3, 3, 8, 12], device="cuda")
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=0, max_seqlen=5)
    plan = mp.planning.plan_micro_batches([3, 0, 5, 4], 5)
    parts = plan.apply(jagged)
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = list(parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(plan.restore(taken).values(), values)
