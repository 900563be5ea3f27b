"""What a rank does in the tests of sharded replay: its rows through a model that FSDP shards, and each row alone
through the whole model."""

from __future__ import annotations

import copy
import itertools
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import maskpack as mp
from maskpack.adapters.transformers import model as adapter
from maskpack.adapters.transformers import replayable
from maskpack.replay import PackedInputs, ReplayOptions

ROWS = ((2, 3), (4, 5), (1, 1), (3, 2), (4, 1), (2, 5))
PROMPT, RESPONSE = 4, 5
SHARE: dict[str, Any] = {"options": ReplayOptions(share_prefixes=True, min_shared=1)}


def tiny(tied: bool) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return model


def said_of(call: Any, *given: Any, **more: Any) -> str:
    """The error of a call."""
    try:
        call(*given, **more)
    except mp.errors.MaskpackError as error:
        return str(error)
    return "nothing"


def batch_of(rows: Any) -> TensorDict:
    source = torch.Generator().manual_seed(len(rows))
    mask = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.int64)
    for row, (prompt, response) in enumerate(rows):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    ids = torch.randint(3, 97, mask.shape, generator=source) * mask
    return TensorDict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, PROMPT:]}, batch_size=[len(rows)])


def alone(model: Any, batch: TensorDict) -> Tensor:
    out = [torch.zeros(0, device=batch["input_ids"].device)]
    for ids, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row = ids[real]
        prompt = int(real[:PROMPT].sum())
        if not row.numel():
            continue
        scores = model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        out += [scores[place - 1, row[place]][None] for place in range(prompt, len(row))]
    return torch.cat(out)


GROUPS = ((4, (5, 2, 3)), (2, (1, 4)))  # tokens of a prompt, and of each response to it
SHARING = {  # whether the rows of rank 0, and of the other, share prefixes
    "all share": (True, True),
    "rank 0 shares": (True, False),
    "rank 1 shares": (False, True),
    "none shares": (False, False),
}


def groups() -> TensorDict:
    """Groups of responses to a prompt."""
    batch = batch_of([(prompt, response) for prompt, responses in GROUPS for response in responses])
    begin = 0
    for _, responses in GROUPS:
        end = begin + len(responses)
        batch["input_ids"][begin:end, :PROMPT] = batch["input_ids"][begin, :PROMPT].clone()
        begin = end
    return batch


def _sharing(case: str) -> TensorDict:
    """The rows of this rank."""
    rank = min(dist.get_rank(), 1)
    batch = groups() if SHARING[case][rank] else batch_of(ROWS[rank : 2 + 2 * rank])
    assert (PackedInputs.of(batch, **SHARE).tree is not None) == SHARING[case][rank]
    return batch


def sharded(tied: bool, sharing: str | None = None, way: str = "", model: Any = None) -> dict[str, float]:
    """How far log-probs of all ways are off those of each row alone, and gradients (of the mean over ranks).

    In the way "all parts", the root shards its weights
    again after each forward pass, and the embedding and the output layer, unless they share a weight, have shards of
    their own.
    """
    all_parts = way == "all parts"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny(tied) if model is None else model
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (ranks,))
    parts = [*model.model.layers, *([model.model.embed_tokens, model.lm_head] if all_parts and not tied else [])]
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True if all_parts else None)
    replay = replayable(model)
    # other rows, and other counts, on each rank
    batch = batch_of(ROWS[: 3 * (rank + 1)][rank:]) if sharing is None else _sharing(sharing)
    options: dict[str, Any] = {} if sharing is None else SHARE
    truth = alone(plain, batch)
    off = {}
    seen = mp.replay.response_log_probs(replay, batch, self_check=True, **options)
    off["packed"] = _apart(seen.values(), truth)
    weights = torch.linspace(0.5, 1.5, truth.numel())
    (seen.values() * weights).sum().backward()
    (truth * weights).sum().backward()
    for name, weight in model.named_parameters():
        want = plain.get_parameter(name).grad
        dist.all_reduce(want)
        got = weight.grad.full_tensor()
        off["gradients"] = max(off.get("gradients", 0), float((got - want / ranks).norm() / (want / ranks).norm()))
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1), token_budget=12)
    off["planned"] = _apart(
        mp.replay.response_log_probs(replay, batch, plan=mp.planning.agree_on_count(plan), **options).values(), truth
    )
    os.environ["MASKPACK_PACKED_REPLAY"] = "0"
    off["padded"] = _apart(mp.replay.response_log_probs(replay, batch, **options).values(), truth)
    return off


def tiny_hybrid() -> Any:
    """A gated delta net, and attention."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5TextConfig(vocab_size=97, num_hidden_layers=2, **kinds, **sizes, **heads)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() == 2 else 1)
        model.model.layers[0].linear_attn.A_log.fill_(-1.0)  # the state lasts, and gradients of decays do not cancel
    return model


def _replayed(model: Any, rows: Any, **options: Any) -> Any:
    return mp.replay.response_log_probs(replayable(model), batch_of(rows), **options)


def sharded_mixers() -> dict[str, Any]:
    """As `sharded`, of a model with layers that carry state; and what is refused."""
    seen: dict[str, Any] = sharded(False, model=tiny_hybrid())
    del os.environ["MASKPACK_PACKED_REPLAY"]
    inside = tiny_hybrid()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (inside.model.layers[0].linear_attn.conv1d, *inside.model.layers, inside):
        fully_shard(part, mesh=mesh)
    for name, made, options in (
        ("inside", inside, {}),
        ("context", tiny_hybrid(), {"context_group": dist.group.WORLD}),
    ):
        seen[name] = said_of(_replayed, made, ROWS, **options)
    return seen


def gathered_without_gradients() -> dict[str, float]:
    """Of an output layer that FSDP2 shards again after each pass: how far log-probs are off after the weights have
    changed behind a pass without gradients; and whether its weight and the embedding's are shards after it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = tiny(False)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    replay, batch = replayable(model), batch_of(ROWS)
    with torch.no_grad():
        mp.replay.response_log_probs(replay, batch, self_check=True)
        whole = sum(not isinstance(weight, DTensor) for weight in model.parameters())
        for weight in (*model.parameters(), *plain.parameters()):
            weight.mul_(1.25)
        off = _apart(mp.replay.response_log_probs(replay, batch, self_check=False).values(), alone(plain, batch))
    return {"off": off, "whole": whole}


def _apart(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen - truth).abs().max().detach()) if truth.numel() else 0.0


def head_of_its_own() -> str:
    """No root gathers the weight of the output layer."""
    model = tiny(False)
    fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return said_of(_replayed, model, ROWS[:2])


# -------------------------------------------------------------------- the comparison of a row


def _mesh(*sizes: int) -> Any:
    names = ("replicate", "shard")[-len(sizes or (1,)) :]
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def _fsdp2(model: Any, *sizes: int) -> Any:
    mesh = _mesh(*sizes)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2_kept(model: Any) -> Any:
    """Gathered weights stay after a forward pass: then no parameter says that it is sharded."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=_mesh(), reshard_after_forward=False)
    return fully_shard(model, mesh=_mesh(), reshard_after_forward=False)


def _fsdp2_layers(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=_mesh())
    return model


def _fsdp2_base(model: Any) -> Any:
    fully_shard(model.model, mesh=_mesh())
    return model


def _fsdp1_layers(model: Any, **options: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
    return model


SHARDED = {
    "fsdp2": _fsdp2,
    "fsdp2 whole": lambda model: fully_shard(model, mesh=_mesh()),
    "fsdp2 kept": _fsdp2_kept,
    "fsdp2 layers": _fsdp2_layers,
    "fsdp2 base": _fsdp2_base,
    "hybrid": lambda model: _fsdp2(model, 1, dist.get_world_size()),
    "copied": lambda model: _fsdp2(model, dist.get_world_size(), 1),
    "fsdp1 layers": _fsdp1_layers,
    "fsdp1 layers, own parameters": lambda model: _fsdp1_layers(model, use_orig_params=True),
}
UNEQUAL = {  # the rows of rank 0, and of all others
    "several": (((2, 3), (4, 5), (1, 1)), ((3, 2), (4, 1))),
    "one row": (((2, 3), (4, 5), (1, 1)), ((4, 5),)),
    "the other has one row": (((4, 5),), ((2, 3), (4, 5))),
    "no responses": (((2, 3), (4, 5)), ((2, 0), (1, 0))),
    "no tokens": (((2, 3), (4, 5)), ((0, 0), (0, 0))),
    "a token": (((2, 3), (4, 5)), ((1, 0),)),
    "no rows": (((2, 3), (4, 5)), ()),
    "nobody has a row": (((1, 0),), ((0, 0),)),
}


def _rows_of(case: str) -> TensorDict:
    rows = UNEQUAL[case][min(dist.get_rank(), 1)]
    return batch_of(rows) if rows else batch_of(ROWS[:1])[:0]


def _compared_tokens(model: Any) -> list[int]:
    """Tokens of each run by the model's own attention, from now on: these are the rows that are compared."""
    seen: list[int] = []

    def note(_: Any, __: Any, given: Any) -> None:
        if "cu_seq_lens_q" not in given:
            seen.append(given["input_ids"].numel())

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def _of_merged_rows(attend: Any) -> Any:
    """An attention for which all rows are one."""

    def merged(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, **more: Any) -> Tensor:
        whole = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return attend(query, key, value, whole, query.shape[0], **more)

    return merged


def _tried(replay: Any, batch: TensorDict, **options: Any) -> Any:
    try:
        return mp.replay.response_log_probs(replay, batch, **options).values().detach()
    except mp.errors.ReplayError as error:
        return str(error)


def compared(kinds: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind of sharding and by rows: what the comparison says, of a right attention and of a wrong one."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain, attend = tiny(False), adapter.packed_attention
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for kind in kinds:
        for case in UNEQUAL if kind == "fsdp2" else ("several", "no tokens"):
            batch = _rows_of(case)
            replay = replayable(SHARDED[kind](tiny(False)))
            calls = _compared_tokens(replay.model)
            seen: dict[str, Any] = {}
            adapter.packed_attention = _of_merged_rows(attend)
            seen["wrong"] = [_tried(replay, batch, self_check=self_check) for self_check in (None, True, None)]
            adapter.packed_attention = attend
            seen["calls when wrong"] = calls[:]
            values = [_tried(replay, batch) for _ in range(3)]
            seen["calls"] = calls[len(seen["calls when wrong"]) :]
            values += [_tried(replay, batch, self_check=self_check) for self_check in (True, False)]
            seen["calls when asked"] = len(calls) - len(seen["calls"]) - len(seen["calls when wrong"])
            truth = alone(plain, batch)
            seen["off"] = [one if isinstance(one, str) else _apart(one, truth) for one in values]
            out[kind, case] = seen
    return out


def _of_lone_nodes(attend: Any) -> Any:
    """An attention for which no node is above another."""
    return lambda *given, tree, **more: attend(*given, **more)


def compared_trees(kinds: list[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """By kind of sharding and by the rows of each call: how many runs of the model each call takes for its comparison,
    and how far it is off; and what the comparison says of a wrong attention."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain, attend = tiny(False), adapter.packed_attention
    out: dict[tuple[str, ...], dict[str, Any]] = {}
    for kind in kinds:
        for cases in itertools.permutations(SHARING) if kind == "fsdp2" else (("rank 0 shares", "none shares"),):
            replay = replayable(SHARDED[kind](tiny(False)))
            calls = _compared_tokens(replay.model)
            seen: dict[str, Any] = {"runs": [], "off": []}
            for case in cases:
                before, batch = len(calls), _sharing(case)
                values = mp.replay.response_log_probs(replay, batch, **SHARE).values().detach()
                seen["off"].append(_apart(values, alone(plain, batch)))
                seen["runs"].append(len(calls) - before)
            adapter.packed_attention = _of_lone_nodes(attend)
            seen["wrong"] = _tried(replay, _sharing("rank 0 shares"), self_check=True, **SHARE)
            adapter.packed_attention = attend
            out[(kind, *cases)] = seen
    return out


def dropout_with_trees() -> str:
    """What a model in train mode says where only the rows of rank 0 share prefixes."""
    model = tiny(False).train()
    model.config.attention_dropout = 0.1
    return _tried(replayable(_fsdp2(model)), _sharing("rank 0 shares"), **SHARE)


def values_compared() -> list[Any]:
    """Of a model without output layer: what a wrong attention gives, and how far a right one is off."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain, attend = tiny(False).model, adapter.packed_attention
    replay = replayable(fully_shard(tiny(False).model, mesh=_mesh()))
    batch = _rows_of("no tokens")
    said: list[Any] = []
    for attention in (_of_merged_rows(attend), attend):
        adapter.packed_attention = attention
        try:
            seen = mp.replay.response_values(replay, batch, lambda hidden: hidden[:, 0]).values()
        except mp.errors.ReplayError as error:
            said.append(str(error))
    truth = [torch.zeros(0)]
    for ids, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        prompt = int(real[:PROMPT].sum())
        if real.any():
            truth.append(plain(input_ids=ids[real][None]).last_hidden_state[0, prompt - 1 : -1, 0])
    return [*said, _apart(seen, torch.cat(truth))]


def offloaded() -> dict[str, Any]:
    """Of a model whose shards wait on the host: on which device rows, and results, are; and what is compared."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = tiny(False)
    plain = copy.deepcopy(model).to("cuda")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
    replay = replayable(model)
    calls = _compared_tokens(model)
    batch = batch_of(ROWS[: 3 * (dist.get_rank() + 1)])
    with torch.no_grad():
        seen = [mp.replay.response_log_probs(replay, batch).values() for _ in range(2)]
        truth = alone(plain, batch.to("cuda"))
    devices = {str(replay.device.type), *(one.device.type for one in seen)}
    return {"devices": devices, "compared": len(calls), "off": max(_apart(one, truth) for one in seen)}


def inside_a_sharded_module() -> list[str]:
    """Models that something around them shards."""
    inner = [
        FullyShardedDataParallel(tiny(False), device_id=torch.device("cpu"), use_orig_params=own).module
        for own in (False, True)
    ]
    inner.append(_fsdp2(tiny(False)).model)
    return [said_of(replayable, model) for model in inner]


class _MeanNorm(torch.nn.Module):
    """A norm that looks at all tokens of a pass, on the first rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 1), keepdim=True) * 1e-3 * (dist.get_rank() == 0)


def sharded_bits() -> dict[str, Any]:
    """How many log-probs of rows together differ in a bit from those of each row alone, with a sharded model; what is
    said of a part that depends on the packing on one rank alone; and of a context group."""
    rows = batch_of(ROWS[: 3 + dist.get_rank()])
    replay = replayable(_fsdp2(tiny(False)), invariant=True)
    off = 0
    with torch.no_grad():
        together = replay_of(replay, rows).unbind()
        for row in range(4):  # as many passes on all ranks
            alone = replay_of(replay, rows[row % len(rows) : row % len(rows) + 1])
            off += int((alone.values().view(torch.int32) != together[row % len(rows)].view(torch.int32)).sum())
    odd = tiny(False)
    odd.model.layers[0].input_layernorm = _MeanNorm()
    variant = replayable(_fsdp2(odd), invariant=True)
    refused = [said_of(replay_of, variant, rows) for _ in range(2)]
    plain = replayable(tiny(False), invariant=True)
    context = said_of(mp.replay.response_log_probs, plain, batch_of(ROWS), context_group=dist.group.WORLD)
    return {"differing": off, "refused": refused, "context": context}


def replay_of(replay: Any, rows: TensorDict) -> Tensor:
    return mp.replay.response_log_probs(replay, rows, self_check=False)
