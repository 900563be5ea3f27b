"""What batches cost on CUDA: counted synchronisations; the response axis and gradients there."""

from __future__ import annotations

import pytest
import torch
from kernels import count_syncs
from oracle import assert_same_batch
from samples import PAD, workload
from tensordict import TensorDict

from maskpack import extract_response, nest_batch_by_mask, select_and_pad_to_response
from maskpack import unnest_batch_by_mask as unnest
from maskpack.nesting.schema import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cuda_batch(variant: str) -> TensorDict:
    return workload(variant, 32).to("cuda")


def test_syncs_of_the_batch_functions() -> None:
    batch = cuda_batch("reference")
    nest_batch_by_mask(batch, pad_token_id=PAD)
    with count_syncs() as nesting:
        nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    with count_syncs() as restoring:
        unnest(nested)
    assert len(nesting) == 2
    assert len(restoring) == 1


def test_trusted_pads_cost_no_sync() -> None:
    batch = cuda_batch("reference")
    want = nest_batch_by_mask(batch, pad_token_id=PAD)
    nest_batch_by_mask(batch, pad_token_id=PAD, verify=False)
    with count_syncs() as seen:
        nested = nest_batch_by_mask(batch, pad_token_id=PAD, verify=False)
    assert len(seen) == 1, seen  # for the mask
    assert_same_batch(nested.exclude(LAYOUTS), want.exclude(LAYOUTS))
    assert_same_batch(unnest(nested), batch)


def test_the_response_axis_on_the_device() -> None:
    batch = cuda_batch("reference")
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    some = nest_batch_by_mask(batch[4:20], pad_token_id=PAD)
    fields = select_and_pad_to_response(some, "responses", "advantages")
    assert torch.equal(fields["responses"], batch["responses"][4:20])
    assert torch.equal(fields["advantages"], batch["advantages"][4:20])
    outputs = torch.rand(*batch["input_ids"].shape, device="cuda", requires_grad=True)
    scored = extract_response(nested, outputs)
    mask = batch["attention_mask"][:, 24:].bool()
    assert torch.equal(scored, torch.where(mask, outputs[:, 23:-1], torch.zeros((), device="cuda")))
    scored.sum().backward()
    assert outputs.grad is not None
    assert int(outputs.grad.sum()) == int(mask.sum())


def test_gradients_flow_through_nested_fields() -> None:
    batch = cuda_batch("reference")
    batch["values"] = (torch.rand(32, 72, device="cuda") * batch["attention_mask"][:, 24:]).requires_grad_()
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    nested["values"].values().sum().backward()
    assert torch.equal(batch["values"].grad, batch["attention_mask"][:, 24:].float())
