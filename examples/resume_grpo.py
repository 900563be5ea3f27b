"""GRPO whose rollouts outlive its process: killed at any moment, it goes on, and ends with the bits of a run that was
not.

    step:  for each question, rows that the log has, or sampled ones, which are appended    FOLDER/rollouts
           rows of the step --> two updates of the policy
           weights, optimizer, the next step and the log's next row --> one file, in one rename    FOLDER/checkpoint.pt

    python examples/resume_grpo.py FOLDER --steps 8       kill it, and run it again

What was appended is there after a kill, and is not sampled again. What was trained counts once its checkpoint is there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack import decompress
from maskpack.store import RolloutLog

QUESTIONS, SAMPLES, UPDATES = 4, 8, 2
PROMPT, RESPONSE, SIGNS = 4, 12, 12
PAD, EOS, DIGITS = 0, 1, 2  # the first of ten digits
CLIP, LEARNING_RATE = 0.2, 0.01


class Policy(nn.Module):
    """Logits [B, S, SIGNS] of the next token at each place of ids [B, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIGNS, 32)
        self.cells = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, SIGNS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(ids))[0])

    def log_probs(self, rows: TensorDict) -> Tensor:
        """Log-probs of the responses [B, R]."""
        ids = torch.cat([rows["prompts"], rows["responses"]], 1)
        scores = self(ids[:, :-1])[:, PROMPT - 1 :].log_softmax(-1)
        return scores.gather(-1, rows["responses"][..., None])[..., 0].where(rows["response_mask"] != 0, 0)


# -------------------------------------------------------------------- rollouts


@torch.no_grad()
def rollout(policy: Policy, step: int, question: int) -> TensorDict:
    """Responses to a question: its largest digit is asked for, again and again. An engine would draw other tokens each
    time; the noise here has a seed, so that two runs can be compared."""
    noise = torch.Generator().manual_seed(step * QUESTIONS + question)
    prompts = torch.randint(DIGITS, SIGNS, (1, PROMPT), generator=noise).expand(SAMPLES, -1)
    ids, real = prompts, torch.ones(SAMPLES, 1, dtype=torch.bool)
    for _ in range(RESPONSE):
        token = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1, generator=noise)
        token = token.where(real[:, -1:], PAD)
        ids, real = torch.cat([ids, token], 1), torch.cat([real, real[:, -1:] & (token != EOS)], 1)
    responses, mask = ids[:, PROMPT:], real[:, :-1]
    right = (responses == prompts.amax(1, keepdim=True)) & mask
    batch = TensorDict({"prompts": prompts, "responses": responses, "response_mask": mask.long()}, batch_size=[SAMPLES])
    batch["attention_mask"] = torch.cat([torch.ones_like(prompts), mask.long()], 1)
    batch["old_log_probs"] = policy.log_probs(batch)
    batch["rewards"] = right.sum(1) / RESPONSE
    return batch


def loss_of(policy: Policy, rows: TensorDict) -> Tensor:
    rewards = rows["rewards"].view(QUESTIONS, SAMPLES)
    gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    gain, ratio = gain.view(-1, 1), (policy.log_probs(rows) - rows["old_log_probs"]).exp()
    losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP))
    return (losses * rows["response_mask"]).sum() / rows["response_mask"].sum()


# -------------------------------------------------------------------- the run


def train(folder: Path, steps: int) -> Policy:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    log = RolloutLog(folder / "rollouts", pad_token_id=PAD)
    first = load(folder, policy, optimizer, log)
    log.delete(log.where(step=range(first + 1, steps)))  # of other weights, if the checkpoint is not the newest one
    for step in range(first, steps):
        for question in range(QUESTIONS):
            known = log.where(step=step, question=question).size
            if not known:
                log.append(rollout(policy, step, question), {"step": step, "question": question})
            print(f"step {step} question {question} {'found' if known else 'sampled'}", flush=True)
        rows = decompress(log[log.where(step=step)])
        for _ in range(UPDATES):
            optimizer.zero_grad()
            loss_of(policy, rows).backward()
            optimizer.step()
        save(folder, policy, optimizer, log, step + 1)
        print(f"step {step} trained, reward {rows['rewards'].mean():.3f}", flush=True)
    log.close()
    return policy


def save(folder: Path, policy: Policy, optimizer: Any, log: RolloutLog, step: int) -> None:
    """A checkpoint is there as a whole, or the one before it."""
    state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "row": log.next_row}
    with (folder / "checkpoint.part").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "checkpoint.part", folder / "checkpoint.pt")


def load(folder: Path, policy: Policy, optimizer: Any, log: RolloutLog) -> int:
    """The step to go on with; the rows of earlier steps are below the checkpoint's next row."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    state = torch.load(folder / "checkpoint.pt")
    if log.next_row < state["row"]:
        raise RuntimeError(f"{log.path} ends at row {log.next_row}; the checkpoint was trained on {state['row']} rows")
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the log and the checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    train(args.folder, args.steps)
