"""What a rank does in the tests of sharded replay: its rows through a model that FSDP shards, and each row alone
through the whole model."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import transformers
import work_rows
from tensordict import TensorDict
from tiny_models import TINY
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from work_rows import PROMPT, ROWS, SHARE, alone, batch_of, far, said_of, tiny

from maskpack.adapters.transformers import replayable
from maskpack.errors import ReplayError
from maskpack.ops.attention import packed_attention
from maskpack.planning import agree_on_count, plan_micro_batches
from maskpack.replay import PackedInputs, response_log_probs, response_values

SHARING = {  # whether the rows of rank 0, and of the other, share prefixes
    "all share": (True, True),
    "rank 0 shares": (True, False),
    "rank 1 shares": (False, True),
    "none shares": (False, False),
}


def _sharing(case: str) -> TensorDict:
    """The rows of this rank."""
    rank = min(dist.get_rank(), 1)
    batch = work_rows.groups() if SHARING[case][rank] else batch_of(ROWS[rank : 2 + 2 * rank])
    assert (PackedInputs.of(batch, **SHARE).tree is not None) == SHARING[case][rank]
    return batch


def sharded(tied: bool, sharing: str | None = None, way: str = "", model: Any = None) -> dict[str, float]:
    """How far log-probs of all ways are off those of each row alone, and gradients (of the mean over ranks).

    In the way "all parts", the root shards its weights
    again after each forward pass, and the embedding and the output layer, unless they share a weight, have shards of
    their own. In the way "2 x 2", each shard has a copy.
    """
    all_parts = way == "all parts"
    model = tiny(tied) if model is None else model
    plain = copy.deepcopy(model)
    own = [model.model.embed_tokens, model.lm_head] if all_parts and not tied else []
    if way == "2 x 2":
        _layers(model, 2, 2)
    else:
        work_rows.sharded(model, *model.model.layers, *own, reshard_after_forward=True if all_parts else None)
    replay = replayable(model)
    batch = work_rows.own_rows() if sharing is None else _sharing(sharing)
    options: dict[str, Any] = {} if sharing is None else SHARE
    truth = alone(plain, batch)
    off = work_rows.passes_off(replay, plain, batch, truth, **options)
    plan = agree_on_count(plan_micro_batches(batch["attention_mask"].sum(1), token_budget=12))
    off["planned"] = far(response_log_probs(replay, batch, plan=plan, **options), truth)
    return off | {"padded": work_rows.padded_off(replay, batch, truth, **options)}


def without_rows() -> dict[str, float]:
    """As `sharded`, in micro-batches of an agreed count, where all rows are on rank 0."""
    model = tiny()
    plain, batch = copy.deepcopy(model), batch_of(ROWS) if dist.get_rank() == 0 else batch_of(ROWS[:1])[:0]
    replay = replayable(_layers(model))
    plan = agree_on_count(plan_micro_batches(batch["attention_mask"].sum(1), token_budget=12))
    seen: list[Tensor] = []
    for part in plan.apply(batch):
        seen.append(response_log_probs(replay, part, self_check=False))
        seen[-1].values().square().sum().backward()
    truth = alone(plain, batch)
    if len(batch):
        truth.square().sum().backward()
    rows = [row for part in seen for row in part.unbind()]
    places = [row for part in plan.micro_batches for row in part]
    whole = [row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]
    off = far(torch.cat(whole), truth) if whole else 0.0
    return {"packed": off, "gradients": work_rows.gradients_off(model, plain), "passes": len(seen)}


def resumed(folder: str) -> dict[str, Any]:
    """Steps of AdamW, and the same from a checkpoint in their middle: how many weights differ in a bit. `begun`: how
    many differ from those of the checkpoint."""

    def fresh() -> tuple[Any, Any]:
        replay = replayable(_layers(tiny()))
        return replay, torch.optim.AdamW(replay.model.parameters(), 0.01)

    def step(replay: Any, optimizer: Any, number: int) -> None:
        rows = batch_of(ROWS[number : number + 2 + dist.get_rank()])
        response_log_probs(replay, rows).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def weights(replay: Any) -> Tensor:
        return torch.cat([weight.full_tensor().detach().flatten() for weight in replay.model.parameters()])

    replay, optimizer = fresh()
    step(replay, optimizer, 0)
    model, state = get_state_dict(replay.model, optimizer)
    checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    saved = weights(replay)
    for number in (1, 2):
        step(replay, optimizer, number)
    again, own = fresh()
    model, state = get_state_dict(again.model, own)
    held = {"model": model, "optimizer": state}
    checkpoint.load(held, checkpoint_id=folder)
    set_state_dict(again.model, own, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    for number in (1, 2):
        step(again, own, number)
    ends = weights(replay), weights(again)
    return {"differing": int((ends[0] != ends[1]).sum()), "begun": int((ends[0] != saved).sum())}


def tiny_hybrid() -> Any:
    """A gated delta net, and attention."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
    heads = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5TextConfig(**TINY | kinds | heads)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() == 2 else 1)
        model.model.layers[0].linear_attn.A_log.fill_(-1.0)  # the state lasts, and gradients of decays do not cancel
    return model


def _said(model: Any, rows: Any, **options: Any) -> str:
    return said_of(lambda: response_log_probs(replayable(model), batch_of(rows), **options))


def sharded_mixers() -> dict[str, Any]:
    """As `sharded`, of a model with layers that carry state; and what is refused."""
    seen: dict[str, Any] = sharded(False, model=tiny_hybrid())
    inside = tiny_hybrid()
    work_rows.sharded(inside, inside.model.layers[0].linear_attn.conv1d, *inside.model.layers)
    context: Any = {"context_group": dist.group.WORLD}
    said = {"inside": _said(inside, ROWS), "context": _said(tiny_hybrid(), ROWS, **context)}
    return seen | said


def gathered_without_gradients() -> dict[str, float]:
    """Of an output layer that FSDP2 shards again after each pass: how far log-probs are off after the weights have
    changed behind a pass without gradients; and whether its weight and the embedding's are shards after it."""
    model = tiny()
    plain = copy.deepcopy(model)
    work_rows.sharded(model, *model.model.layers, reshard_after_forward=True)
    replay, batch = replayable(model), batch_of(ROWS)
    with torch.no_grad():
        response_log_probs(replay, batch, self_check=True)
        whole = sum(not isinstance(weight, DTensor) for weight in model.parameters())
        for weight in (*model.parameters(), *plain.parameters()):
            weight.mul_(1.25)
        off = far(response_log_probs(replay, batch, self_check=False), alone(plain, batch))
    return {"off": off, "whole": whole}


def head_of_its_own() -> str:
    """No root gathers the weight of the output layer."""
    model = tiny()
    return _said(work_rows.sharded(model, model.lm_head, root=False), ROWS[:2])


# -------------------------------------------------------------------- the comparison of a row


def _layers(model: Any, *sizes: int, **options: Any) -> Any:
    """`sizes`: of a mesh with copies."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")) if sizes else None
    return work_rows.sharded(model, *model.model.layers, mesh=mesh, **options)


def _fsdp1_layers(model: Any, **options: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
    return model


SHARDED = {
    "fsdp2": _layers,
    "fsdp2 whole": work_rows.sharded,
    # gathered weights stay after a forward pass: then no parameter says that it is sharded
    "fsdp2 kept": lambda model: _layers(model, reshard_after_forward=False),
    "fsdp2 layers": lambda model: _layers(model, root=False),
    "fsdp2 base": lambda model: work_rows.sharded(model, model.model, root=False),
    "hybrid": lambda model: _layers(model, 1, dist.get_world_size()),
    "copied": lambda model: _layers(model, dist.get_world_size(), 1),
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


def _tried(replay: Any, batch: TensorDict, **options: Any) -> Any:
    try:
        return response_log_probs(replay, batch, **options).values().detach()
    except ReplayError as error:
        return str(error)


def compared(kinds: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind of sharding and by rows: what the comparison says, of a right attention and of a wrong one."""
    plain = tiny()
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for kind in kinds:
        for case in UNEQUAL if kind == "fsdp2" else ("several", "no tokens"):
            batch = _rows_of(case)
            replay = replayable(SHARDED[kind](tiny()))
            calls = _compared_tokens(replay.model)
            seen: dict[str, Any] = {}
            with work_rows.attending(work_rows.merged_rows):
                seen["wrong"] = [_tried(replay, batch, self_check=self_check) for self_check in (None, True, None)]
            seen["calls when wrong"] = calls[:]
            values = [_tried(replay, batch) for _ in range(3)]
            seen["calls"] = calls[len(seen["calls when wrong"]) :]
            values += [_tried(replay, batch, self_check=self_check) for self_check in (True, False)]
            seen["calls when asked"] = len(calls) - len(seen["calls"]) - len(seen["calls when wrong"])
            truth = alone(plain, batch)
            seen["off"] = [one if isinstance(one, str) else far(one, truth) for one in values]
            out[kind, case] = seen
    return out


def lone_nodes(*given: Any, tree: Any, **more: Any) -> Any:
    """An attention for which no node is above another."""
    return packed_attention(*given, **more)


def compared_trees(kinds: list[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """By kind of sharding and by the rows of each call: how many runs of the model each call takes for its comparison,
    and how far it is off; and what the comparison says of a wrong attention."""
    plain = tiny()
    out: dict[tuple[str, ...], dict[str, Any]] = {}
    for kind in kinds:
        for cases in itertools.permutations(SHARING) if kind == "fsdp2" else (("rank 0 shares", "none shares"),):
            replay = replayable(SHARDED[kind](tiny()))
            calls = _compared_tokens(replay.model)
            seen: dict[str, Any] = {"runs": [], "off": []}
            for case in cases:
                before, batch = len(calls), _sharing(case)
                values = response_log_probs(replay, batch, **SHARE).values().detach()
                seen["off"].append(far(values, alone(plain, batch)))
                seen["runs"].append(len(calls) - before)
            with work_rows.attending(lone_nodes):
                seen["wrong"] = _tried(replay, _sharing("rank 0 shares"), self_check=True, **SHARE)
            out[(kind, *cases)] = seen
    return out


def dropout_with_trees() -> str:
    """What a model in train mode says where only the rows of rank 0 share prefixes."""
    model = tiny().train()
    model.config.attention_dropout = 0.1
    return _tried(replayable(_layers(model)), _sharing("rank 0 shares"), **SHARE)


def values_compared() -> list[Any]:
    """Of a model without output layer: what a wrong attention gives, and how far a right one is off."""
    plain, batch = tiny().model, _rows_of("no tokens")
    replay = replayable(work_rows.sharded(tiny().model))
    with work_rows.attending(work_rows.merged_rows):
        said = said_of(response_values, replay, batch, lambda hidden: hidden[:, 0])
    seen = response_values(replay, batch, lambda hidden: hidden[:, 0])
    truth = [torch.zeros(0)]
    for ids, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        prompt = int(real[:PROMPT].sum())
        if real.any():
            truth.append(plain(input_ids=ids[real][None]).last_hidden_state[0, prompt - 1 : -1, 0])
    return [said, far(seen, torch.cat(truth))]


def offloaded() -> dict[str, Any]:
    """Of a model whose shards wait on the host: on which device rows, and results, are; and what is compared."""
    model = tiny()
    plain = copy.deepcopy(model).to("cuda")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    work_rows.sharded(model, *model.model.layers, mesh=mesh, offload_policy=CPUOffloadPolicy())
    replay = replayable(model)
    calls = _compared_tokens(model)
    batch = batch_of(ROWS[: 3 * (dist.get_rank() + 1)])
    with torch.no_grad():
        seen = [response_log_probs(replay, batch).values() for _ in range(2)]
        truth = alone(plain, batch.to("cuda"))
    devices = {str(replay.device.type), *(one.device.type for one in seen)}
    return {"devices": devices, "compared": len(calls), "off": max(far(one, truth) for one in seen)}


def inside_a_sharded_module() -> list[str]:
    """Models that something around them shards."""
    inner = [
        FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=own).module
        for own in (False, True)
    ]
    inner.append(_layers(tiny()).model)
    return [said_of(replayable, model) for model in inner]


class _MeanNorm(torch.nn.Module):
    """A norm that looks at all tokens of a pass, on the first rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 1), keepdim=True) * 1e-3 * (dist.get_rank() == 0)


def sharded_bits() -> dict[str, Any]:
    """How many log-probs of rows together differ in a bit from those of each row alone, with a sharded model; what is
    said of a part that depends on the packing on one rank alone; and of a context group."""
    rows = batch_of(ROWS[: 3 + dist.get_rank()])
    replay = replayable(_layers(tiny()), invariant=True)
    off = 0
    with torch.no_grad():
        together = replay_of(replay, rows).unbind()
        for row in range(4):  # as many passes on all ranks
            alone = replay_of(replay, rows[row % len(rows) : row % len(rows) + 1])
            off += int((alone.values().view(torch.int32) != together[row % len(rows)].view(torch.int32)).sum())
    odd = tiny()
    odd.model.layers[0].input_layernorm = _MeanNorm()
    variant = replayable(_layers(odd), invariant=True)
    refused = [said_of(replay_of, variant, rows) for _ in range(2)]
    plain = replayable(tiny(), invariant=True)
    context = said_of(response_log_probs, plain, batch_of(ROWS), context_group=dist.group.WORLD)
    return {"differing": off, "refused": refused, "context": context}


def replay_of(replay: Any, rows: TensorDict) -> Tensor:
    return response_log_probs(replay, rows, self_check=False)
