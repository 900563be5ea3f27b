"""A step of GRPO on several GPUs, by part: examples/grpo_gpus.py on rows of given lengths, beside what people run.

    padded                   rows at full width
    sorted and trimmed       micro-batches cut to their longest rows
    by hand, HEAD            packed as verl does it, with Liger's layers and a head on all tokens: flash-attn's cross
                             entropy in place, or verl's fused one
    maskpack                 rows sent packed, shared prefixes, fused layers
    ..., exact               the same, with the same bits in every packing
    ..., nothing shared      the same as the first, each prompt computed for each of its rows

Each arm has ranks of its own, one a GPU, FSDP2 with float32 weights that compute in bfloat16, and the same first
weights; all lie on the GPUs at once, and take turns. A step sends rows, takes old log-probs, updates twice and gives
the weights to a model that generates. Rows are random, in groups of a prompt; nothing is sampled here. Heads that this
machine does not have are named on stderr and have a row "missing".

Before anything is timed, old log-probs, losses and norms of the first step are compared with those of the rows packed
by hand, every arm must have trained on all response tokens, and the exact arm must have the ratio 1 at each of its
first update. Wall time on the driver, medians. Others send all fields for log-probs and again for the update, as
trainers do; bytes are those that the driver puts into the object store. Peaks are those of the fullest rank in the
timed steps, with all that its own arm holds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.local_ray import local_ray
from bench.harness.measure import NotExact, medians_of, progress, turns
from bench.harness.passes import SEVERAL, the_device
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from bench.rivals import grpo_arms
from bench.workloads.models import SMALL, TINY, Shape, log_normal_lengths, padded_batch
from examples.grpo_gpus import PAD, PARTS, Arm, Exact, Packed, Settings

BY_HAND, OURS, EXACT, UNSHARED = "by hand", "maskpack", "maskpack, exact", "maskpack, nothing shared"
_CLOSE = {"cpu": 1e-5, "cuda": 0.25}  # nats, of log-probs in float32 and in bfloat16
_NEAR = {"cpu": 1e-4, "cuda": 0.05}  # of losses and norms, relative
_PEAK = 989e12  # operations a second of a dense product in bfloat16, one H200


@dataclass(frozen=True)
class Rows:
    """Widths of prompts and responses, the real share of them (if None, prompts have the full width and responses three
    quarters of theirs or more), and the target of the time of the fastest arm by hand divided by ours."""

    widths: tuple[int, int]
    fill: float | None
    target: str | None = None

    @property
    def name(self) -> str:
        return f"{self.widths[0]:,} : {self.widths[1]:,}"


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of the rows of a step, so many a rank."""

    shape: Shape = SMALL
    rows_each: int = 64
    group: int = 8
    token_budget: int = 32_768
    batches: Mapping[str, Rows] = field(
        default_factory=lambda: {
            "prompts": Rows((2048, 512), None, ">= 2.5"),
            "responses": Rows((512, 3584), 0.25, ">= 1.05"),
        }
    )

    def batch(self, rows: Rows, ranks: int) -> TensorDict:
        count, source = self.rows_each * ranks, torch.Generator().manual_seed(0)
        if rows.fill is None:
            most = rows.widths[1]
            responses = torch.randint(-(-3 * most // 4), most + 1, (count,), generator=source)
            counts = np.full(count, rows.widths[0]), responses.numpy()
        else:
            counts = log_normal_lengths(count, rows.widths, rows.fill, self.group)
        batch = padded_batch(*counts, rows.widths, self.shape.vocabulary, self.group)
        mask, prompt = batch["attention_mask"] != 0, rows.widths[0]
        batch["input_ids"] = batch["input_ids"].where(mask, PAD)
        batch["prompts"], batch["responses"] = (part.clone() for part in batch["input_ids"].split(rows.widths, 1))
        batch["response_mask"] = mask[:, prompt:].long()
        gain = torch.randn(count, 1, generator=source)
        batch["advantages"] = gain * batch["response_mask"]
        return batch

    def settings(self, widths: tuple[int, int], rows: int, device: str) -> Settings:
        own = self.shape
        sizes = {name: getattr(own, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim")}
        return Settings(
            **sizes,
            intermediate=own.intermediate,
            vocabulary=own.vocabulary,
            prompt=widths[0],
            response=widths[1],
            questions=rows // self.group,
            samples=self.group,
            token_budget=self.token_budget,
            rows_at_once=max(1, self.token_budget // max(sum(widths), 2 * widths[1] + 2)),
            learning_rate=1e-6,
            device=device,
            gpus_each=0,
        )


@case(
    "run",
    help="a step of GRPO on several GPUs, by part, beside padding and packing by hand",
    on="gpu",
    rows=None,
    groups=("prompts", "responses"),
    tiny={"sizes": Sizes(TINY, 4, 4, 64, {"responses": Rows((12, 8), 0.6)}), "ranks": 2},
)
def run(
    rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None, ranks: int | None = None
) -> RowGroups:
    """On all GPUs. A round here is three of the command line. Raises NotExact if an arm is far from the others."""
    sizes, device, rounds = sizes or Sizes(), the_device().type, -(-rounds // SEVERAL)
    ranks = ranks or torch.cuda.device_count()
    kinds: dict[str, type[Arm]] = {"padded": grpo_arms.PaddedVarlen, "sorted and trimmed": grpo_arms.Trimmed}
    hands, missing = grpo_arms.by_hand(the_device())
    kinds |= {f"{BY_HAND}, {head}": arm for head, arm in hands.items()}
    kinds |= {OURS: Packed, EXACT: Exact, UNSHARED: grpo_arms.Unshared}
    for head, reason in missing.items():
        progress(f"missing, {head}: {reason}")
    for group in only or sizes.batches:
        rows = sizes.batches[group]
        name, batch, arms = f"run, {rows.name}, {ranks} ranks", sizes.batch(rows, ranks), dict[str, Arm]()
        settings = sizes.settings(rows.widths, len(batch), device)
        yield [Row(name, f"missing, {head}", 1, "rivals") for head in missing]
        with _all_gpus_seen(), local_ray(batch, num_cpus=ranks * len(kinds)):
            try:
                for kind, arm in kinds.items():
                    arms[kind] = arm(settings, ranks)
                for kind, arm in arms.items():
                    progress(f"{name}: {kind} starts")
                    arm.join(None)
                yield from _measured(name, arms, batch, replace(rows, target=None) if missing else rows, sizes, rounds)
            finally:
                for arm in arms.values():
                    arm.close()


@contextmanager
def _all_gpus_seen() -> Generator[None]:
    """Actors that Ray counts no GPU for see all of them."""
    name = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _measured(case: str, arms: dict[str, Arm], batch: TensorDict, rows: Rows, sizes: Sizes, rounds: int) -> RowGroups:
    tokens, responses = int(batch["attention_mask"].sum()), int(batch["response_mask"].sum())
    yield [
        Row(case, "rows", len(batch), "rows"),
        Row(case, "real tokens", tokens, "tokens"),
        Row(case, "response tokens", responses, "tokens"),
    ]
    yield _compared(case, arms, batch)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for order in turns(seconds, rounds, "s", warm=1):
        for name in order:
            arms[name].step(0, batch)
            seconds[name].append(_trained(arms[name]))
    medians = medians_of(seconds)
    parts = {name: {part: _median(arm, part, rounds) for part in PARTS[1:]} for name, arm in arms.items()}
    hands = [name for name in arms if name.startswith(BY_HAND)]
    fastest = {f"the fastest {BY_HAND}": min(medians[name] for name in hands), OURS: medians[OURS]}
    # 2 operations a weight and token forward, 4 backward: log-probs before, and the update. The head scores responses
    operations = 8 * (sizes.shape.parameters * tokens + sizes.shape.hidden * sizes.shape.vocabulary * responses)
    most = _PEAK * arms[OURS].group.num_ranks
    yield [
        *(Row(case, f"log-probs and update, {name}", 1e3 * one, "ms") for name, one in medians.items()),
        *ratios(case, fastest, [(*fastest, rows.target)]),
        *ratios(case, medians, [(other, OURS, None) for other in arms if other != OURS]),
        *(Row(case, f"{part}, {name}", 1e3 * one, "ms") for name, own in parts.items() for part, one in own.items()),
        *(Row(case, f"tokens a second, {name}", tokens / one, "tokens") for name, one in medians.items()),
        *(Row(case, f"useful operations, {name}", 100 * operations / one / most, "%") for name, one in medians.items()),
        *(Row(case, f"peak, {name}", max(arm.curve.peaks[-rounds:]), "GiB") for name, arm in arms.items()),
        *(Row(case, f"bytes sent, {name}", arm.curve.sent[-1], "bytes") for name, arm in arms.items()),
    ]


def _trained(arm: Arm) -> float:
    """Seconds of the last step for log-probs and updates."""
    return sum(arm.curve.seconds[-1][part] for part in ("old", "update"))


def _median(arm: Arm, part: str, rounds: int) -> float:
    return statistics.median(one[part] for one in arm.curve.seconds[-rounds:])


def _compared(case: str, arms: dict[str, Arm], batch: TensorDict) -> list[Row]:
    """The first step, whose weights are equal, beside that of the first arm packed by hand; and the tokens of the first
    update whose ratio is 1."""
    seen: dict[str, Tensor] = {}
    for name, arm in arms.items():
        progress(f"{case}: {name}")
        seen[name] = arm.step(0, batch)[1].double()
    base, device = next(name for name in arms if name.startswith(BY_HAND)), the_device().type
    real, out, truth = batch["response_mask"] != 0, list[Row](), arms[base].curve
    first = int(batch["response_mask"][: len(batch) // arms[base].settings.updates].sum())
    for name, old in seen.items():
        curve, off = arms[name].curve, (old - seen[base])[real]
        if not float(off.abs().max()) <= _CLOSE[device]:
            raise NotExact(f"{case}: old log-probs of {name} are {float(off.abs().max()):.2g} off those of {base}.")
        for own, other in ((curve.losses[0], truth.losses[0]), (curve.norms[0], truth.norms[0])):
            if not np.allclose(own, other, rtol=_NEAR[device], atol=1e-6):
                raise NotExact(f"{case}: {name} has losses or norms {own}; {base} has {other}.")
        count, ones = curve.first[0]
        if count != first or (name == EXACT and ones != count):
            raise NotExact(
                f"{case}: {name} has the ratio 1 at {ones} of {count} tokens of the first update, of {first}."
            )
        if name != base:
            rms = float(off.square().mean().sqrt())
            out.append(Row(case, f"rms difference of log-probs to {base}, {name}", rms, "nats"))
            out.append(Row(case, f"largest, {name}", float(off.abs().max()), "nats"))
        out.append(Row(case, f"ratio exactly 1 in the first update, {name}", 100 * ones / count, "%"))
    return out
