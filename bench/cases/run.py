"""A step of GRPO on several GPUs, by part: examples/grpo_gpus.py on rows of given lengths, beside what people run.

    padded                       rows at full width
    sorted and trimmed           micro-batches cut to their longest rows
    packed by hand, ...          as verl packs, with Liger's layers and one of two heads
    maskpack; ..., exact         rows sent packed, shared prefixes, fused layers; the same bits in every packing

Each arm has ranks of its own, one a GPU, FSDP2 with float32 weights that compute in bfloat16, and the same first
weights; all lie on the GPUs at once, and take turns. A step sends rows, takes old log-probs, updates twice and gives
the weights to a model that generates. Rows are random, in groups of a prompt; nothing is sampled here. Old log-probs of
the first step are compared with those of the rows packed by hand before anything is timed, and the exact arm must have
the ratio 1 at every token of its first update. Wall time on the driver, medians. Bytes are those that the driver puts
into the object store, peaks those of the fullest rank with all that its own arm holds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from examples.grpo_gpus import PARTS, Arm, Exact, Packed, Settings

BY_HAND, OURS, EXACT = "packed by hand, all logits", "maskpack", "maskpack, exact"
ARMS: dict[str, type[Arm]] = {
    "padded": grpo_arms.PaddedVarlen,
    "sorted and trimmed": grpo_arms.Trimmed,
    BY_HAND: grpo_arms.ByHand,
    "packed by hand, fused head": grpo_arms.ByHandFused,
    OURS: Packed,
    EXACT: Exact,
}
_CLOSE = {"cpu": 1e-5, "cuda": 0.25}  # nats, of log-probs in float32 and in bfloat16
_PEAK = 989e12  # operations a second of a dense product in bfloat16, one H200


@dataclass(frozen=True)
class Rows:
    """Widths of prompts and responses, the real share of them (prompts at full width if None), and the target of the
    time by hand divided by ours."""

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
    rows_each: int = 32
    group: int = 8
    token_budget: int = 32_768
    rows_at_once: int = 4
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
        batch["response_mask"] = batch["attention_mask"][:, rows.widths[0] :].clone()
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
            rows_at_once=self.rows_at_once,
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
    tiny={"sizes": Sizes(TINY, 4, 4, 128, 2, {"responses": Rows((12, 8), 0.6)}), "ranks": 2},
)
def run(
    rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None, ranks: int | None = None
) -> RowGroups:
    """On all GPUs. A round here is three of the command line. Raises NotExact if the old log-probs of an arm are far
    from the others'."""
    sizes, device = sizes or Sizes(), the_device().type
    ranks = ranks or torch.cuda.device_count()
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # actors of all arms see all GPUs
    for group in only or sizes.batches:
        rows = sizes.batches[group]
        batch, arms = sizes.batch(rows, ranks), dict[str, Arm]()
        settings = sizes.settings(rows.widths, len(batch), device)
        with local_ray(batch, num_cpus=ranks * len(ARMS)):
            try:
                for name, arm in ARMS.items():
                    progress(f"{rows.name}: {name} starts")
                    arms[name] = arm(settings, ranks, None)
                yield from _measured(
                    f"run, {rows.name}, {ranks} ranks", arms, batch, rows, sizes, -(-rounds // SEVERAL)
                )
            finally:
                for arm in arms.values():
                    arm.close()


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
    # 2 operations a weight and token forward, 4 backward; log-probs before, and the update
    operations = 8 * (sizes.shape.parameters + sizes.shape.hidden * sizes.shape.vocabulary) * tokens
    ranks = next(iter(arms.values())).group.num_ranks
    yield [
        *(Row(case, f"log-probs and update, {name}", 1e3 * one, "ms") for name, one in medians.items()),
        *ratios(case, medians, [(BY_HAND, OURS, rows.target)] if {BY_HAND, OURS} <= arms.keys() else []),
        *ratios(
            case, medians, [(other, OURS, None) for other in arms if OURS in arms and other not in (OURS, BY_HAND)]
        ),
        *(Row(case, f"{part}, {name}", 1e3 * one, "ms") for name, own in parts.items() for part, one in own.items()),
        *(Row(case, f"tokens a second, {name}", tokens / one, "tokens") for name, one in medians.items()),
        *(
            Row(case, f"share of the peak of the GPUs, {name}", 100 * operations / one / ranks / _PEAK, "%")
            for name, one in medians.items()
        ),
        *(Row(case, f"peak, {name}", max(arm.curve.peaks), "GiB") for name, arm in arms.items()),
        *(Row(case, f"bytes sent, {name}", arm.curve.sent[-1], "bytes") for name, arm in arms.items()),
    ]


def _trained(arm: Arm) -> float:
    """Seconds of the last step for log-probs and updates."""
    return sum(arm.curve.seconds[-1][part] for part in ("old", "update"))


def _median(arm: Arm, part: str, rounds: int) -> float:
    return statistics.median(one[part] for one in arm.curve.seconds[-rounds:])


def _compared(case: str, arms: dict[str, Arm], batch: TensorDict) -> list[Row]:
    """The old log-probs of the first step, whose weights are equal, beside those of the first arm packed by hand, or
    the first one; and the tokens of the first update whose ratio is 1."""
    seen: dict[str, Tensor] = {}
    for name, arm in arms.items():
        progress(f"{case}: {name}")
        seen[name] = arm.step(0, batch)[1].double()
    base = BY_HAND if BY_HAND in seen else next(iter(seen))
    real, out = batch["response_mask"] != 0, list[Row]()
    for name, old in seen.items():
        off = (old - seen[base])[real]
        if not float(off.abs().max()) <= _CLOSE[the_device().type]:
            raise NotExact(f"{case}: old log-probs of {name} are {float(off.abs().max()):.2g} off those of {base}.")
        count, ones = arms[name].curve.first[0]
        if name == EXACT and ones != count:
            raise NotExact(f"{case}: {name} has the ratio 1 at {ones} of {count} tokens of the first update.")
        if name != base:
            out.append(
                Row(case, f"rms difference of log-probs to {base}, {name}", float(off.square().mean().sqrt()), "nats")
            )
        out.append(Row(case, f"ratio exactly 1 in the first update, {name}", 100 * ones / count, "%"))
    return out
