"""A small policy-gradient trainer on Ray: two actors, each with half of the rows, one optimizer step for both.

rollouts -> old log-probs of the ranks -> gradients of the ranks, added up -> the same step on every rank
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import maskpack as mp
from maskpack.dispatch import WorkerGroup, endpoint

ROWS, PROMPT, COMPLETION, PAD, VOCABULARY = 8, 6, 10, 0, 50

TAIL = ("completion_mask", "adv", "old_logp")  # as wide as the completions
REGISTRY = mp.MaskNestingRegistry(
    {
        "tokens": mp.MaskNestingSpec("sequence", mp.PAD_TOKEN_ID),
        "attn": mp.MaskNestingSpec("sequence"),
        "completion_mask": mp.MaskNestingSpec("response"),
        "adv": mp.MaskNestingSpec("response", mp.ZERO),
        "old_logp": mp.MaskNestingSpec("response", mp.ZERO),
    },
    axes={
        "sequence": mp.MaskAxis("attn"),
        "prompt": mp.MaskAxis("attn", part="head", tail=TAIL),
        "response": mp.MaskAxis("attn", part="tail", tail=TAIL),
    },
)


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def rollouts(step: int) -> TensorDict:
    """Prompts padded on the left, completions on the right."""
    rng = torch.Generator().manual_seed(step)
    prompt = torch.arange(PROMPT) >= torch.randint(PROMPT, (ROWS, 1), generator=rng)
    completion = torch.arange(COMPLETION) <= torch.randint(COMPLETION, (ROWS, 1), generator=rng)
    ours = torch.arange(COMPLETION) // 3 % 2 == 0  # the model and a tool take turns
    attn = torch.cat([prompt, completion], dim=1)
    tokens = torch.randint(1, VOCABULARY, attn.shape, generator=rng)
    adv = torch.randn(ROWS, 1, generator=rng) * torch.ones(COMPLETION)
    fields = {
        "tokens": tokens.where(attn, PAD),
        "attn": attn.long(),
        "completion_mask": (completion & ours).long(),
        "adv": adv.where(completion, 0.0),
        "sample_id": NonTensorStack(*[f"step {step} row {row}" for row in range(ROWS)]),
    }
    return TensorDict(fields, batch_size=[ROWS])


def policy_losses(logp: Tensor, old_logp: Tensor, adv: Tensor) -> Tensor:
    """The clipped policy loss of each token [rows, COMPLETION]."""
    ratio = (logp - old_logp).exp()
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))


class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = tiny_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def logp(self, batch: TensorDict) -> Tensor:
        """Log-probs of the completion tokens [rows, COMPLETION]."""
        tokens, attn = batch["tokens"], batch["attn"]
        position_ids = (attn.cumsum(1) - 1).clamp(min=0)
        logits = self.model(input_ids=tokens, attention_mask=attn, position_ids=position_ids).logits
        scores = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return scores[:, -COMPLETION:] * batch["completion_mask"]

    @endpoint
    @torch.no_grad()
    def old_logp(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"old_logp": self.logp(batch)}, batch_size=batch.batch_size)

    @endpoint(format="nested")
    def gradients(self, batch: TensorDict, tokens: int) -> tuple[float, list[Tensor]]:
        padded = mp.unnest_batch_by_mask(batch)
        logp = self.logp(padded)[padded["attn"][:, -COMPLETION:].bool()]
        losses = policy_losses(logp, batch["old_logp"].values(), batch["adv"].values())
        loss = (losses * batch["completion_mask"].values()).sum() / tokens
        return loss.item(), list(torch.autograd.grad(loss, list(self.model.parameters())))

    def step(self, gradients: list[Tensor]) -> None:
        for weights, gradient in zip(self.model.parameters(), gradients, strict=True):
            weights.grad = gradient.clone()
        self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([weights.detach().flatten() for weights in self.model.parameters()])


def added(gradients: list[list[Tensor]]) -> list[Tensor]:
    """The gradients of all ranks, added up."""
    return [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]


def train(steps: int = 3) -> tuple[list[float], Tensor]:
    """The loss of each step, and the weights after the last."""
    group = WorkerGroup.launch(Worker, 2, num_cpus=2, pad_token_id=PAD, registry=REGISTRY, strict_mask_nesting="both")
    curve: list[float] = []
    for step in range(steps):
        batch = rollouts(step)
        batch.update(group.call("old_logp", batch))
        tokens = int(batch["completion_mask"].sum())
        losses, gradients = zip(*group.call("gradients", batch, tokens), strict=True)
        group.run("step", added(gradients))
        curve.append(sum(losses))
    return curve, group.run("weights")[0]


if __name__ == "__main__":
    print(train()[0])
