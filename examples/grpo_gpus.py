"""GRPO on several GPUs of a node: one Ray actor a GPU, FSDP2, generation by transformers, and every step timed by part.

    driver                                     ranks, one a GPU
    questions of the step      -- sample -->   whole weights in half precision, generate()         --> responses
    rewards, advantages        -- send ---->   rows
                               -- old  ---->   log-probs of the responses, by the sharded policy
    twice, half of the rows    -- update -->   losses, gradients, AdamW                            --> loss, norm
                               -- weights ->   shards to whole weights

    python examples/grpo_gpus.py --gpus 2 --steps 300        writes grpo-gpus.json after every step
    python examples/grpo_gpus.py --tiny --steps 4            on the CPU, two actors; a minute

A run is made of three: `record` trains by the exact arm and keeps each step's rows in a log; `replay` trains every arm
on these rows, from the same weights, and compares log-probs and weights with those of the first arm; `free` lets each
arm train on what it samples itself. The arms:

    padded     rows at full width, micro-batches by count, logits of the responses
    packed     maskpack: rows are sent packed and planned by token budget, prompts of a group computed once, layers and
               head fused
    exact      the same, with the same bits in every packing: the ratio of a first update is 1 at every token

The task: sort digits. A prompt has some solved examples, 512=125 and a line end each, and a question.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import fsdp
from transformers import Qwen3Config, Qwen3ForCausalLM

import maskpack as mp
from maskpack.adapters.transformers import replayable
from maskpack.dispatch import WorkerGroup, endpoint
from maskpack.planning.ranks import RankPlans
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs
from maskpack.store import RolloutLog

SIGNS = "_$0123456789=\n"
PAD, EOS = 0, 1
CLIP_LOW, CLIP_HIGH, LARGEST_NORM = 0.2, 0.28, 1.0
PARTS = ("sample", "send", "old", "update", "weights")


@dataclass(frozen=True)
class Settings:
    """Of the model, the batch and the run.

    Attributes:
        prompt, response: widths. As many solved examples as fit are in a prompt.
        questions, samples: of a step; each question is sampled so often.
        updates: of a step, each with an equal part of the questions.
        token_budget: of a packed micro-batch, in tokens.
        rows_at_once: of a padded micro-batch, a rank.
        warm_steps: supervised steps on solved questions before the first run, a third of them wrong; at
            `warm_learning_rate`.
        gpus_each: what Ray counts for a rank. With 0, and RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 in the environment,
            ranks see all GPUs, and each takes the one of its number.
    """

    hidden: int = 2048
    layers: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 6144
    vocabulary: int = len(SIGNS)
    prompt: int = 256
    response: int = 16
    questions: int = 16
    samples: int = 8
    updates: int = 2
    token_budget: int = 32_768
    rows_at_once: int = 32
    learning_rate: float = 1e-6
    warm_learning_rate: float = 3e-4
    warm_steps: int = 150
    device: str = "cuda"
    gpus_each: int = 1

    @property
    def rows(self) -> int:
        return self.questions * self.samples

    @property
    def model(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=self.prompt + self.response,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )


TINY = Settings(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=128,
    prompt=40,
    response=8,
    questions=8,
    token_budget=512,
    rows_at_once=16,
    learning_rate=1e-4,
    warm_learning_rate=3e-3,
    device="cpu",
)

# -------------------------------------------------------------------- the task


def encoded(text: str) -> list[int]:
    return [SIGNS.index(sign) for sign in text]


def solved(rng: random.Random) -> tuple[str, str]:
    """Three to six digits, and the same sorted."""
    digits = [rng.choice("0123456789") for _ in range(rng.randrange(3, 7))]
    return "".join(digits), "".join(sorted(digits))


def question(rng: random.Random, width: int) -> tuple[list[int], list[int]]:
    """A prompt of up to `width` tokens, and its answer with the end."""
    asked, answer = solved(rng)
    text = f"{asked}="
    while len(more := "{}={}\n".format(*solved(rng))) + len(text) <= width:
        text = more + text
    return encoded(text), [*encoded(answer), EOS]


def reward(answer: Sequence[int], response: Sequence[int]) -> float:
    """The share of places that are right; each token too many counts as one more place."""
    right = sum(one == other for one, other in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


def left_padded(prompts: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])


def rows_of(prompts: Tensor, responses: Tensor, real: Tensor) -> TensorDict:
    """The padded fields of rows [B, P + R]; `real` marks the tokens of the responses."""
    mask = torch.cat([prompts != PAD, real], 1).long()
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": real.long(),
        },
        batch_size=[len(prompts)],
    )


def advantages(rewards: Tensor, samples: int) -> Tensor:
    """Rewards [B] less the mean of their group, by its deviation."""
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1)


# -------------------------------------------------------------------- a rank


@dataclass
class Update:
    """What a rank says of an update.

    Attributes:
        loss: of the whole update, the rank's share of it times the ranks.
        norm: of the gradient before it is clipped.
        tokens, ones: the rank's response tokens, and those at which the ratio is exactly 1.
    """

    loss: float = 0.0
    norm: float = 0.0
    tokens: int = 0
    ones: int = 0

    def add(self, log_probs: Tensor, old: Tensor, gain: Tensor, share: float) -> Tensor:
        """The clipped policy loss, summed over the response tokens [T] of a micro-batch and multiplied by `share`,
        which is 0 for a micro-batch that is only there so that each rank has as many."""
        ratio = (log_probs - old).exp()
        losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        loss = losses.sum() * share
        self.loss += loss.item()
        if share:
            self.tokens += old.numel()
            self.ones += int((log_probs == old).sum())
        return loss


class Rank:
    """One GPU: a shard of the policy, its optimizer, and whole weights that generate."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.half = torch.bfloat16 if settings.device == "cuda" else torch.float32
        if settings.device == "cpu":
            torch.set_num_threads(1)

    def address(self) -> str:
        """Where the ranks can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, rank: int, ranks: int, address: str, start: str | None) -> None:
        """Meets the other ranks, and shards a model of the weights of the file `start`, or random ones."""
        backend = "cpu:gloo,cuda:nccl" if self.settings.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
        self.rank, self.ranks = rank, ranks
        if self.settings.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.manual_seed(0)
        with self.device:
            policy: Any = Qwen3ForCausalLM(self.settings.model)
            engine: Any = Qwen3ForCausalLM(self.settings.model)
        self.engine = engine.to(self.half).eval()
        if start is not None:
            policy.load_state_dict(torch.load(start, mmap=True, map_location=self.device), strict=False)
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        precision = fsdp.MixedPrecisionPolicy(param_dtype=self.half, reduce_dtype=torch.float32)
        for layer in policy.model.layers:
            fsdp.fully_shard(layer, mp_policy=precision)
        self.policy: Any = fsdp.fully_shard(policy, mp_policy=precision)
        parameters: Any = self.policy.parameters()
        fused = self.settings.device == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, self.settings.learning_rate, weight_decay=0.0, fused=fused)
        self.prepare()
        self.publish()

    def prepare(self) -> None:
        """What an arm does with the sharded policy before its first step."""

    # ---------------------------------------------------------------- weights

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters, one after the other, float32."""
        for name, parameter in self.policy.named_parameters():
            yield name, parameter.detach().full_tensor()

    @torch.no_grad()
    def publish(self) -> None:
        """Gives the weights of the policy to the model that generates."""
        targets = dict(self.engine.named_parameters())
        for name, weights in self.whole():
            targets[name].copy_(weights)
        self.done()

    def save(self, path: str) -> None:
        """Writes the whole weights, by rank 0."""
        weights = {name: weights.cpu() for name, weights in self.whole()}
        if self.rank == 0:
            torch.save(weights, f"{path}.part")
            Path(f"{path}.part").replace(path)

    def done(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> float:
        """GiB since the last call."""
        if self.settings.device == "cpu":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()  # other arms may be on this GPU
        return peak

    # ---------------------------------------------------------------- rows

    @endpoint
    @torch.no_grad()
    def sample(self, batch: TensorDict, step: int) -> TensorDict:
        """Responses [b, R] at temperature 1, PAD behind EOS, and the mask of their tokens."""
        torch.manual_seed(step * self.ranks + self.rank)
        prompts = batch["prompts"].to(self.device)
        out = TensorDict({}, batch_size=batch.batch_size)
        ids = prompts.new_full((len(prompts), self.settings.response), PAD)
        if len(prompts):
            made = self.engine.generate(
                input_ids=prompts,
                attention_mask=(prompts != PAD).long(),
                max_new_tokens=self.settings.response,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )[:, prompts.shape[1] :]
            ids[:, : made.shape[1]] = made
        ended = (ids == EOS).long().cumsum(1) - (ids == EOS).long()  # ends before each token
        out["response_mask"] = (ended == 0).long()
        out["responses"] = ids * out["response_mask"]
        self.done()
        return out.cpu()

    def demonstrate(self, steps: int) -> float:
        """Supervised steps on solved questions, of which a third are wrong; the last loss."""
        own, rng = self.settings, random.Random(self.rank)
        optimizer, loss = torch.optim.AdamW(self.policy.parameters(), own.warm_learning_rate), 0.0
        for _ in range(steps):
            rows: list[list[int]] = []
            for _ in range(own.rows_at_once):
                prompt, answer = question(rng, own.prompt)
                if rng.random() < 1 / 3:
                    answer = [*rng.sample(answer[:-1], len(answer) - 1), EOS]
                rows.append([*prompt, *answer])
            ids = left_padded(rows, own.prompt + own.response).to(self.device)
            mask = (ids != PAD).long()
            logits = self.policy(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
            mean = (losses * mask[:, :-1] * mask[:, 1:]).sum() / mask[:, 1:].sum()
            mean.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
            loss = mean.item()
        return loss

    def finish(self, update: Update) -> Update:
        """The optimizer's step, after the gradients of all micro-batches."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), LARGEST_NORM)
        update.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done()
        return update


class PaddedRank(Rank):
    """The usual code: padded rows in micro-batches, with the same number of them on every rank, as FSDP needs."""

    def parts(self, batch: TensorDict) -> list[tuple[Tensor, bool]]:
        """The rows of each micro-batch, and whether they count: others make up the same number on each rank."""
        return [(rows, True) for rows in torch.arange(len(batch)).split(self.settings.rows_at_once)]

    def log_probs(self, rows: TensorDict) -> Tensor:
        """Log-probs of the response tokens of a micro-batch, one row after the other: float32 [T]."""
        names, width = ("input_ids", "attention_mask", "position_ids"), rows["responses"].shape[1]
        given = {name: rows[name] for name in names}
        logits = self.policy(**given, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
        real = rows["response_mask"] != 0
        return -torch.nn.functional.cross_entropy(logits[real].float(), rows["responses"][real], reduction="none")

    @torch.no_grad()
    def old_log_probs(self, batch: TensorDict) -> Tensor:
        """Log-probs of the responses [b, R], 0 where there is no token."""
        rows = batch.to(self.device)
        out = torch.zeros(rows["responses"].shape, device=self.device)
        for part, _ in self.parts(batch):
            part = part.to(self.device)
            own = out[part]
            own[rows["response_mask"][part] != 0] = self.log_probs(rows[part])
            out[part] = own
        self.done()
        return out.cpu()

    def update(self, batch: TensorDict, loss_tokens: int) -> Update:
        """`loss_tokens` are those of all ranks."""
        rows, seen = batch.to(self.device), Update()
        for part, counts in self.parts(batch):
            own = rows[part.to(self.device)]
            real = own["response_mask"] != 0
            share = counts * self.ranks / loss_tokens  # FSDP averages over the ranks
            seen.add(self.log_probs(own), own["old_log_probs"][real], own["advantages"][real], share).backward()
        return self.finish(seen)


class PackedRank(Rank):
    """maskpack: what arrives is packed, and nothing is padded after it."""

    options = ReplayOptions(share_prefixes=True)
    exact = False

    def prepare(self) -> None:
        self.replay = replayable(self.policy, fused=self.settings.device == "cuda", invariant=self.exact)

    @endpoint(format="nested", micro_batches=True)
    @torch.no_grad()
    def old_log_probs(self, batch: TensorDict) -> TensorDict:
        log_probs = response_log_probs(self.replay, batch.to(self.device), options=self.options)
        self.done()
        return TensorDict({"old_log_probs": log_probs}, batch_size=batch.batch_size)

    @endpoint(format="nested")
    def update(self, batch: TensorDict, loss_tokens: int, plan: Any) -> Update:
        seen = Update()
        for part, is_dummy in zip(plan.apply(batch.to(self.device)), plan.is_dummy, strict=True):
            log_probs = response_log_probs(self.replay, part, options=self.options)
            old, gain = part["old_log_probs"].values(), part["advantages"].values()
            share = 0.0 if is_dummy else self.ranks / loss_tokens
            seen.add(log_probs.values(), old, gain, share).backward()
        return self.finish(seen)


class ExactRank(PackedRank):
    exact = True


# -------------------------------------------------------------------- a run


@dataclass
class Curve:
    """Of each step: seconds by part, real tokens, mean reward, losses and norms of its updates, bytes that the driver
    put into the object store, response tokens of the first update and those of ratio 1, the peak of the fullest rank in
    GiB, and how far its old log-probs are off those of the first arm, at most."""

    seconds: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    tokens: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    losses: list[list[float]] = field(default_factory=list[list[float]])
    norms: list[list[float]] = field(default_factory=list[list[float]])
    sent: list[int] = field(default_factory=list[int])
    first: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    peaks: list[float] = field(default_factory=list[float])
    off: list[float] = field(default_factory=list[float])


class Arm:
    """The ranks of a way to train, and the driver's side of a step."""

    worker: ClassVar[type[Rank]]

    def __init__(self, settings: Settings, ranks: int) -> None:
        self.settings = settings
        gpus = {"num_gpus": settings.gpus_each} if settings.device == "cuda" else {}
        options: dict[str, Any] = {"pad_token_id": PAD, "strict_mask_nesting": "both"}
        self.group = WorkerGroup.launch(self.worker, ranks, settings, num_cpus=ranks, actor_options=gpus, **options)
        self.curve, self._inside = Curve(), 0.0

    def join(self, start: Path | None) -> None:
        """Lets the ranks meet, which begin with the weights of a file, or with random ones."""
        (address,) = self.group.run("address", rank=0)
        own = self.group.num_ranks, address, None if start is None else str(start)
        ray.get([actor.join.remote(rank, *own) for rank, actor in enumerate(self.group.actors)])

    def close(self) -> None:
        self.group.close()

    @contextmanager
    def timed(self, part: str) -> Generator[None]:
        """Adds the seconds of a block to a part, less those of parts inside it."""
        begin, before, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        taken = time.perf_counter() - begin
        self._seconds[part] += taken - self._inside
        self._inside = before + taken

    def sample(self, step: int) -> TensorDict:
        """The rows of a step, with rewards and advantages."""
        own, rng = self.settings, random.Random(1000 + step)
        asked = [question(rng, own.prompt) for _ in range(own.questions)]
        prompts = left_padded([prompt for prompt, _ in asked for _ in range(own.samples)], own.prompt)
        given = TensorDict({"prompts": prompts, "attention_mask": (prompts != PAD).long()}, batch_size=[own.rows])
        made = self.group.call("sample", given, step)
        real = made["response_mask"] != 0
        batch = rows_of(prompts, made["responses"], real)
        answers = [answer for _, answer in asked for _ in range(own.samples)]
        lengths = real.sum(1).tolist()
        responses = [row[:length] for row, length in zip(made["responses"].tolist(), lengths, strict=True)]
        batch["rewards"] = torch.tensor([reward(*pair) for pair in zip(answers, responses, strict=True)])
        batch["advantages"] = advantages(batch["rewards"], own.samples)[:, None] * real
        return batch

    def step(self, number: int, batch: TensorDict | None = None) -> tuple[TensorDict, Tensor]:
        """Trains on rows, or on those that it samples; these, and their old log-probs [B, R]."""
        self._seconds: dict[str, float] = defaultdict(float)
        curve, self._sent = self.curve, 0
        if batch is None:
            with self.timed("sample"):
                batch = self.sample(number)
        self.send(batch)
        with self.timed("old"):
            old = self.old_log_probs()
        tokens, updates = batch["response_mask"].sum(1), self.settings.updates
        seen: list[list[Update]] = []
        for rows in torch.arange(len(batch)).tensor_split(updates):
            with self.timed("update"):
                seen.append(self.update(slice(int(rows[0]), int(rows[-1]) + 1), int(tokens[rows].sum())))
        with self.timed("weights"):
            self.group.run("publish")
        curve.seconds.append(dict(self._seconds))
        curve.tokens.append(int(batch["attention_mask"].sum()))
        curve.rewards.append(float(batch["rewards"].mean()) if "rewards" in batch else 0.0)
        curve.losses.append([sum(one.loss for one in ranks) / len(ranks) for ranks in seen])
        curve.norms.append([ranks[0].norm for ranks in seen])
        curve.first.append((sum(one.tokens for one in seen[0]), sum(one.ones for one in seen[0])))
        curve.sent.append(self._sent)
        curve.peaks.append(max(self.group.run("peak")))
        return batch, old

    def send(self, batch: TensorDict) -> None:
        raise NotImplementedError

    def old_log_probs(self) -> Tensor:
        raise NotImplementedError

    def update(self, rows: slice, loss_tokens: int) -> list[Update]:
        raise NotImplementedError


class Padded(Arm):
    """Padded rows by Ray: all fields to the ranks that take log-probs, and again to those that update."""

    worker = PaddedRank

    def division(self, rows: slice) -> list[Tensor]:
        """The rows of each rank."""
        return list(torch.arange(rows.start, rows.stop).tensor_split(self.group.num_ranks))

    def _given(self, rows: slice) -> tuple[list[Tensor], list[Any]]:
        """The rows of each rank, and its part of the batch in the object store."""
        with self.timed("send"):
            division = self.division(rows)
            parts = [self._batch[own] for own in division]
            self._sent += sum(part.bytes() for part in parts)
            return division, [ray.put(part) for part in parts]

    def _called(self, method: str, parts: Sequence[Any], *more: Any) -> list[Any]:
        calls = zip(self.group.actors, parts, strict=True)
        return ray.get([getattr(actor, method).remote(part, *more) for actor, part in calls])

    def send(self, batch: TensorDict) -> None:
        self._batch = batch.copy()
        self._division, self._parts = self._given(slice(0, len(batch)))

    def old_log_probs(self) -> Tensor:
        places = torch.cat(self._division)
        old = torch.cat(self._called("old_log_probs", self._parts))[places.argsort()]
        self._batch["old_log_probs"] = old
        return old

    def update(self, rows: slice, loss_tokens: int) -> list[Update]:
        return self._called("update", self._given(rows)[1], loss_tokens)


class Packed(Arm):
    """maskpack from end to end."""

    worker: ClassVar[type[PackedRank]] = PackedRank

    def send(self, batch: TensorDict) -> None:
        with self.timed("send"):
            self._rows = self.group.put(batch)
            self._sent += self._rows.nbytes
            options = self.worker.options
            self._tree = prefix_tree(batch, options=options) if options.share_prefixes else None

    def _plan(self, rows: slice) -> RankPlans:
        with self.timed("send"):
            tree = None if self._tree is None else self._tree.take(rows)
            return self.group.plan(self._rows[rows], self.settings.token_budget, tree=tree)

    def old_log_probs(self) -> Tensor:
        whole = slice(0, self._rows.num_rows)
        seen = self.group.call("old_log_probs", self._rows, plan=self._plan(whole), format="view")
        self._rows = self._rows.with_fields(seen)
        return seen.materialize("old_log_probs", get=ray.get)["old_log_probs"]

    def update(self, rows: slice, loss_tokens: int) -> list[Update]:
        return self.group.call("update", self._rows[rows], loss_tokens, plan=self._plan(rows))


class Exact(Packed):
    worker = ExactRank


Arms = Mapping[str, type[Arm]]
ARMS: Arms = {"padded": Padded, "packed": Packed, "exact": Exact}

# -------------------------------------------------------------------- three runs


class Record:
    """The JSON of all runs, written again after each step."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.runs: dict[str, Any] = {**about, "complete": False}

    def add(self, run: str, arm: str, curve: Curve) -> None:
        rounded: Any = json.loads(json.dumps(asdict(curve)), parse_float=lambda x: float(f"{float(x):.7g}"))
        self.runs.setdefault(run, {})[arm] = rounded
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.runs) + "\n")
        part.replace(self.path)


@contextmanager
def running(arm: type[Arm], settings: Settings, gpus: int, start: Path | None) -> Generator[Arm]:
    own = arm(settings, gpus)
    try:
        own.join(start)
        yield own
    finally:
        own.close()


def told(run: str, name: str, step: int, curve: Curve) -> None:
    parts = ", ".join(f"{part} {curve.seconds[-1].get(part, 0):.2f}" for part in PARTS)
    tokens, ones = curve.first[-1]
    print(f"{run} {name} {step}: reward {curve.rewards[-1]:.3f}; s: {parts}; ratio 1 at {ones} of {tokens}", flush=True)


def warm(settings: Settings, gpus: int, start: Path) -> None:
    """Writes the weights with which all runs begin, unless they are there. Raises SystemExit for those of others."""
    about = start.with_suffix(".json")
    if start.exists():
        if json.loads(about.read_text()) != asdict(settings):
            raise SystemExit(f"{start} is of other settings; expected those of {about}. Give another --folder.")
        return
    with running(Padded, settings, gpus, None) as arm:
        losses = arm.group.run("demonstrate", settings.warm_steps)
        print(f"supervised: loss {sum(losses) / gpus:.3f} after {settings.warm_steps} steps", flush=True)
        about.write_text(json.dumps(asdict(settings)))
        arm.group.run("save", str(start))


def record(record: Record, settings: Settings, gpus: int, steps: int, start: Path, log: Path) -> None:
    """The rows that the exact arm samples while it trains, in a new log."""
    shutil.rmtree(log, ignore_errors=True)
    with running(Exact, settings, gpus, start) as arm, RolloutLog(log, pad_token_id=PAD) as rows:
        for step in range(steps):
            rows.append(arm.step(step)[0])
            told("record", "exact", step, arm.curve)
            record.add("record", "exact", arm.curve)


def replay(record: Record, arms: Arms, settings: Settings, gpus: int, steps: int, start: Path, log: Path) -> None:
    """Every arm on the recorded rows. Old log-probs are compared with the first arm's after each step, weights after
    the last."""
    folder, first, truth = start.parent, next(iter(arms)), list[Tensor]()
    for name, kind in arms.items():
        with running(kind, settings, gpus, start) as arm, RolloutLog(log, pad_token_id=PAD) as rows:
            for step in range(steps):
                batch = mp.decompress(rows[step * settings.rows : (step + 1) * settings.rows])
                _, old = arm.step(step, batch)
                truth += [old] if name == first else []
                arm.curve.off.append(float((old - truth[step]).abs().max()))
                told("replay", name, step, arm.curve)
                record.add("replay", name, arm.curve)
            arm.group.run("save", str(folder / f"{name}.pt"))
        record.runs.setdefault("weights off", {})[name] = apart(folder / f"{name}.pt", folder / f"{first}.pt", start)
        record.write()


def apart(path: Path, other: Path, start: Path) -> dict[str, float]:
    """The norm of the difference of weights, beside the norm of the weights and that of what training changed."""
    own, truth, begin = (torch.load(one, mmap=True) for one in (path, other, start))

    def norm(x: dict[str, Tensor], y: dict[str, Tensor] | None = None) -> float:
        parts = (x[name].double() - (0 if y is None else y[name].double()) for name in x)
        return sum(float(part.square().sum()) for part in parts) ** 0.5

    return {"of the weights": norm(own, truth) / norm(truth), "of their change": norm(own, truth) / norm(truth, begin)}


def free(record: Record, arms: Arms, settings: Settings, gpus: int, steps: int, start: Path | None) -> None:
    """Every arm on what it samples."""
    for name, kind in arms.items():
        with running(kind, settings, gpus, start) as arm:
            for step in range(steps):
                arm.step(step)
                told("free", name, step, arm.curve)
                record.add("free", name, arm.curve)


def main(given: Sequence[str] | None = None, arms: Arms = ARMS) -> None:
    parser = argparse.ArgumentParser(description="GRPO on several GPUs, arm after arm.")
    parser.add_argument("--gpus", type=int, default=2, help="actors, of which each has a GPU")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--runs", nargs="+", choices=("record", "replay", "free"), default=("record", "replay", "free"))
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on the CPU")
    parser.add_argument("--folder", type=Path, default=Path("grpo-gpus"), help="of weights and rows")
    parser.add_argument("--json", type=Path, default=Path("grpo-gpus.json"))
    options = parser.parse_args(given)
    settings = TINY if options.tiny else Settings()
    options.folder.mkdir(parents=True, exist_ok=True)
    start, log = options.folder / "start.pt", options.folder / "rows"
    about = {
        "settings": asdict(settings),
        "gpus": options.gpus,
        "steps": options.steps,
        "asked": [*options.runs],
        "versions": {package.__name__: package.__version__ for package in (torch, transformers, mp)},
    }
    record_of, chosen = Record(options.json, about), {name: arms[name] for name in options.arms}
    warm(settings, options.gpus, start)
    if "record" in options.runs:
        record(record_of, settings, options.gpus, options.steps, start, log)
    if "replay" in options.runs:
        replay(record_of, chosen, settings, options.gpus, options.steps, start, log)
    if "free" in options.runs:
        free(record_of, chosen, settings, options.gpus, options.steps, start)
    record_of.runs["complete"] = True
    record_of.write()


if __name__ == "__main__":
    main()
