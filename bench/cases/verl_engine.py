"""verl's FSDP2 engine on rows of its V1 trainer, and the engine with replay that takes its place. Needs verl; one
process, on a GPU where there is one, else on the CPU.

    verl                  verl's engine with use_remove_padding, forward_step and the backward pass
    verl, padded          the same without, on a few rows at a time
    replay                maskpack.adapters.verl.engine, as verl's registry gives it

Rows are jagged and have no attention mask; micro-batches are those that verl cuts by a token budget, and lie in host
memory. The loss in the place of a trainer's is a sum over the response tokens, of log-probs and, where they are
computed, of entropies; verl's own `response_from_nested` reads them. Gradients are summed where they stay. Each engine
has a model of its own, with the same weights. All attend by the same kernel, torch's varlen FlashAttention 2, which
stands for flash-attn in verl's engine: bounds come from position ids, as transformers takes them. If the path has
flash-attn's cross entropy, verl takes log-probs by it, else by a loop over tokens.

Before anything is timed, log-probs and entropies of all ways are compared, and the padded tensors are counted that each
makes on the way from rows to the inputs of the model and from its outputs to the loss.

On the CPU, the model is small, in float32, with an output layer that has the share of the weights that it has in
Qwen3-0.6B, and times are those of the processor, in one thread, because other processes may hold this one up for as
long as it works. On a GPU, the model has the shape of Qwen3-0.6B, its weights are in float32 and it computes in
bfloat16, as verl trains by default; times are synchronised wall time, and peaks are above what both engines hold.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

from bench.harness.measure import NotExact, medians_of, progress, torch_threads, turns
from bench.harness.padding import PaddedBytes
from bench.harness.passes import peak_of, synchronize, the_device
from bench.harness.registry import case
from bench.harness.report import Ratio, Row, RowGroups, ratios, times
from bench.rivals.packed_rows import VARLEN
from bench.workloads.models import SMALL, TINY, Counts, Shape, log_normal_lengths


class Cpu(PlatformCUDA):
    """A platform without an accelerator, which verl does not have: a name, a device, no memory to report."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False, mem_get_info=lambda: (0, 0), memory_allocated=lambda: 0, memory_reserved=lambda: 0
    )

    def current_device(self) -> Any:
        return "cpu"


_ON_CPU = not torch.cuda.is_available()
if _ON_CPU:
    platform_manager.set_platform(Cpu())  # before the engine is imported, which reads the name of the device

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # engines whose packages are not installed
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import prepare_micro_batches
    from verl.workers.utils.padding import response_from_nested

VERL, REPLAY, PADDED = "verl", "replay", "verl, padded"
OURS = "maskpack.adapters.verl.engine"
_EXACT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
_TEMPERATURE = 0.7
_TOLERANCE = {"cpu": 5e-5, "cuda": 0.25}  # nats, in float32 and bfloat16


# -------------------------------------------------------------------- engines and rows


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """A group of this process."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def engines_of(model: Any) -> tuple[Any, Any]:
    """verl's engine and the one of OURS, each with a checkpoint of the model, by its own `initialize`."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    kind = {"model_type": "language_model", "backend": "fsdp2"}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)

        def configured(attention: str, **more: Any) -> dict[str, Any]:
            more |= {"load_tokenizer": False, "override_config": {"attn_implementation": attention}}
            return {
                "model_config": HFModelConfig(path=folder, **more),
                "engine_config": FSDPEngineConfig(strategy="fsdp2", mixed_precision=_EXACT if _ON_CPU else None),
                "optimizer_config": FSDPOptimizerConfig(lr=0.01, total_training_steps=1),
                "checkpoint_config": CheckpointConfig(),
            }

        verl = FSDPEngineWithLMHead(**configured(VARLEN))
        ours = EngineRegistry.new(**kind, **configured("sdpa", external_lib=OURS))
        if type(ours).__module__ != OURS:
            raise RuntimeError(f"verl's registry gives {type(ours).__name__}; expected the engine of {OURS}.")
        for engine in (verl, ours):
            engine.initialize()
            engine.module.train()
    return verl, ours


def v1_rows(prompts: Counts, responses: Counts, vocabulary: int, group: int) -> TensorDict:
    """Rows as the agent loop of verl's V1 trainer gives them, of random ids, in groups that share a prompt; verl's own
    `list_of_dict_to_tensordict` makes jagged fields of them."""
    source, rows = torch.Generator().manual_seed(1), list[dict[str, Tensor]]()
    for number, counts in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True)):
        prompt, response = (torch.randint(vocabulary - 1, (count,), generator=source) for count in counts)
        if number % group:
            prompt = rows[-1]["prompts"]
        fields = {"prompts": prompt, "responses": response, "response_mask": torch.ones_like(response)}
        ids = torch.cat([prompt, response])
        rows.append(fields | {"input_ids": ids, "position_ids": torch.arange(len(ids))})
    return tu.list_of_dict_to_tensordict(rows)


# -------------------------------------------------------------------- the case


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of the batch, of which `fill` would be real if it were padded. `group` rows share a prompt.
    Micro-batches have up to about `token_budget` tokens, padded ones `few` rows."""

    shape: Shape
    rows: int
    widths: tuple[int, int]
    fill: float
    token_budget: int
    group: int
    few: int


_SIZES = {
    "cpu": Sizes(Shape(256, 4, 4, 2, 64, 768, vocabulary=4096), 8, (256, 512), 0.25, 1024, group=4, few=4),
    "cuda": Sizes(SMALL, 32, (512, 3584), 0.25, 16_384, group=8, few=4),
}
GROUPS = {"log-probs": False, "entropy": True}


@case(
    "verl-engine",
    help="log-probs and gradients by verl's FSDP2 engine, and by replay, on rows of its V1 trainer",
    on="both",
    rows=None,
    groups=tuple(GROUPS),
    tiny={"sizes": Sizes(TINY, 6, (8, 12), 0.5, 40, group=2, few=2)},
)
def run(rounds: int, *, only: Sequence[str] | None = None, sizes: Sizes | None = None) -> RowGroups:
    """Raises NotExact if numbers differ."""
    device = the_device()
    with _alone(device), torch_threads(1) if device.type == "cpu" else nullcontext():
        stage = Stage.of(sizes or _SIZES[device.type], device)
        yield stage.described()
        yield stage.padded_bytes()
        for group in only or GROUPS:
            yield stage.compared(GROUPS[group])
            yield stage.timed(GROUPS[group], rounds)


@dataclass(frozen=True)
class Way:
    """A way to log-probs, and the micro-batches that it takes.

    Attributes:
        engine: verl's, or ours.
        parts: all rows, in the same order for every way.
        options: of verl, in each micro-batch.
    """

    engine: Any
    parts: list[TensorDict]
    options: Mapping[str, Any]

    def run(self, part: TensorDict, entropy: bool) -> tuple[Tensor, list[Tensor]]:
        """The loss, and log-probs (and entropies) [response tokens]."""
        names = ("log_probs", "entropy")[: 1 + entropy]
        seen: list[Tensor] = []

        def loss_function(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            seen.extend(response_from_nested(model_output[name], data["response_mask"]).values() for name in names)
            return torch.stack([one.sum() for one in seen]).sum(), {}

        part = part.copy()
        tu.assign_non_tensor(part, calculate_entropy=entropy, use_fused_kernels=False, **self.options)
        return self.engine.forward_step(part, loss_function, forward_only=False)[0], seen

    def forward_backward(self, entropy: bool) -> list[list[Tensor]]:
        """What `run` sees of each micro-batch. The gradients are in the model."""
        seen: list[list[Tensor]] = []
        for part in self.parts:
            loss, own = self.run(part, entropy)
            loss.backward()
            seen.append([one.detach() for one in own])
        return seen

    def zero_grad(self) -> None:
        self.engine.module.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Stage:
    """The engines by the ways that they go."""

    ways: Mapping[str, Way]
    device: torch.device
    sizes: Sizes

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> Stage:
        shape = sizes.shape
        model = shape.model(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        if device.type == "cpu":
            with torch.no_grad():  # distributions that are not flat
                for weight in model.parameters():
                    weight.mul_(3 if weight.dim() > 1 else 1)
        verl, ours = engines_of(model)
        rows = v1_rows(
            *log_normal_lengths(sizes.rows, sizes.widths, sizes.fill, sizes.group), shape.vocabulary, sizes.group
        )
        tu.assign_non_tensor(rows, max_token_len_per_gpu=sizes.token_budget, temperature=_TEMPERATURE)
        parts = prepare_micro_batches(rows)[0]
        few = [one for part in parts for one in _few_rows(part, sizes.few)]
        ways = {
            REPLAY: Way(ours, parts, {}),
            VERL: Way(verl, parts, {"use_remove_padding": True}),
            PADDED: Way(verl, few, {"use_remove_padding": False}),
        }
        return cls(ways, device, sizes)

    def described(self) -> list[Row]:
        case, parts = "verl-engine", self.ways[VERL].parts
        tokens = [part["input_ids"].values().shape[0] for part in parts]
        responses = sum(part["responses"].values().shape[0] for part in parts)
        logits = (4 if self.device.type == "cpu" else 2) * max(tokens) * self.sizes.shape.vocabulary
        return [
            Row(case, "rows", self.sizes.rows, "rows"),
            Row(case, "micro-batches", len(parts), "bins"),
            Row(case, "tokens, of all of which verl takes logits", sum(tokens), "tokens"),
            Row(case, "response tokens, of which replay takes logits", responses, "tokens"),
            Row(case, "logits of the largest micro-batch", logits, "bytes"),
        ]

    def padded_bytes(self) -> list[Row]:
        """Of tensors that are made outside the decoder in a forward pass over the micro-batches of several rows."""
        case, most = "verl-engine, padded tensors", {REPLAY: "<= 0"}
        return [Row(case, name, padded_bytes(way), "bytes", most.get(name)) for name, way in self.ways.items()]

    def compared(self, entropy: bool) -> list[Row]:
        """How far log-probs, entropies and gradients are off verl's with use_remove_padding."""
        case = f"verl-engine, {_said(entropy)}, off {VERL}"
        found: dict[str, tuple[Tensor, list[Tensor]]] = {}
        for name, way in self.ways.items():
            seen = way.forward_backward(entropy)
            numbers = torch.stack([torch.cat(one) for one in zip(*seen, strict=True)]).double()
            found[name] = numbers, [weight.grad.to_local().clone() for weight in way.engine.module.parameters()]
            way.zero_grad()
        truth, exact = found[VERL]
        norm = sum(float(one.square().sum()) for one in exact) ** 0.5
        rows: list[Row] = []
        for name, (numbers, gradients) in found.items():
            if name == VERL:
                continue
            off, most = (numbers - truth).abs(), _TOLERANCE[self.device.type]
            if not float(off.max()) <= most:
                raise NotExact(f"{case}: {name} is {float(off.max()):.2g} off; expected at most {most}.")
            far = sum(float((one - own).square().sum()) for one, own in zip(gradients, exact, strict=True)) ** 0.5
            rows += [
                Row(case, f"{name}, largest", float(off.max()), "nats"),
                Row(case, f"{name}, root mean square", float(off.square().mean().sqrt()), "nats"),
                Row(case, f"{name}, gradients", 100 * far / norm, "%"),
            ]
        return rows

    def timed(self, entropy: bool, rounds: int) -> list[Row]:
        """Of the forward and backward passes over all micro-batches. Padded ones run in every third round."""
        case = f"verl-engine, {_said(entropy)}"
        progress(case)

        def work_of(way: Way) -> Callable[[], None]:
            def work() -> None:
                way.forward_backward(entropy)
                way.zero_grad()

            return work

        works = {name: work_of(way) for name, way in self.ways.items()}
        peaks = {name: self._peak(work) for name, work in works.items()}  # and all have run once
        progress("; ".join(f"{name}: peak {peak:.2f} GiB" for name, peak in peaks.items()))
        pairs: list[Ratio] = [(name, REPLAY, None) for name in (VERL, PADDED)]
        ms: dict[str, list[float]] = {name: [] for name in works}
        for turn, order in enumerate(turns(ms, rounds, "ms", warm=0)):
            for name in order:
                if name == PADDED and turn % 3:
                    continue
                gc.collect()
                begin = self._clock()
                works[name]()
                ms[name].append(1e3 * (self._clock() - begin))
            progress("  " + "; ".join(f"{row.name} {row.value:.2f}" for row in ratios(case, medians_of(ms), pairs)))
        return [
            *times(case, medians_of(ms), pairs),
            *(Row(case, f"peak, {name}", peak, "GiB") for name, peak in peaks.items()),
        ]

    def _peak(self, work: Callable[[], None]) -> float:
        held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return (peak_of(work, self.device) - held) / 2**30

    def _clock(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        synchronize(self.device)
        return time.perf_counter()


def padded_bytes(way: Way) -> int:
    """Of the tensors of [rows, W, ...] elements that the forward pass makes outside the decoder, with W at least that
    of the narrowest padded field, less the token by which predictions are shifted."""
    total = 0
    decoder = way.engine.module.get_decoder()
    for part in way.parts:
        rows = part.batch_size[0]
        if rows == 1:  # nothing is padded
            continue
        width = min(int(part[name].offsets().diff().max()) for name in ("prompts", "responses")) - 1
        way.run(part, False)  # replay compares a row with the model, by a path of its own, when it meets the first ones
        with PaddedBytes(rows, width) as made, made.outside(decoder):
            way.run(part, False)
        total += made.bytes
    way.zero_grad()
    return total


def _few_rows(part: TensorDict, few: int) -> list[TensorDict]:
    count = part.batch_size[0]
    return [
        tu.index_select_tensor_dict(part, torch.arange(begin, min(begin + few, count)))
        for begin in range(0, count, few)
    ]


def _said(entropy: bool) -> str:
    return "with entropy" if entropy else "log-probs alone"
