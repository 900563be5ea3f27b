"""What a rank does in the test of sharded replay: its rows through a model that FSDP2 shards, and each row alone
through the whole model."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import maskpack as mp
from maskpack.adapters.transformers import replayable

ROWS = ((2, 3), (4, 5), (1, 1), (3, 2), (4, 1), (2, 5))
PROMPT, RESPONSE = 4, 5


def tiny(tied: bool) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return model


def batch_of(rows: Any) -> TensorDict:
    source = torch.Generator().manual_seed(len(rows))
    mask = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.int64)
    for row, (prompt, response) in enumerate(rows):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    ids = torch.randint(3, 97, mask.shape, generator=source) * mask
    return TensorDict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, PROMPT:]}, batch_size=[len(rows)])


def alone(model: Any, batch: TensorDict) -> Tensor:
    out = []
    for ids, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row = ids[real]
        prompt = int(real[:PROMPT].sum())
        scores = model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        out += [scores[place - 1, row[place]] for place in range(prompt, len(row))]
    return torch.stack(out)


def sharded(tied: bool) -> dict[str, float]:
    """How far log-probs of all ways are off those of each row alone, and gradients (of the mean over ranks)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny(tied)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    replay = replayable(model)
    batch = batch_of(ROWS[: 3 * (rank + 1)][rank:])  # other rows, and other counts, on each rank
    truth = alone(plain, batch)
    off = {}
    seen = mp.response_log_probs(replay, batch, canary=True)
    off["packed"] = _apart(seen.values(), truth)
    weights = torch.linspace(0.5, 1.5, truth.numel())
    (seen.values() * weights).sum().backward()
    (truth * weights).sum().backward()
    for name, weight in model.named_parameters():
        want = plain.get_parameter(name).grad
        dist.all_reduce(want)
        got = weight.grad.full_tensor()
        off["gradients"] = max(off.get("gradients", 0), float((got - want / ranks).norm() / (want / ranks).norm()))
    plan = mp.plan_micro_batches(batch["attention_mask"].sum(1), token_budget=12)
    off["planned"] = _apart(mp.response_log_probs(replay, batch, plan=mp.agree_on_count(plan)).values(), truth)
    os.environ["MASKPACK_PACKED_REPLAY"] = "0"
    off["padded"] = _apart(mp.response_log_probs(replay, batch).values(), truth)
    return off


def _apart(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen - truth).abs().max().detach())


def head_of_its_own() -> str:
    """The output layer in shards of its own is whole only within its own forward pass."""
    model = tiny(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        mp.response_log_probs(replayable(model), batch_of(ROWS[:2]))
    except mp.ReplayError as error:
        return str(error)
    return "no error"
