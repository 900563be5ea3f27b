"""GRPO twice from one seed, and the curves of both: padded, as it is usually written, and packed from end to end.

    sums "7+5+9="  -->  sample 8 responses each  -->  padded batch [64, 12 + 20]  -->  2 optimizer updates
                                                         |
      Padded   micro-batches of 8 rows, logits at every position, losses [b, R]
      Packed   compress -> WorkerGroup -> plan -> replay -> losses on nested rows -> gradients of ranks, added up

    python examples/grpo.py                      writes tests/golden/grpo.json; minutes on two cores
    python examples/grpo.py --share-prefixes     runs Packed with shared prefixes against that record; writes nothing

Both paths share the sampler, the batch and the optimizer, and nothing else. Each samples from the weights that it has
trained itself: from noise that a step's number seeds, so equal weights give equal tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from grpo_losses import kl_losses, policy_losses, weighted_sum
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from maskpack.adapters.transformers import replayable
from maskpack.dispatch import WorkerGroup, endpoint
from maskpack.planning import PrefixTree
from maskpack.planning.ranks import RankPlans
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs
from maskpack.views import BatchView

STEPS, UPDATES = 60, 2
QUESTIONS, SAMPLES = 8, 8
ROWS = QUESTIONS * SAMPLES
CLIP_LOW, CLIP_HIGH, KL = 0.2, 0.28, 0.02
LEARNING_RATE, LARGEST_NORM = 5e-4, 1.0
MODE = "token-mean"

ROOT = Path(__file__).parents[1]
GOLDEN, START = ROOT / "tests/golden/grpo.json", ROOT / "tests/golden/grpo_start.npy"

# -------------------------------------------------------------------- the task

SIGNS = "_$0123456789+="
PAD, EOS = 0, 1
PROMPT, RESPONSE = 12, 20  # widths
RIGHT, ENDED = 1.0, 0.125  # their sums are exact, so a group of equal rewards has no advantages at all
POOL = 16  # questions that the run asks again and again
MIN_SHARED = 1  # prompts have 4 to 8 tokens


def encoded(text: str) -> list[int]:
    return [SIGNS.index(sign) for sign in text]


def question(rng: random.Random) -> list[int]:
    """Two to four numbers to be added."""
    return [rng.randrange(10) for _ in range(rng.choice([2, 3, 3, 4]))]


def prompt_of(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers)) + "="


def reward(numbers: Sequence[int], response: Sequence[int]) -> float:
    """A reward for a response that ends, and another for the right sum after its last "="."""
    if EOS not in response:
        return 0.0
    text = "".join(SIGNS[token] for token in response[: response.index(EOS)])
    return ENDED + RIGHT * (text.split("=")[-1] == str(sum(numbers)))


# -------------------------------------------------------------------- the model


def tiny_model() -> Any:
    """A Qwen3ForCausalLM of 76 000 float32 weights."""
    config = Qwen3Config(
        vocab_size=len(SIGNS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=PROMPT + RESPONSE,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config).eval()
    rng = np.random.default_rng(0)  # torch draws other numbers on other processors
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(
                torch.from_numpy(rng.normal(0, 0.05, weights.shape) if weights.dim() > 1 else np.ones(weights.shape))
            )
    return model


def weights_of(model: Any) -> np.ndarray:
    """All weights of a model, one after the other: float32 [parameters]."""
    return torch.cat([weights.detach().flatten() for weights in model.parameters()]).numpy()


def load(model: Any, flat: np.ndarray) -> Any:
    with torch.no_grad():
        for weights, part in zip(model.parameters(), parts(model, flat), strict=True):
            weights.copy_(part)
    return model


def parts(model: Any, flat: np.ndarray) -> Iterator[Tensor]:
    """Views of a flat vector [parameters] in the shapes of the weights of a model."""
    sizes = [weights.numel() for weights in model.parameters()]
    for weights, part in zip(model.parameters(), torch.tensor(flat).split(sizes), strict=True):
        yield part.view_as(weights)


# -------------------------------------------------------------------- rollouts


@torch.no_grad()
def sample(model: Any, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Responses int64 [B, R] at temperature 1, PAD behind EOS, and which of their tokens are real, bool [B, R].

    A token is the largest of its logits plus Gumbel noise of the seed: logits that are off by float noise give the same
    one, unless two of these sums are as good as equal.
    """
    rng = torch.Generator().manual_seed(seed)
    uniform = torch.rand(RESPONSE, prompts.shape[0], len(SIGNS), generator=rng, dtype=torch.float64)
    noise = -(-uniform.clamp(1e-300).log()).log()
    ids, mask = prompts, (prompts != PAD).long()
    going = torch.ones(prompts.shape[0], dtype=torch.bool)
    for place in range(RESPONSE):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False, logits_to_keep=1
        ).logits[:, -1]
        token = (logits.double() + noise[place]).argmax(-1).where(going, PAD)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, going[:, None].long()], 1)
        going = going & (token != EOS)
        if not going.any():
            break
    missing = PROMPT + RESPONSE - ids.shape[1]
    ids, mask = (torch.nn.functional.pad(x, (0, missing)) for x in (ids, mask))
    return ids[:, PROMPT:], mask[:, PROMPT:].bool()


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def rollouts(model: Any, step: int) -> tuple[TensorDict, float]:
    """The padded batch of a step, and its mean reward."""
    rng = random.Random(10_000 + step)
    pool = [question(random.Random(place)) for place in range(POOL)]
    asked = [numbers for numbers in rng.sample(pool, QUESTIONS) for _ in range(SAMPLES)]
    prompts = torch.full((ROWS, PROMPT), PAD)
    for row, numbers in enumerate(asked):
        text = torch.tensor(encoded(prompt_of(numbers)))
        prompts[row, -len(text) :] = text
    responses, real = sample(model, prompts, step)
    rewards = torch.tensor([reward(numbers, row) for numbers, row in zip(asked, responses.tolist(), strict=True)])
    mask = torch.cat([prompts != PAD, real], 1).long()
    groups = rewards.view(QUESTIONS, SAMPLES)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    batch = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": positions(mask),
            "response_mask": real.long(),
            "advantages": advantages.expand(-1, RESPONSE).where(real, 0),
        },
        batch_size=[ROWS],
    )
    return batch, float(rewards.mean())


# -------------------------------------------------------------------- padded


class Padded:
    """The usual code: rows at full width, micro-batches by count, log-probs of the vocabulary at every position."""

    rows_at_once = 8

    def __init__(self, start: np.ndarray) -> None:
        self._reference = load(tiny_model(), start)

    def begin(self, model: Any, batch: TensorDict) -> None:
        """Takes the batch of a step and adds log-probs of policy and reference, which stay fixed during it."""
        with torch.no_grad():
            split = batch.split(self.rows_at_once)
            old = torch.cat([self._log_probs(model, rows) for rows in split])
            ref = torch.cat([self._log_probs(self._reference, rows) for rows in split])
        self._batch = batch.clone(False).update({"old_log_probs": old, "ref_log_prob": ref})

    def accumulate(self, model: Any, rows: slice) -> float:
        """Adds the gradient of the loss of some rows to the gradients of the model; returns the loss."""
        update, total = self._batch[rows], 0.0
        tokens = update["response_mask"].sum()  # of the whole update
        for part in update.split(self.rows_at_once):
            loss = self._loss(self._log_probs(model, part), part) / tokens
            loss.backward()
            total += loss.item()
        return total

    @staticmethod
    def _log_probs(model: Any, rows: TensorDict) -> Tensor:
        """Log-probs of the response tokens [rows, R]."""
        names = "input_ids", "attention_mask", "position_ids"
        logits = model(**{name: rows[name] for name in names}, use_cache=False).logits
        scores = logits[:, :-1].log_softmax(-1).gather(-1, rows["input_ids"][:, 1:, None])[..., 0]
        return scores[:, -RESPONSE:]

    @staticmethod
    def _loss(log_probs: Tensor, rows: TensorDict) -> Tensor:
        """The policy loss and the KL penalty, summed over the response tokens."""
        ratio = (log_probs - rows["old_log_probs"]).exp()
        gain = rows["advantages"]
        policy = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        log_ratio = rows["ref_log_prob"] - log_probs
        kl = log_ratio.exp() - 1 - log_ratio
        return ((policy + KL * kl) * rows["response_mask"]).sum()


# -------------------------------------------------------------------- packed


class Worker:
    """A data-parallel rank. It keeps nothing from call to call but the reference."""

    def __init__(self, start: np.ndarray, share_prefixes: bool) -> None:
        torch.set_num_threads(1)
        self._options = ReplayOptions(share_prefixes=share_prefixes, min_shared=MIN_SHARED)
        self._policy = replayable(tiny_model())
        self._reference = replayable(load(tiny_model(), start))

    @endpoint(format="nested", micro_batches=True)
    def log_probs(self, batch: TensorDict, weights: np.ndarray) -> TensorDict:
        load(self._policy.model, weights)
        out = TensorDict({}, batch_size=batch.batch_size)
        with torch.no_grad():
            out["old_log_probs"] = response_log_probs(self._policy, batch, options=self._options)
            out["ref_log_prob"] = response_log_probs(self._reference, batch, options=self._options)
        return out

    @endpoint(format="nested")
    def gradient(self, batch: TensorDict, weights: np.ndarray, plan: Any) -> tuple[float, np.ndarray]:
        """The rank's share of the loss, and its gradient, float32 [parameters]."""
        model, total = load(self._policy.model, weights), 0.0
        model.zero_grad()
        for part, share in zip(plan.apply(batch), plan.loss_weights(MODE, gradients="sum"), strict=True):
            log_probs = response_log_probs(self._policy, part, options=self._options)
            losses = policy_losses(
                log_probs, part["old_log_probs"], part["advantages"], clip_low=CLIP_LOW, clip_high=CLIP_HIGH
            )
            losses = losses + KL * kl_losses(log_probs, part["ref_log_prob"])
            loss = weighted_sum(losses, part["response_mask"], share)
            loss.backward()
            total += loss.item()
        return total, torch.cat([weights.grad.flatten() for weights in model.parameters()]).numpy()


class Packed:
    """maskpack from end to end: rows travel packed, old log-probs come back packed, nothing is padded on the ranks.

    With `share_prefixes`, tokens that begin several rows of a micro-batch are computed once.

    Attributes:
        tokens, shared_tokens: of the updates so far, the valid tokens and those that were not computed.
    """

    token_budget = 128

    def __init__(self, start: np.ndarray, ranks: int = 2, share_prefixes: bool = False) -> None:
        self._group = WorkerGroup.launch(Worker, ranks, start, share_prefixes, num_cpus=ranks, pad_token_id=PAD)
        self._shares = share_prefixes
        self.tokens = self.shared_tokens = 0

    def begin(self, model: Any, batch: TensorDict) -> None:
        """As Padded.begin. The log-probs stay where they were computed; the driver knows their places."""
        rows = self._group.put(batch)
        self._tree = prefix_tree(batch, options=ReplayOptions(min_shared=MIN_SHARED)) if self._shares else None
        plan = self._plan(rows, self._tree)
        log_probs = self._group.call("log_probs", rows, weights_of(model), plan=plan, format="view")
        self._rows = rows.with_fields(log_probs)
        self._loss_tokens = batch["response_mask"].sum(1)

    def _plan(self, rows: BatchView, tree: PrefixTree | None, **options: Any) -> RankPlans:
        return self._group.plan(rows, self.token_budget, tree=tree, **options)

    def accumulate(self, model: Any, rows: slice) -> float:
        """As Padded.accumulate: the ranks' gradients are added up here."""
        update = self._rows[rows]
        tree = None if self._tree is None else self._tree.take(rows)
        plan = self._plan(update, tree, loss_tokens=self._loss_tokens[rows])
        self.tokens += int(plan.metrics()["plan/tokens"])
        self.shared_tokens += int(plan.metrics().get("plan/shared_tokens", 0))
        shares = self._group.call("gradient", update, weights_of(model), plan=plan)
        for _, gradient in shares:
            for weights, part in zip(model.parameters(), parts(model, gradient), strict=True):
                weights.grad = part if weights.grad is None else weights.grad + part
        return sum(loss for loss, _ in shares)


# -------------------------------------------------------------------- the run


@dataclass
class Curve:
    """The curves of a run.

    Attributes:
        rewards: of each step, the mean over its samples.
        losses, norms: of each update, and of its gradient before it is clipped; a list for each step.
        tokens: of each step, the CRC-32 of its responses.
    """

    rewards: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def train(path: Padded | Packed, start: np.ndarray, steps: int = STEPS) -> Curve:
    """GRPO from some weights."""
    model, curve = load(tiny_model(), start), Curve()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for step in range(steps):
        batch, mean = rollouts(model, step)
        curve.rewards.append(mean)
        curve.tokens.append(zlib.crc32(batch["responses"].numpy().tobytes()))
        path.begin(model, batch)
        losses, norms = [], []
        for update in range(UPDATES):
            optimizer.zero_grad()
            losses.append(path.accumulate(model, slice(update * ROWS // UPDATES, (update + 1) * ROWS // UPDATES)))
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).item())
            optimizer.step()
        curve.losses.append(losses)
        curve.norms.append(norms)
    return curve


def starting_weights() -> np.ndarray:
    """float32 [parameters], as the recorded runs began: trained on demonstrations, a tenth of whose sums were wrong."""
    return np.load(START).astype(np.float32)


def recorded() -> dict[str, Curve]:
    """The curves of `padded` and `maskpack` that were written last."""
    curves = json.loads(GOLDEN.read_text())
    return {name: Curve(**curves[name]) for name in ("padded", "maskpack")}


def compared(padded: Curve, packed: Curve) -> tuple[float, int]:
    """The largest difference of their losses, and the number of steps in which the tokens are the same."""
    same = sum(a == b for a, b in zip(padded.tokens, packed.tokens, strict=True))
    return float(np.abs(np.array(padded.losses) - np.array(packed.losses)).max()), same


def timed(name: str, path: Padded | Packed, start: np.ndarray) -> Curve:
    """The curve of a path, whose time and rewards are printed."""
    begun = time.perf_counter()
    curve = train(path, start)
    tenths = [f"{np.mean(part):.2f}" for part in np.array_split(curve.rewards, 6)]
    print(f"{name}: {time.perf_counter() - begun:.0f} s, rewards {' '.join(tenths)}")
    return curve


def share_prefixes() -> None:
    """Runs Packed with shared prefixes, and prints how far it is off the recorded run of Padded."""
    start, padded = starting_weights(), recorded()["padded"]
    path = Packed(start, share_prefixes=True)
    curve = timed("maskpack, shared prefixes", path, start)
    losses, same = compared(padded, curve)
    norms = float(np.abs(np.array(padded.norms) - np.array(curve.norms)).max())
    print(
        f"the same tokens as the recorded padded run in {same} of {len(curve.tokens)} steps, the same rewards in "
        f"{sum(a == b for a, b in zip(padded.rewards, curve.rewards, strict=True))}"
    )
    print(f"losses at most {losses:.1e} apart, gradient norms {norms:.1e}")
    print(f"{path.shared_tokens:,} of {path.tokens:,} tokens not computed: {path.shared_tokens / path.tokens:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs GRPO padded and packed, and writes the golden file.")
    parser.add_argument(
        "--share-prefixes", action="store_true", help="compare shared prefixes with the recorded run; write nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.share_prefixes:
        share_prefixes()
        return
    curves: dict[str, Curve] = {}
    for name, path in (("padded", Padded), ("maskpack", Packed)):
        start = starting_weights()
        curves[name] = timed(name, path(start), start)
    lines = [
        f' "{name}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in asdict(curve).items())
        + "\n }"
        for name, curve in curves.items()
    ]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    GOLDEN.write_text("{\n" + ",\n".join([f' "versions": {json.dumps(versions)}', *lines]) + "\n}\n")


if __name__ == "__main__":
    main()
