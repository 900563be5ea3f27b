"""What the demo works on: a tiny Qwen3 with random weights continues sums byte by byte, a batch is made of them as a
trainer makes it, and `Trainer` scores it and trains on it.

prompts     . . . 1 7 + 2 5 =       left padded to P, bytes as token ids
responses   x y 3 z eos . . .       right padded to R; the model ends a response itself, by sampling EOS
"""

from __future__ import annotations

import copy
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from maskpack.dispatch.group import endpoint
from maskpack.nesting.nest import unnest
from maskpack.nesting.response import extract_response, select_and_pad_to_response

PAD, EOS = 256, 257
PROMPT_WIDTH, RESPONSE_WIDTH = 64, 1024
_EOS_BIAS = 2.4  # about 90 tokens a response in the mean, a few of several hundred
_EPS = 1e-6
_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")
_ROWS_AT_ONCE = 8
_CLIP, _LEARNING_RATE = 0.2, 0.05


# -------------------------------------------------------------------- rollouts


@dataclass(frozen=True)
class Sum:
    """A prompt such as "17+25=", and its answer."""

    prompt: str
    answer: str
    uid: str


def sums(count: int, seed: int) -> list[Sum]:
    """`count` sums of two numbers of one to four digits."""
    rng = random.Random(seed)
    out: list[Sum] = []
    for _ in range(count):
        a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
        out.append(Sum(f"{a}+{b}=", str(a + b), str(uuid.UUID(int=rng.getrandbits(128), version=4))))
    return out


def tiny_model(seed: int) -> Any:
    """A Qwen3ForCausalLM of 35 000 float32 weights over 256 bytes, PAD and EOS; the same weights for the same seed."""
    config = Qwen3Config(
        vocab_size=EOS + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=PROMPT_WIDTH + RESPONSE_WIDTH,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config).float().eval()
    # The bias belongs to the model: what samples, what recomputes log-probs and what trains share one distribution.
    bias = torch.zeros(EOS + 1)
    bias[EOS], bias[PAD] = _EOS_BIAS, -30.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def positions(mask: Tensor) -> Tensor:
    """position_ids int64 of an attention mask: 0 on the left padding, the last position on the right padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def sample(model: Any, prompts: Tensor, seed: int, on_end: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Samples one response a row at temperature 1, with a KV cache.

    Args:
        prompts: int64 [B, P], left padded.
        on_end: told how many more rows have ended.

    Returns:
        responses int64 [B, R], padded with PAD behind EOS, and their log-probs float32 [B, R], 0 there. A response
        without EOS is R long.
    """
    rng = torch.Generator().manual_seed(seed)
    rows = prompts.shape[0]
    responses = torch.full((rows, RESPONSE_WIDTH), PAD)
    log_probs = torch.zeros(rows, RESPONSE_WIDTH)
    live = torch.arange(rows)
    mask, tokens, cache = (prompts != PAD).long(), prompts, cast(Any, DynamicCache())
    position = positions(mask)
    for step in range(RESPONSE_WIDTH):
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        scores = out.logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=rng)
        responses[live, step] = tokens[:, 0]
        log_probs[live, step] = scores.gather(1, tokens)[:, 0]
        going = (tokens[:, 0] != EOS).nonzero()[:, 0]
        on_end(live.numel() - going.numel())
        if not going.numel():
            break
        if going.numel() < live.numel():
            live, tokens, mask, position = live[going], tokens[going], mask[going], position[going]
            cache.batch_select_indices(going)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        position = position[:, -1:] + 1
    return responses, log_probs


def rollout_batch(
    model: Any, questions: Sequence[Sum], responses: int, seed: int, on_end: Callable[[int], None]
) -> TensorDict:
    """The padded batch of B = len(questions) * responses rows, with the fields of a GRPO trainer."""
    rows = [question for question in questions for _ in range(responses)]
    prompts = torch.full((len(rows), PROMPT_WIDTH), PAD)
    for row, question in enumerate(rows):
        text = torch.tensor(list(question.prompt.encode()))
        prompts[row, -text.numel() :] = text
    answers, log_probs = sample(model, prompts, seed, on_end)
    response_mask = (answers != PAD).long()
    attention_mask = torch.cat([(prompts != PAD).long(), response_mask], 1)
    scores = _rewards(rows, answers, response_mask)
    advantages = _advantages(scores.sum(1), responses)[:, None] * response_mask
    return TensorDict(
        {
            "prompts": prompts,
            "responses": answers,
            "input_ids": torch.cat([prompts, answers], 1),
            "attention_mask": attention_mask,
            "position_ids": positions(attention_mask),
            "response_mask": response_mask,
            "rollout_log_probs": log_probs,
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
            "advantages": advantages,
            "returns": advantages.clone(),
            "uid": [question.uid for question in rows],
        },
        batch_size=[len(rows)],
    )


def _rewards(rows: Sequence[Sum], responses: Tensor, mask: Tensor) -> Tensor:
    """float32 [B, R]: at the last token of each response the share of digits in it, and 1 more for a right answer."""
    scores = torch.zeros(responses.shape)
    lengths = cast(list[int], mask.sum(1).tolist())
    for row, (question, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens = cast(list[int], responses[row, :length].tolist())
        text = bytes(token for token in tokens if token < PAD)
        digits = sum(48 <= byte < 58 for byte in text) / length
        scores[row, length - 1] = digits + (question.answer.encode() in text)
    return scores


def _advantages(rewards: Tensor, group: int) -> Tensor:
    """GRPO, float32 [B]: the reward against the other responses to its prompt (arXiv 2402.03300, section 4.1.2)."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + _EPS)).flatten()


# -------------------------------------------------------------------- the worker


class Trainer:
    """One data-parallel rank: its methods take a TensorDict of rows, and behind `@endpoint` packed rows too."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._model = tiny_model(seed)
        self._span = 0.0, 0.0

    def span(self) -> tuple[float, float]:
        """When the model's work of the last call began and ended, by the clock of the machine."""
        return self._span

    @endpoint
    def log_probs(self, batch: TensorDictBase) -> TensorDict:
        """old_log_probs and entropys float32 [B, R], 0 behind each response."""
        begin = time.monotonic()
        out: dict[str, list[Tensor]] = {"old_log_probs": [], "entropys": []}
        with torch.no_grad():
            for rows in batch.select(*_MODEL_INPUTS).split(_ROWS_AT_ONCE):
                scores = _next_log_probs(self._model, rows)
                out["old_log_probs"].append(_response_log_probs(rows, scores))
                out["entropys"].append(extract_response(rows, -(scores.exp() * scores).sum(-1)))
        result = TensorDict({name: torch.cat(parts) for name, parts in out.items()}, batch_size=batch.batch_size)
        self._span = begin, time.monotonic()
        return result

    @endpoint(format="nested")
    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Two PPO steps on half of the rows each, on a copy of the model.

        Returns:
            row_loss float32 [B], grad_norm float32 [2], and weight_bits int64 [parameters]: the sum of the new weights'
            bits, for each parameter.
        """
        inputs = unnest(batch, *_MODEL_INPUTS) if batch["input_ids"].is_nested else batch.select(*_MODEL_INPUTS)
        rows = inputs.update(select_and_pad_to_response(batch, "old_log_probs", "advantages", "response_mask"))
        begin = time.monotonic()
        model = copy.deepcopy(self._model)
        optimizer: Any = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        for half in rows.split(-(-rows.shape[0] // 2)):
            losses += _accumulate(model, half)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).reshape(1))
            optimizer.step()
            optimizer.zero_grad()
        bits = [weights.detach().view(torch.int32).sum(dtype=torch.int64) for weights in model.parameters()]
        result = {"row_loss": torch.cat(losses), "grad_norm": torch.cat(norms), "weight_bits": torch.stack(bits)}
        self._span = begin, time.monotonic()
        return result


def _next_log_probs(model: Any, rows: TensorDictBase) -> Tensor:
    """Log-probs of the next token [B, S, vocabulary]."""
    names = "input_ids", "attention_mask", "position_ids"
    return model(**{name: rows[name] for name in names}, use_cache=False).logits.log_softmax(-1)


def _response_log_probs(rows: TensorDictBase, scores: Tensor) -> Tensor:
    # The last column wraps around to the first token; no response token is scored there.
    following = rows["input_ids"].roll(-1, 1)
    return extract_response(rows, scores.gather(-1, following[..., None])[..., 0])


def _accumulate(model: Any, rows: TensorDictBase) -> list[Tensor]:
    """Adds up the gradients of the clipped PPO loss, a mean over tokens (arXiv 1707.06347, eq. 7); losses by row."""
    losses: list[Tensor] = []
    tokens = rows["response_mask"].sum()
    for part in rows.split(_ROWS_AT_ONCE):
        ratio = (_response_log_probs(part, _next_log_probs(model, part)) - part["old_log_probs"]).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * part["advantages"], clipped * part["advantages"])
        row_loss = -(gain * part["response_mask"]).sum(1)
        (row_loss.sum() / tokens).backward()
        losses.append(row_loss.detach())
    return losses
