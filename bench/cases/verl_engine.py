"""verl's FSDP2 engine and replay on the same micro-batches, on the CPU. Needs verl; one process.

    verl                  forward_step of its engine with use_remove_padding, and the backward pass
    verl, padded          the same without
    replay                response_log_probs over the module that the engine has wrapped, and the backward pass

All run the micro-batches that verl cuts, with its loss function in the place of a trainer's: the sum over the response
tokens, of log-probs and, where they are computed, of entropies. Gradients are summed where they stay. Before anything
is timed, all must be verl's numbers. The model is small, in float32, and attends by sdpa in verl; its output layer has
the share of the weights that it has in Qwen3-0.6B. Times are those of the processor, in one thread, because other
processes may hold this one up for as long as it works.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from bench.harness.measure import NotExact, interleaved, progress, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.workloads.models import TINY, Shape, log_normal_lengths, padded_batch
from maskpack.adapters.transformers import replayable
from maskpack.replay import response_log_probs


class Cpu(PlatformCUDA):
    """A platform without an accelerator, which verl does not have: a name, a device, no memory to report."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False, mem_get_info=lambda: (0, 0), memory_allocated=lambda: 0, memory_reserved=lambda: 0
    )

    def current_device(self) -> Any:
        return "cpu"


platform_manager.set_platform(Cpu())  # before the engine is imported, which reads the name of the device

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # engines whose packages are not installed
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import prepare_micro_batches
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

EXACT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
VERL, REPLAY, PADDED = "verl", "replay", "verl, padded"
_TEMPERATURE = 0.7
_TOLERANCE = 5e-5  # nats, in float32


def engine_of(model: Any) -> Any:
    """verl's engine with a checkpoint of the model, by its own `initialize`."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        own = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"})
        config = FSDPEngineConfig(strategy="fsdp2", mixed_precision=EXACT)
        optimizer = FSDPOptimizerConfig(lr=0.01, total_training_steps=1)
        made = FSDPEngineWithLMHead(own, config, optimizer, CheckpointConfig())
        made.initialize()
    return made


@contextmanager
def _alone() -> Iterator[None]:
    """A group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Sizes:
    """Of the model, the batch, of which `fill` is real, and its micro-batches."""

    shape: Shape
    rows: int
    widths: tuple[int, int]
    fill: float
    token_budget: int


_SIZES = Sizes(Shape(256, 4, 4, 2, 64, 768, vocabulary=4096), 8, (256, 512), 0.25, 1024)


@case(
    "verl-engine",
    help="log-probs and gradients by verl's FSDP2 engine, and by replay",
    on="cpu",
    rows=None,
    tiny={"sizes": Sizes(TINY, 4, (8, 12), 0.5, 24)},
)
def run(rounds: int, *, sizes: Sizes = _SIZES) -> RowGroups:
    """Raises NotExact if numbers differ."""
    with _alone(), torch_threads(1):
        stage = _Stage.of(sizes)
        yield stage.described()
        for entropy in (False, True):
            yield stage.timed(entropy, rounds)


@dataclass(frozen=True)
class _Stage:
    """The engine, replay of its module, and the micro-batches."""

    engine: Any
    replay: Any
    parts: list[TensorDict]
    shape: Shape

    @classmethod
    def of(cls, sizes: Sizes) -> _Stage:
        shape = sizes.shape
        model = shape.model(torch.device("cpu"), torch.float32)
        with torch.no_grad():  # distributions that are not flat
            for weight in model.parameters():
                weight.mul_(3 if weight.dim() > 1 else 1)
        engine = engine_of(model)
        lengths = log_normal_lengths(sizes.rows, sizes.widths, sizes.fill)
        batch = padded_batch(*lengths, sizes.widths, shape.vocabulary, group=16)
        batch["response_mask"] = batch["attention_mask"][:, sizes.widths[0] :].clone()
        data = left_right_2_no_padding(batch)
        tu.assign_non_tensor(data, max_token_len_per_gpu=sizes.token_budget, temperature=_TEMPERATURE)
        parts = prepare_micro_batches(data)[0]
        engine.module.train()
        return cls(engine, replayable(engine.module), parts, shape)

    def described(self) -> list[Row]:
        case = "verl-engine"
        tokens = [part["input_ids"].values().shape[0] for part in self.parts]
        responses = sum(int(part["response_mask"].sum()) for part in self.parts)
        return [
            Row(case, "micro-batches", len(self.parts), "bins"),
            Row(case, "tokens, of all of which verl takes logits", sum(tokens), "tokens"),
            Row(case, "response tokens, of which replay takes logits", responses, "tokens"),
            Row(case, "logits of the largest micro-batch, float32", 4 * max(tokens) * self.shape.vocabulary, "bytes"),
        ]

    def timed(self, entropy: bool, rounds: int) -> list[Row]:
        case = f"verl-engine, {'with entropy' if entropy else 'log-probs alone'}"
        progress(case)
        ways: dict[str, Callable[[TensorDict], tuple[Tensor, ...]]] = {
            REPLAY: lambda part: self._by_replay(part, entropy),
            VERL: lambda part: self._by_verl(part, entropy, use_remove_padding=True),
            PADDED: lambda part: self._by_verl(part, entropy, use_remove_padding=False),
        }
        self._check(case, ways)
        works = {name: (lambda way=way: self._forward_backward(way)) for name, way in ways.items()}
        ms = interleaved(works, rounds, time.process_time)
        return times(case, ms, [(name, REPLAY, None) for name in (VERL, PADDED)])

    def _by_verl(self, part: TensorDict, entropy: bool, **options: Any) -> tuple[Tensor, ...]:
        """[B, R] of each."""
        self.replay.release()
        seen: list[Tensor] = []

        def loss_function(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            names = ("log_probs", "entropy")[: 1 + entropy]
            seen.extend(no_padding_2_padding(model_output[name], data) for name in names)
            return torch.stack([one.sum() for one in seen]).sum(), {}

        part = part.copy()
        tu.assign_non_tensor(part, calculate_entropy=entropy, use_fused_kernels=False, **options)
        self.engine.forward_step(part, loss_function, forward_only=False)
        return tuple(seen)

    def _by_replay(self, part: TensorDict, entropy: bool) -> tuple[Tensor, ...]:
        """[response tokens] of each."""
        out: Any = response_log_probs(self.replay, part, temperature=_TEMPERATURE, entropy=entropy, self_check=False)
        return tuple(one.values() for one in (out if entropy else (out,)))

    def _check(self, case: str, ways: Mapping[str, Callable[[TensorDict], tuple[Tensor, ...]]]) -> None:
        for part in self.parts:
            real = part["response_mask"].bool()
            found = {name: way(part) for name, way in ways.items()}
            for name, seen in found.items():
                for one, truth in zip(seen, found[VERL], strict=True):
                    off = float(((one if one.dim() == 1 else one[real]) - truth[real]).abs().max().detach())
                    if not off <= _TOLERANCE:
                        raise NotExact(f"{case}: {name} is {off:.2g} off {VERL}; expected at most {_TOLERANCE}.")

    def _forward_backward(self, way: Callable[[TensorDict], tuple[Tensor, ...]]) -> None:
        for part in self.parts:
            torch.stack([one.sum() for one in way(part)]).sum().backward()
        self.engine.module.zero_grad(set_to_none=True)
