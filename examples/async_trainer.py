"""An asynchronous trainer, one step off policy: the next step is sampled while this one is trained on.

    samplers, on Ray     episodes of step k + 1, by the weights of version k   --> packed rows
    driver               RolloutLog: appends them; rows of step k, planned     <-- packed rows
    learners, on Ray     two ranks, gloo: old log-probs, two updates           --> weights of version k + 1
    driver               a checkpoint: weights, optimizer, step, the log's next row

    python examples/async_trainer.py FOLDER --steps 4        half a minute on two cores; kill it, and run it again

A row is an episode of several turns. Replay scores the tokens of the axis "response", here a loss mask with holes:

    tokens             p p p m m m t t m m t t 0 0        p prompt, m model, t tool, 0 padding
    attention_mask     1 1 1 1 1 1 1 1 1 1 1 1 0 0        axis "sequence"
    train_mask         0 0 0 1 1 1 0 0 1 1 0 0 0 0        axis "response"
    sampler_logprobs   0 0 0 x x x 0 0 x x 0 0 0 0        axis "response"

A run that is killed and started again ends with the weights, losses and rows of one that was not, bit for bit: each
row has its seed, and each step the version of the weights that sample it.
"""

from __future__ import annotations

import argparse
import random
import socket
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

import maskpack as mp
from maskpack.adapters.transformers import replayable
from maskpack.dispatch import Call, WorkerGroup, endpoint
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs
from maskpack.store import RolloutLog

SAMPLERS, LEARNERS, UPDATES = 2, 2, 2
QUESTIONS, SAMPLES, ROWS = 4, 4, 16
TOKEN_BUDGET, LEARNING_RATE, LARGEST_NORM = 192, 3e-3, 1.0
CLIP, LARGEST_WEIGHT = 0.2, 2.0  # of the ratio of new to old; of old to sampler
PAD, END, TOOL, DIGITS, VOCABULARY = 0, 1, 2, 3, 13  # the first of ten digits
TURNS, TURN = 3, 6  # turns of a row; tokens of a turn, at most

REGISTRY = mp.MaskNestingRegistry(
    {
        "tokens": mp.MaskNestingSpec("sequence", mp.PAD_TOKEN_ID),
        "attention_mask": mp.MaskNestingSpec("sequence"),
        "train_mask": mp.MaskNestingSpec("response"),
        "sampler_logprobs": mp.MaskNestingSpec("response", mp.ZERO),
        "old_logprobs": mp.MaskNestingSpec("response", mp.ZERO),
    },
    axes={"sequence": mp.MaskAxis("attention_mask"), "response": mp.MaskAxis("train_mask")},
)
STRICT: dict[str, Any] = {"registry": REGISTRY, "pad_token_id": PAD, "strict_mask_nesting": "both"}
OPTIONS = ReplayOptions(registry=REGISTRY, input_ids="tokens", share_prefixes=True)


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=PAD, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


# -------------------------------------------------------------------- rollouts


def questions(step: int) -> TensorDict:
    """What is asked in a step, each question SAMPLES times."""
    numbers = torch.tensor(random.Random(step).sample(range(64), QUESTIONS)).repeat_interleave(SAMPLES)
    return TensorDict({"question": numbers, "seed": step * ROWS + torch.arange(ROWS)}, batch_size=[ROWS])


def episode(model: Any, question: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """The fields [S] of a row, and its reward: the model is to write the last digit of the prompt in all places."""
    asked, noise, right = random.Random(question), torch.Generator().manual_seed(seed), 0
    tokens = [asked.randrange(DIGITS, VOCABULARY) for _ in range(asked.randint(20, 40))]
    target, train, logprobs = tokens[-1], [False] * len(tokens), [0.0] * len(tokens)
    for _ in range(TURNS):
        turn: list[int] = []
        while len(turn) < TURN and END not in turn:
            logits = model(input_ids=torch.tensor([tokens + turn]), use_cache=False, logits_to_keep=1).logits[0, -1]
            scores = logits.log_softmax(-1)
            turn.append(int(torch.multinomial(scores.exp(), 1, generator=noise)))
            logprobs.append(float(scores[turn[-1]]))
        answer = [TOOL, DIGITS + turn.count(target)]  # the tool tells how many tokens were right
        right += turn.count(target)
        train += [True] * len(turn) + [False] * len(answer)
        logprobs += [0.0] * len(answer)
        tokens = tokens + turn + answer
    row = {"tokens": tokens, "train_mask": train, "sampler_logprobs": logprobs, "attention_mask": [True] * len(tokens)}
    return {name: torch.tensor(values) for name, values in row.items()}, right / TURNS / TURN


class Sampler:  # stands in for an engine
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = tiny_model()

    @endpoint
    @torch.no_grad()
    def sample(self, batch: TensorDict, weights: dict[str, Tensor]) -> TensorDict:
        self.model.load_state_dict(weights)
        asked = zip(batch["question"].tolist(), batch["seed"].tolist(), strict=True)
        rows, rewards = zip(*(episode(self.model, *each) for each in asked), strict=True)
        out = batch.copy().set("rewards", torch.tensor(rewards))
        for name in rows[0]:
            out[name] = pad_sequence([row[name] for row in rows], batch_first=True)  # with 0, which is PAD
        return out


# -------------------------------------------------------------------- learners


def policy_losses(new: Tensor, old: Tensor, sampler: Tensor, advantage: Tensor) -> Tensor:
    """The clipped loss of each token, times the truncated weight of old to sampler."""
    ratio, weight = (new - old).exp(), (old - sampler).exp().clamp(max=LARGEST_WEIGHT)
    return weight * torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))


class Learner:  # a data-parallel rank with the whole model
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = tiny_model()
        self.policy = replayable(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)

    def address(self) -> str:
        with socket.create_server(("", 0)) as free:
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, rank: int, ranks: int, address: str) -> None:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)

    @endpoint(format="nested", micro_batches=True)
    @torch.no_grad()
    def old_logprobs(self, batch: TensorDict) -> TensorDict:
        log_probs = response_log_probs(self.policy, batch, options=OPTIONS)
        return TensorDict({"old_logprobs": log_probs}, batch_size=batch.batch_size)

    @endpoint(format="nested")
    def update(self, batch: TensorDict, plan: Any) -> tuple[float, float]:
        """This rank's share of the loss, and the norm of the gradient of all ranks."""
        self.optimizer.zero_grad()
        loss = self.backward(batch, plan)
        for weights in self.model.parameters():
            dist.all_reduce(weights.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        return loss, norm.item()

    def backward(self, batch: TensorDict, plan: Any) -> float:
        total = 0.0
        for part, shares in zip(plan.apply(batch), plan.loss_weights("token-mean", gradients="sum"), strict=True):
            new = response_log_probs(self.policy, part, options=OPTIONS)
            of_rows = torch.stack([torch.as_tensor(shares).float(), part["advantages"]])
            share, advantage = of_rows.repeat_interleave(new.offsets().diff(), 1)  # of tokens
            old, sampler = part["old_logprobs"].values(), part["sampler_logprobs"].values()
            loss = (share * policy_losses(new.values(), old, sampler, advantage)).sum()
            loss.backward()
            total += loss.item()
        return total

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


# -------------------------------------------------------------------- the driver


def train_step(learners: WorkerGroup, packed: mp.PackedBatch) -> dict[str, Any]:
    """Old log-probs of the rows of a step, and an update for each half of its questions."""
    rewards = mp.decompress(packed.select("rewards"))["rewards"]
    groups = rewards.view(QUESTIONS, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    rows = learners.put(packed)
    rows = learners.put(TensorDict({"advantages": advantages.flatten()}, batch_size=[ROWS]), onto=rows)
    tree = prefix_tree(packed, options=OPTIONS)  # the prompt of a group is computed once
    plan = learners.plan(rows, TOKEN_BUDGET, tree=tree)
    seen: dict[str, Any] = {"reward": rewards.mean().item(), "losses": [], "norms": []}
    seen |= {"bytes": rows.nbytes, "bytes_padded": rows.padded_nbytes}
    seen |= {name: int(plan.metrics()[f"plan/{name}"]) for name in ("tokens", "shared_tokens")}
    rows = rows.with_fields(learners.call("old_logprobs", rows, plan=plan, format="view"))
    for half in torch.arange(ROWS).chunk(UPDATES):
        own = rows.take(half)
        # the response axis is the loss mask: its lengths are the numbers of loss tokens
        plan = learners.plan(own, TOKEN_BUDGET, tree=tree.take(half), loss_tokens=own.lengths("response"))
        losses, norms = zip(*learners.call("update", own, plan=plan), strict=True)
        seen["losses"].append(sum(losses))
        seen["norms"].append(norms[0])
    return seen


def train(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What was seen in each step since the first."""
    path, log = folder / "checkpoint.pt", RolloutLog(folder / "rollouts")
    state = torch.load(path) if path.exists() else {"step": 0, "row": 0, "curve": []}
    first, curve = state["step"], state["curve"]
    if log.next_row < state["row"]:
        raise RuntimeError(f"{log.path} ends at row {log.next_row}; the checkpoint has seen {state['row']}")
    samplers = WorkerGroup.launch(Sampler, SAMPLERS, num_cpus=SAMPLERS + LEARNERS, **STRICT)
    learners = WorkerGroup.launch(Learner, LEARNERS, **STRICT)
    with log, samplers, learners:
        (address,) = learners.run("address", rank=0)
        ray.get([actor.join.remote(rank, LEARNERS, address) for rank, actor in enumerate(learners.actors)])
        if first:
            learners.run("load", state["model"], state["optimizer"])
        log.delete(log.where(version=range(first + 1, steps)))  # of weights that are not there any more
        (state,) = learners.run("state", rank=0)

        def submit(step: int) -> Call | None:
            """Begins to sample, unless the rows are there since before a kill."""
            known = log.where(step=step).size
            return None if known else samplers.submit("sample", questions(step), state["model"], format="view")

        def append(call: Call | None, step: int, version: int) -> None:
            if call is not None:
                log.append(call.result().to_packed(get=ray.get), {"step": step, "version": version})

        append(submit(first), first, first)  # only of step 0: others were sampled one step ahead
        for step in range(first, steps):
            call = submit(step + 1)  # by the weights before this step; after the last, for a run of more steps
            curve.append(train_step(learners, log[log.where(step=step)]))
            append(call, step + 1, step)
            (state,) = learners.run("state", rank=0)
            torch.save({**state, "step": step + 1, "row": log.next_row, "curve": curve}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)  # a checkpoint is there as a whole, or the one before it
            print(f"step {step}", curve[-1], flush=True)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the log and the checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    train(**vars(parser.parse_args()))
