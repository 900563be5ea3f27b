"""What a rank does in the tests of context parallelism: its shard of the tokens, beside each row alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist
import work_rows
from attention_loops import in_turn, naive
from tensordict import TensorDict
from tiny_models import gemma3, llama, mixtral, qwen3, qwen25_vl, scaled
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from work_rows import PROMPT, ROWS, SHARE, alone, batch_of, far, gradients_off, said_of, tiny

import maskpack as mp
from maskpack.adapters.transformers import replayable
from maskpack.ops.attention import packed_attention
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs, response_outputs, response_values

MODELS = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3}  # gemma3 has windows of 4 tokens
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# -------------------------------------------------------------------- attention


def attention_off() -> dict[Any, tuple[float, float]]:
    """By heads and options: the errors of outputs and of gradients, in float64."""
    group, rank, ranks = world(), dist.get_rank(), dist.get_world_size()
    tokens, lengths = 3 * ranks, [1, 2 * ranks, ranks - 1]
    bounds = torch.tensor([0, 1, 2 * ranks + 1, 3 * ranks], dtype=torch.int32)
    here = slice(3 * rank, 3 * rank + 3)
    out = {}
    for heads, own in ((4, 4), (4, 2), (8, 1), (8, 2), (12, 6), (12, 4)):
        for window, cap in ((None, None), (2, None), (None, 3.0)):
            torch.manual_seed(heads * 100 + own)
            whole = [torch.randn(tokens, n, 6, dtype=torch.float64).requires_grad_() for n in (heads, own, own)]
            slope = torch.randn(tokens, heads, 6, dtype=torch.float64)
            truth = naive(*whole, in_turn(lengths), 0.3, window, cap)
            wanted = torch.autograd.grad((truth * slope).sum(), whole)
            parts = [x.detach()[here].clone().requires_grad_() for x in whole]
            seen = packed_attention(*parts, bounds, 2 * ranks, scale=0.3, window=window, softcap=cap, group=group)
            got = torch.autograd.grad((seen * slope[here]).sum(), parts)
            grads = max(far(a, b[here]) for a, b in zip(got, wanted, strict=True))
            out[heads, own, window, cap] = far(seen, truth[here]), grads
    return out


# -------------------------------------------------------------------- replay


def of_shards(replay: Any, batch: Any, **options: Any) -> Any:
    return response_log_probs(replay, batch, context_group=world(), **options)


def replayed(kind: str, shares: bool, checkpoints: bool) -> dict[str, float]:
    """How far log-probs, their gradients and values are from those of each row alone."""
    torch.manual_seed(0)
    model = scaled(MODELS[kind](**EIGHT), 5)
    plain = copy.deepcopy(model)
    if checkpoints:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = work_rows.groups() if shares else batch_of(ROWS)
    options: dict[str, Any] = {"context_group": world(), **(SHARE if shares else {})}
    replay = replayable(model)
    truth = alone(plain, batch)
    seen, entropy = response_log_probs(replay, batch, entropy=True, self_check=True, **options)
    work_rows.backward(seen.values(), truth)
    off = {"log_probs": far(seen, truth), "gradients": gradients_off(model, plain, mean=False)}
    one, spread = response_log_probs(replayable(plain), batch, entropy=True)
    off["entropy"] = far(entropy, spread)
    off["one rank"] = far(one, truth)
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1), 5 * dist.get_world_size())
    off["planned"] = far(response_log_probs(replay, batch, plan=plan, **options), truth)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, head.weight.numel())[None])
        values = response_values(replay, batch, head, **options)
        off["values"] = far(values, response_values(replayable(plain), batch, head))
        both = response_outputs(replay, batch, heads={"value": head}, **options)
        off["one pass"] = far(both.heads["value"], values)
        off["log-probs of one pass"] = far(both.log_probs, truth)
    return off


def options() -> dict[str, float]:
    """Rows without a prompt that are skipped, packed batches, M-RoPE; how far log-probs are off those of one rank. And
    the tokens of the shards for a multiple of 4."""
    model = tiny()
    sizes: list[int] = []
    replay, one = replayable(model), replayable(copy.deepcopy(model))
    model.model.embed_tokens.register_forward_hook(lambda _, given, out: sizes.append(given[0].numel()))

    def apart(batch: Any, **more: Any) -> float:
        seen = of_shards(replay, batch, self_check=False, **more)
        return far(seen, response_log_probs(one, batch, self_check=False, **more))

    alone_too = batch_of(((0, 3), (2, 4), (0, 0), (3, 1)))
    skip, multiple = ReplayOptions(no_prompt="skip"), ReplayOptions(multiple_of=4)
    off = {"skip": apart(alone_too, options=skip), "packed": apart(mp.compress(batch_of(ROWS), pad_token_id=0))}
    holes = batch_of(ROWS)
    holes["loss_mask"] = holes["attention_mask"] * (torch.arange(holes["attention_mask"].shape[1]) % 3 > 0)
    off["holes"] = apart(holes, options=ReplayOptions(scored=("loss_mask",)))
    sizes.clear()
    off["multiple"] = apart(batch_of(((2, 3), (4, 2))), options=multiple)  # 11 tokens: 12 would make shards of 6
    off["tokens of a shard"] = sizes[0]
    vision = qwen25_vl().eval()
    rows = batch_of(ROWS)
    places = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    rows["position_ids"] = torch.stack([places, places * 2, places // 2], 1)
    seen = of_shards(replayable(vision), rows)
    off["M-RoPE"] = far(seen, response_log_probs(replayable(vision), rows))
    return off | routed()


def routed() -> dict[str, float]:
    """Experts of the batch: log-probs beside one rank, with `self_check`; 0 if other experts on a rank are refused."""
    mixture = mixtral().eval()
    source = torch.Generator().manual_seed(5)
    rows = batch_of(ROWS)
    rows["routed_experts"] = torch.rand(*rows["input_ids"].shape, 2, 6, generator=source).argsort(-1)[..., :2]
    replay, one, given = replayable(mixture), replayable(copy.deepcopy(mixture)), ReplayOptions(routed_experts=True)
    off = far(of_shards(replay, rows, self_check=True, options=given), response_log_probs(one, rows, options=given))
    rows["routed_experts"][0, 3, 0] = torch.tensor([4, 5] if dist.get_rank() else [1, 2])
    said = said_of(of_shards, replay, rows, options=given)
    refused = "token ids and routed experts differ between the 2 ranks" in said
    return {"routed": off, "other experts": float(not refused)}


def sharded() -> dict[str, float]:
    """A model in FSDP2 shards over data-parallel pairs of context-parallel ranks, each pair with rows of its own."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "context"))
    model = tiny()
    plain = copy.deepcopy(model)
    replay = replayable(work_rows.sharded(model, *model.model.layers))
    pair = mesh.get_local_rank("data")
    batch = batch_of(ROWS[pair : 3 + 2 * pair])
    truth = alone(plain, batch)
    group = mesh.get_group("context")
    seen = response_log_probs(replay, batch, context_group=group, self_check=True)
    work_rows.backward(seen.values(), truth)
    off = {"log_probs": far(seen, truth), "gradients": gradients_off(model, plain)}
    return off | {"planned": planned_gradients_off(replay, plain, mesh, batch)}


def planned_gradients_off(replay: Any, plain: Any, mesh: Any, batch: TensorDict) -> float:
    """Of the mean over the response tokens of all pairs, by micro-batches whose number all ranks agreed on."""
    model = replay.model
    tokens = batch["attention_mask"][:, PROMPT:].sum(1)
    plan = mp.planning.agree_on_count(
        lambda: mp.planning.plan_micro_batches(
            batch["attention_mask"].sum(1),
            5 * 2,  # both ranks of a pair share a micro-batch
            loss_tokens=tokens,
        )
    )
    model.zero_grad()
    plain.zero_grad()
    for rows, weights in zip(plan.apply(batch), plan.loss_weights("token-mean"), strict=True):
        seen = response_log_probs(replay, rows, context_group=mesh.get_group("context"))
        (seen.values() * torch.from_numpy(weights).float().repeat_interleave(seen.offsets().diff())).sum().backward()
    count = tokens.sum() / 2  # both ranks of a pair have it
    dist.all_reduce(count)
    (2 * alone(plain, batch).sum() / count).backward()
    assert len(plan.micro_batches) > 1
    return gradients_off(model, plain)


def on_gpus(shares: bool) -> dict[str, float]:
    """The rms errors of two GPUs and of one in bfloat16, beside a float32 model that sees each row alone."""
    device = torch.device("cuda", dist.get_rank())
    exact = tiny().to(device)
    batch = (work_rows.groups() if shares else batch_of(ROWS)).to(device)
    truth = alone(exact, batch)
    truth.sum().backward()
    off = {}
    for name, group in (("", world()), (" of one", None)):
        model = tiny().to(device, torch.bfloat16)
        options: dict[str, Any] = {"context_group": group, **(SHARE if shares else {})}
        seen = response_log_probs(replayable(model), batch, self_check=True, **options).values()
        seen.sum().backward()
        off[f"log_probs{name}"] = float((seen - truth).detach().square().mean().sqrt())
        errors = []
        for weight, wanted in zip(model.parameters(), exact.parameters(), strict=True):
            got = weight.grad.float()
            if group is not None:
                dist.all_reduce(got)
                got /= dist.get_world_size()
            errors.append(float((got - wanted.grad).norm() / wanted.grad.norm()))
        off[f"gradients{name}"] = sum(errors) / len(errors)
    return off


def rounds(count: int, kind: str = "cpu") -> dict[str, float]:
    """Batches of random rows, often fewer tokens than ranks, or none that is scored on some rank."""
    device = torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device(kind)
    model = tiny(True).to(device)
    plain = copy.deepcopy(model)
    replay = replayable(model)
    source = random.Random(0)
    worst = {"log_probs": 0.0, "gradients": 0.0}
    without, few = 0, 0
    for _ in range(count):
        rows = [(source.randint(1, 4), source.choice((0, 0, 1, 5))) for _ in range(source.randint(1, 4))]
        if source.random() < 0.2:
            rows = [(0, 0)] * len(rows)
        batch = batch_of(rows).to(device)
        truth = alone(plain, batch)
        model.zero_grad()
        plain.zero_grad()
        inputs = PackedInputs.of(batch).shard(world())
        assert inputs.context is not None
        without += any(number == 0 for number in inputs.context.counts)
        few += inputs.num_tokens < dist.get_world_size()
        seen = of_shards(replay, batch, self_check=False)
        worst["log_probs"] = max(worst["log_probs"], far(seen, truth))
        seen.values().sum().backward()
        if truth.numel():
            truth.sum().backward()
            worst["gradients"] = max(worst["gradients"], gradients_off(model, plain, mean=False))
    return worst | {"without": without, "few": few}


# -------------------------------------------------------------------- failures


def refusals() -> dict[str, str]:
    rank, group = dist.get_rank(), world()
    replay = replayable(tiny())
    own = batch_of(ROWS[: 2 + rank])  # others on each rank
    moved = batch_of(ROWS[:2])
    moved["input_ids"][0, 3] += rank
    three = replayable(llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24))
    dist.barrier()

    class Unaware:
        device, head = torch.device("cpu"), torch.zeros(97, 64)
        hidden = dense_hidden = self_check = print

    def changing() -> Any:
        """A model whose rotary positions change for all rows after 16 tokens."""
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        return replayable(llama(rope_parameters=rope, max_position_embeddings=16))

    def moved_on(rows: TensorDict) -> TensorDict:
        """The positions of the last row, which lies in the last shard, are above those of its length."""
        rows["position_ids"] = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
        rows["position_ids"][-1] += 30
        return rows

    def dropped() -> None:
        other = replayable(llama(attention_dropout=0.1))
        other.model.train(bool(rank))
        of_shards(other, same, **SHARE)

    def shard_twice() -> None:
        PackedInputs.of(batch_of(ROWS[:2])).shard(group).shard(group)

    def lose_the_group() -> None:
        def forgets(_: Any, args: Any, given: dict[str, Any]) -> Any:
            return args, {name: value for name, value in given.items() if name != "context_group"}

        for layer in replay.model.model.layers:
            layer.self_attn.register_forward_pre_hook(forgets, with_kwargs=True)
        of_shards(replay, batch_of(ROWS[:2]))

    same = batch_of(ROWS[:2])
    same["routed_experts"] = torch.zeros(*same["input_ids"].shape, 1, 1, dtype=torch.int16)
    options: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.0 + rank},
        "entropy": {"entropy": bool(rank)},
        "self_check": {"self_check": None if rank else True},
        "share_prefixes": {"options": ReplayOptions(share_prefixes=bool(rank))},
        "routed_experts": {"options": ReplayOptions(routed_experts=bool(rank))},
        "invalid": {"temperature": "hot" if rank else 1.0},
    }
    differing = {name: said_of(of_shards, replay, same, **given) for name, given in options.items()}
    with torch.set_grad_enabled(bool(rank)):
        differing["gradients"] = said_of(of_shards, replay, same)

    return {
        **differing,
        "no prompt": said_of(of_shards, replay, batch_of(((0, 3), (2, 4)) if rank else ROWS[:2])),
        "positions": said_of(of_shards, changing(), moved_on(batch_of(ROWS[:2]))),
        "dropout": said_of(dropped),
        "hot": said_of(of_shards, replay, same, temperature="hot"),
        "rows": said_of(of_shards, replay, own),
        "ids": said_of(of_shards, replay, moved),
        "heads": said_of(of_shards, three, batch_of(ROWS[:2])),
        "model": said_of(of_shards, Unaware(), batch_of(ROWS[:2])),
        "twice": said_of(shard_twice),
        "forgotten": said_of(lose_the_group),
    }


def compared() -> dict[str, str]:
    """What the self-check says if ranks get the heads of the keys of others, or see the rows as one."""
    batch = batch_of(ROWS)

    def said_with(attend: Any) -> str:
        with work_rows.attending(attend):
            return said_of(of_shards, replayable(tiny()), batch)

    def crossed(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
        return packed_attention(q, k.flip(1), v, *more, **options)

    def local(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, **options: Any) -> Tensor:
        del options["group"]  # each rank attends to its own tokens alone
        return packed_attention(q, k, v, torch.tensor([0, q.shape[0]], dtype=torch.int32), q.shape[0], **options)

    attentions = {"right": packed_attention, "crossed": crossed, "merged": work_rows.merged_rows, "local": local}
    return {name: said_with(attend) for name, attend in attentions.items()}
