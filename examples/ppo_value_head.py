"""PPO of a policy with a value head, on rows of an agent: log-probs and values come from one packed pass.

    a row:   prompt | policy | tool | policy | tool | policy        response_mask is 1 on the policy's tokens; a tool's
                                                                     are seen, but neither scored nor trained
    rows --> one pass without gradients --> old log-probs, values --> GAE, from one token of the policy to the next
         --> one pass for each micro-batch of a plan --> log-probs, values --> clipped losses of both --> gradients

    python examples/ppo_value_head.py        a tiny Qwen3 of random weights; some seconds on one core

The rows are random: an engine and its tools would write them. In the end, the gradients of one update are compared with
those of padded rows, and their times printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import replayable
from maskpack.planning import plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_outputs

VOCABULARY, HIDDEN, PAD = 512, 128, 0
QUESTIONS, SAMPLES = 6, 4
PROMPT, RESPONSE = 96, 320  # widths
TURNS, SAID, TOLD = (2, 5), (4, 33), (16, 65)  # turns of a row; tokens of the policy and of a tool in each
STEPS, UPDATES, LEARNING_RATE = 3, 2, 1e-4
CLIP, VALUE_CLIP, VALUE_LOSS = 0.2, 0.5, 0.5
GAMMA, LAMBDA = 1.0, 0.95
PADDED_ROWS, TOKEN_BUDGET = 4, 4 * (PROMPT + RESPONSE)  # of a micro-batch
OPTIONS = ReplayOptions(scored=("response_mask",), share_prefixes=True)
SEQUENCE = ("input_ids", "attention_mask", "position_ids")
NUMBERS = ("old_log_probs", "values", "advantages", "returns")


class ActorCritic(nn.Module):
    """A policy, and a value of each of its last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
        self.policy: Any = transformers.Qwen3ForCausalLM(config)
        self.value = nn.Linear(HIDDEN, 1)


def agent_rows(seed: int) -> TensorDict:
    """A padded batch [B]; samples of a question share its prompt. The reward is the share of even tokens."""
    torch.manual_seed(seed)
    ids = torch.full((QUESTIONS * SAMPLES, PROMPT + RESPONSE), PAD)
    real, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    prompts = [torch.randint(1, VOCABULARY, (48 + 8 * question,)) for question in range(QUESTIONS)]
    for row in range(len(ids)):
        prompt, turns = prompts[row // SAMPLES], int(torch.randint(*TURNS, ()))
        lengths = torch.stack([torch.randint(*SAID, (turns,)), torch.randint(*TOLD, (turns,))], 1).flatten()[:-1]
        own = (torch.arange(len(lengths)) % 2 == 0).long().repeat_interleave(lengths)
        start, end = PROMPT - len(prompt), PROMPT + len(own)
        ids[row, start:end] = torch.cat([prompt, torch.randint(1, VOCABULARY, own.shape)])
        real[row, start:end], mask[row, PROMPT:end] = 1, own
    batch = TensorDict({"input_ids": ids, "attention_mask": real, "responses": ids[:, PROMPT:]}, batch_size=[len(ids)])
    batch["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    batch["response_mask"] = mask[:, PROMPT:]
    batch["rewards"] = ((ids % 2 == 0) & (mask != 0)).sum(1) / mask.sum(1)
    return batch


def gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R], 0 in holes of the mask; rewards [B] are those of the last tokens."""
    advantage, following = torch.zeros_like(rewards), torch.zeros_like(rewards)
    out = torch.zeros_like(values)
    for place in range(values.shape[1] - 1, -1, -1):
        on = mask[:, place] != 0
        delta = rewards + GAMMA * following - values[:, place]
        advantage = (delta + GAMMA * LAMBDA * advantage).where(on, advantage)
        out[:, place] = advantage.where(on, 0)
        following, rewards = values[:, place].where(on, following), rewards.where(~on, 0)
    return out, (out + values).where(mask != 0, 0)


def token_losses(log_probs: Tensor, values: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """The clipped losses of policy and value of each token, in the shape of the log-probs."""
    ratio, gain = (log_probs - numbers["old_log_probs"]).exp(), numbers["advantages"]
    policy = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP))
    old, returns = numbers["values"], numbers["returns"]
    near = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return policy + VALUE_LOSS / 2 * torch.maximum((values - returns).square(), (near - returns).square())


# -------------------------------------------------------------------- packed


def packed(batch: TensorDict) -> tuple[TensorDict, Any]:
    """The nested batch and its plan. Loss tokens are counted by the loss mask, as responses have holes."""
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    tree = prefix_tree(nested, options=OPTIONS)
    lengths, loss_tokens = batch["attention_mask"].sum(1), batch["response_mask"].sum(1)
    return nested, plan_micro_batches(lengths, TOKEN_BUDGET, tree=tree, loss_tokens=loss_tokens)


def prepared(model: ActorCritic, batch: TensorDict) -> TensorDict:
    """The padded batch with old log-probs, old values, advantages and returns [B, R]."""
    nested, plan = packed(batch)
    out = response_outputs(replayable(model.policy), nested, heads={"value": model.value}, plan=plan, options=OPTIONS)
    mask, old = batch["response_mask"] != 0, cast("Any", {"old_log_probs": out.log_probs, "values": out.heads["value"]})
    old = {name: jagged.to_padded_tensor(0.0, output_size=mask.shape) for name, jagged in old.items()}
    advantages, returns = gae(batch["rewards"], old["values"], mask)
    advantages = ((advantages - advantages[mask].mean()) / advantages[mask].std()).where(mask, 0)
    return batch.clone(False).update({**old, "advantages": advantages, "returns": returns})


def packed_losses(model: ActorCritic, batch: TensorDict) -> Iterator[Tensor]:
    """The loss of each micro-batch; they add up to the mean over the policy's tokens of the batch."""
    replay = replayable(model.policy)
    nested, plan = packed(batch)
    for part, weights in zip(plan.apply(nested), plan.loss_weights("token-mean"), strict=True):
        out: Any = response_outputs(replay, part, heads={"value": model.value}, options=OPTIONS)
        numbers = {name: part[name].values() for name in NUMBERS}
        losses = token_losses(out.log_probs.values(), out.heads["value"].values(), numbers)
        mask = part["response_mask"]
        of_row = torch.as_tensor(weights, dtype=losses.dtype).repeat_interleave(mask.offsets().diff())
        yield (losses * mask.values() * of_row).sum()


# -------------------------------------------------------------------- padded


def padded_losses(model: ActorCritic, batch: TensorDict, trimmed: bool = False) -> Iterator[Tensor]:
    """The same by micro-batches of padded rows; trimmed: rows sorted by length, and micro-batches cut to their longest
    prompt and response. Both run the output layer and the value head on the policy's tokens alone."""
    replayable(model.policy).release()  # attention of padded rows
    order = batch["attention_mask"].sum(1).argsort() if trimmed else torch.arange(len(batch))
    for part in batch[order].split(PADDED_ROWS):
        real = part["attention_mask"].any(0).nonzero()[:, 0]
        begin, end = (int(real[0]), int(real[-1]) + 1) if trimmed else (0, PROMPT + RESPONSE)
        given = {name: part[name][:, begin:end] for name in SEQUENCE}
        states = model.policy.model(**given, use_cache=False).last_hidden_state
        on = part["response_mask"][:, : end - PROMPT] != 0
        states = states[:, PROMPT - begin - 1 : -1][on]
        numbers = {name: part[name][:, : end - PROMPT][on] for name in (*NUMBERS, "responses")}
        scores = model.policy.lm_head(states).log_softmax(-1).gather(-1, numbers["responses"][:, None])[:, 0]
        yield token_losses(scores, model.value(states)[:, 0], numbers).sum() / batch["response_mask"].sum()


# -------------------------------------------------------------------- the run

WAYS: dict[str, Callable[[ActorCritic, TensorDict], Iterable[Tensor]]] = {
    "padded": padded_losses,
    "trimmed": partial(padded_losses, trimmed=True),
    "packed": packed_losses,
}


def backward(way: str, model: ActorCritic, batch: TensorDict) -> float:
    """The loss of an update, whose gradients are left in the model."""
    model.zero_grad()
    total = 0.0
    for loss in WAYS[way](model, batch):
        loss.backward()
        total += loss.item()
    return total


def train(model: ActorCritic) -> list[float]:
    """The loss of each update."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    seen: list[float] = []
    for step in range(STEPS):
        batch = prepared(model, agent_rows(step))
        for update in range(UPDATES):
            seen.append(backward("packed", model, batch))
            optimizer.step()
            print(f"step {step} update {update}  loss {seen[-1]:8.5f}")
    return seen


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ActorCritic()
    train(model)
    batch = prepared(model, agent_rows(STEPS))
    print(f"{int(batch['attention_mask'].sum())} of {batch['input_ids'].numel()} places are tokens")
    gradients: dict[str, list[Tensor]] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(4):  # the first round is not counted
        for way in WAYS:
            begun = time.process_time()
            backward(way, model, batch)
            times[way].append(time.process_time() - begun)
            gradients[way] = [weights.grad for weights in model.parameters() if weights.grad is not None]
    for way, own in gradients.items():
        pairs = zip(own, gradients["padded"], strict=True)
        apart = max(float((one - other).norm() / other.norm()) for one, other in pairs)
        print(f"{way:8} {sorted(times[way][1:])[1]:5.2f} s an update, gradients {apart:.0e} from those of padded rows")


if __name__ == "__main__":
    main()
