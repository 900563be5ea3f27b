"""Log-probs of a mixture of experts by replay, with the experts of the batch and without.

    own        response_log_probs(replay, part)                         routers choose
    replayed   response_log_probs(replay, part, routed_experts=True)    routers take the ids of the batch

The ids are those that the routers choose, so that both compute the same; their log-probs are compared first. They are
int16 [tokens, layers, k] on the device, in a nested batch. Forward, and forward + backward with the layers
checkpointed, over micro-batches of a token budget; synchronised wall time of all rows, interleaved, medians.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen3MoeConfig

from bench.harness.measure import NotExact, progress
from bench.harness.passes import BOTH, FORWARD, SEVERAL, once, the_device, timed
from bench.harness.registry import case
from bench.harness.replay import replayed
from bench.harness.report import Row, RowGroups
from bench.workloads.models import checkpointed, log_normal_lengths, padded_batch
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, experts, replayable
from maskpack.planning import MicroBatchPlan, plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions

OWN, REPLAYED = "own", "replayed"
_APART = {torch.bfloat16: 0.3, torch.float32: 1e-5}  # nats: where two experts are as likely, rounding chooses


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    rows: int = 64
    widths: tuple[int, int] = (512, 3584)
    fill: float = 0.25
    token_budget: int = 32_768
    hidden: int = 2048
    layers: int = 12
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 64
    chosen: int = 8
    expert: int = 768
    vocabulary: int = 151_936
    dtype: torch.dtype = torch.bfloat16

    def model(self, device: torch.device) -> Any:
        """With random weights, ready to checkpoint its layers while it trains."""
        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            num_experts=self.experts, num_experts_per_tok=self.chosen, moe_intermediate_size=self.expert,
            norm_topk_prob=True, attn_implementation="sdpa",
        )  # fmt: skip
        return checkpointed(config, device, self.dtype)


@case(
    "routes",
    help="log-probs by a mixture of experts, with the experts of the batch",
    on="gpu",
    rows=None,
    tiny={"sizes": Sizes(6, (4, 12), 0.5, 24, 32, 2, 4, 2, 8, 6, 2, 16, 97, torch.float32)},
)
def run(rounds: int, *, sizes: Sizes | None = None) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if replayed log-probs differ from those of routers
    that choose the same."""
    sizes = sizes or Sizes()
    device = the_device()
    name = f"routed experts, {sizes.layers} layers of {sizes.experts} experts, {sizes.chosen} chosen"
    progress(name)
    model = sizes.model(device)
    replay = replayable(model)
    prompts, responses = log_normal_lengths(sizes.rows, sizes.widths, sizes.fill, group=1)
    padded = padded_batch(prompts, responses, sizes.widths, sizes.vocabulary)
    batch = nest_batch_by_mask(padded, pad_token_id=sizes.vocabulary - 1).to(device)
    batch["routed_experts"] = torch.nested.nested_tensor_from_jagged(
        chosen_by_routers(replay, batch, sizes), batch["input_ids"].offsets()
    )
    plan = plan_micro_batches(prompts + responses, sizes.token_budget)
    yield [
        Row(name, "rows", sizes.rows, "rows"),
        Row(name, "real tokens", int((prompts + responses).sum()), "tokens"),
        Row(name, "micro-batches", len(plan.micro_batches), "bins"),
        Row(name, "largest difference of log-probs", _apart(replay, batch, plan, sizes), "nats"),
    ]
    for step in (FORWARD, BOTH):
        runs = {
            kind: once(
                model,
                lambda kind=kind: replayed(replay, batch, plan, options=ReplayOptions(routed_experts=kind == REPLAYED)),
                step == BOTH,
            )
            for kind in (OWN, REPLAYED)
        }
        pairs = [(REPLAYED, OWN, "<= 1.05")]
        yield timed(f"{name}, {step}", runs, -(-rounds // SEVERAL), device, pairs)[0]


@torch.no_grad()
def chosen_by_routers(replay: Replayable, batch: TensorDict, sizes: Sizes) -> Tensor:
    """int16 [T, layers, k]: what the routers choose for the packed rows of the batch, one row after another."""
    inputs = PackedInputs.of(batch, device=replay.device)
    routers = experts.Routers(replay.model, replay.model.model, replay.model.config)
    parts = [replay.model.model.get_submodule(name) for name in routers.names]
    seen: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _part, _args, out: seen.append(out[2].to(torch.int16))) for part in parts
    ]
    try:
        replay.hidden(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen, 1)


@torch.no_grad()
def _apart(replay: Replayable, batch: TensorDict, plan: MicroBatchPlan, sizes: Sizes) -> float:
    pairs = zip(
        *(replayed(replay, batch, plan, options=ReplayOptions(routed_experts=on)) for on in (False, True)), strict=True
    )
    off = max(float((own - other).abs().max()) for own, other in pairs)
    if not off <= _APART[sizes.dtype]:
        raise NotExact(f"routes: log-probs are {off:.3g} apart; expected at most {_APART[sizes.dtype]}.")
    return off
