"""verl's FSDP2 engine and replay on the same micro-batches: `python -m bench verl-engine`. Needs verl; one process.

    verl                  forward_step of its engine with use_remove_padding, and the backward pass
    verl, padded          the same without
    verl, fused kernels   the same as the first, with its fused kernels in torch
    replay                response_log_probs over the module that the engine has wrapped, and the backward pass
    replay, shared        the same with share_prefixes=True

All run the micro-batches that verl cuts, with its loss function in the place of a trainer's: the sum over the response
tokens, of log-probs and, where they are computed, of entropies. Gradients are summed where they stay. Before anything
is timed, all must be verl's numbers. On the CPU the model is small, in float32, and attends by sdpa in verl; its output
layer has the share of the weights that it has in Qwen3-0.6B. On a GPU it is Qwen3-0.6B with random weights, by verl's
mixed precision, with flash-attn where it is installed. Where it is not, verl takes log-probs of logits token by token;
that loop is also timed alone. On the CPU, times are those of the processor, in one thread, because other processes may
hold this one up for as long as it works; on a GPU they are those of the wall. The peak is how far the memory of the
process rises, or of a GPU's allocations.
"""

from __future__ import annotations

import importlib.util
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
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

from bench.measure import NotExact, interleaved, peak_bytes, progress, torch_threads
from bench.replay import MODELS, Sizes, padded_batch, prompt_and_response_lengths
from bench.replay_rivals import Shape
from bench.report import Row
from maskpack.adapters.transformers import replayable
from maskpack.replay import ReplayOptions, response_log_probs


class Cpu(PlatformCUDA):
    """A platform without an accelerator, which verl does not have: a name, a device, no memory to report."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False, mem_get_info=lambda: (0, 0), memory_allocated=lambda: 0, memory_reserved=lambda: 0
    )

    def current_device(self) -> Any:
        return "cpu"


if not torch.cuda.is_available():  # before the engine is imported, which reads the name of the device
    platform_manager.set_platform(Cpu())

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # engines whose packages are not installed
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import prepare_micro_batches
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

EXACT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
VERL, REPLAY, PADDED, FUSED, SHARED = "verl", "replay", "verl, padded", "verl, fused kernels", "replay, shared"
_CPU_SHAPE = Shape(256, 4, 4, 2, 64, 768, vocabulary=4096)
_CPU_SIZES = Sizes(rows=8, prompt_width=256, response_width=512, fill=0.25, token_budget=1024)
_GPU_SIZES = Sizes(rows=64, token_budget=16_384)
_TEMPERATURE = 0.7
_TOLERANCE = 5e-5  # nats, in float32


def engine_of(
    model: Any,
    engine_class: Any = FSDPEngineWithLMHead,
    *,
    attention: str = "sdpa",
    mixed_precision: Mapping[str, str] | None = EXACT,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """verl's engine with a checkpoint of the model, by its own `initialize`. `engine` are fields of FSDPEngineConfig,
    `options` of HFModelConfig. All ranks of the group call it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        own = HFModelConfig(
            path=shared[0], load_tokenizer=False, override_config={"attn_implementation": attention}, **options
        )
        precision = None if mixed_precision is None else dict(mixed_precision)
        config = FSDPEngineConfig(**{"strategy": "fsdp2", "mixed_precision": precision, **(engine or {})})
        made = engine_class(own, config, FSDPOptimizerConfig(lr=0.01, total_training_steps=1), CheckpointConfig())
        made.initialize()
        dist.barrier()
    return made


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """A group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run(rows: int = 256, rounds: int = 9, *, shape: Shape | None = None, sizes: Sizes | None = None) -> list[Row]:
    """The rows of the report. The sizes, and so the number of rows, are those of the device. Raises NotExact if
    numbers differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape or (_CPU_SHAPE if device.type == "cpu" else MODELS["small"].shape)
    sizes = sizes or (_CPU_SIZES if device.type == "cpu" else _GPU_SIZES)
    with _alone(device), torch_threads(1):
        stage = _Stage.of(shape, sizes, device)
        report = stage.described()
        for entropy in (False, True):
            report += stage.timed(entropy, rounds)
    return report


@dataclass(frozen=True)
class _Stage:
    """Two engines, replay of the module of the first, and the micro-batches."""

    engine: Any
    fused: Any
    fused_forward: Any
    replay: Any
    parts: list[TensorDict]
    shape: Shape
    device: torch.device

    @classmethod
    def of(cls, shape: Shape, sizes: Sizes, device: torch.device) -> _Stage:
        exact = device.type == "cpu"
        flash = not exact and importlib.util.find_spec("flash_attn") is not None
        given: dict[str, Any] = {
            "attention": "flash_attention_2" if flash else "sdpa",
            "mixed_precision": EXACT if exact else None,
        }
        model = shape.model(device, torch.float32)
        if exact:
            with torch.no_grad():  # distributions that are not flat
                for weight in model.parameters():
                    weight.mul_(3 if weight.dim() > 1 else 1)
        engine = engine_of(model, **given)
        kind = type(model)
        own = kind.forward
        fused = engine_of(model, use_fused_kernels=True, fused_kernel_options={"impl_backend": "torch"}, **given)
        fused_forward, kind.forward = kind.forward, own  # verl has patched the class of both
        widths = sizes.prompt_width, sizes.response_width
        batch = padded_batch(*prompt_and_response_lengths(sizes), widths, shape.vocabulary)
        prompt = batch["prompts"].shape[1]
        for first in range(0, len(batch), 16):  # a prompt for each group
            batch["input_ids"][first : first + 16, :prompt] = batch["input_ids"][first, :prompt].clone()
        batch["response_mask"] = batch["attention_mask"][:, prompt:].clone()
        data = left_right_2_no_padding(batch)
        tu.assign_non_tensor(data, max_token_len_per_gpu=sizes.token_budget, temperature=_TEMPERATURE)
        parts = prepare_micro_batches(data)[0]
        for made in (engine, fused):
            made.module.train()
        return cls(engine, fused, fused_forward, replayable(engine.module), parts, shape, device)

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
            VERL: lambda part: self._by_verl(self.engine, part, entropy, use_remove_padding=True),
            PADDED: lambda part: self._by_verl(self.engine, part, entropy, use_remove_padding=False),
            FUSED: lambda part: self._by_verl(self.fused, part, entropy, use_remove_padding=True),
            SHARED: lambda part: self._by_replay(part, entropy, options=ReplayOptions(share_prefixes=True)),
        }
        self._check(case, ways)
        works = {name: (lambda way=way: self._forward_backward(way)) for name, way in ways.items()}
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        ms = interleaved({**works, "the loop of verl over tokens, alone": self._loop}, rounds, clock)
        peaks = {name: self._peak(works[name]) for name in ways}
        return [
            *(Row(case, name, taken, "ms") for name, taken in ms.items()),
            *(Row(case, f"{name} / {REPLAY}", ms[name] / ms[REPLAY], "x") for name in (VERL, PADDED, FUSED)),
            Row(case, f"{VERL} without that loop / {REPLAY}", (ms[VERL] - [*ms.values()][-1]) / ms[REPLAY], "x"),
            Row(case, f"{REPLAY} / {SHARED}", ms[REPLAY] / ms[SHARED], "x"),
            *(Row(case, f"peak, {name}", peak / 2**20, "MiB") for name, peak in peaks.items()),
            *(Row(case, f"peak, {name} / {REPLAY}", peaks[name] / peaks[REPLAY], "x") for name in (VERL, FUSED)),
        ]

    def _by_verl(self, engine: Any, part: TensorDict, entropy: bool, **options: Any) -> tuple[Tensor, ...]:
        """[B, R] of each."""
        self.replay.release()
        seen: list[Tensor] = []

        def loss_function(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            names = ("log_probs", "entropy")[: 1 + entropy]
            seen.extend(no_padding_2_padding(model_output[name], data) for name in names)
            return torch.stack([one.sum() for one in seen]).sum(), {}

        part, fused = part.copy(), engine is self.fused
        tu.assign_non_tensor(part, calculate_entropy=entropy, use_fused_kernels=fused, **options)
        kind = next(one for one in type(engine.module).__mro__ if one.__module__.startswith("transformers.models."))
        with mock.patch.object(kind, "forward", self.fused_forward if fused else kind.forward):
            engine.forward_step(part, loss_function, forward_only=False)
        return tuple(seen)

    def _by_replay(self, part: TensorDict, entropy: bool, **options: Any) -> tuple[Tensor, ...]:
        """[response tokens] of each."""
        dtype = self.engine._autocast_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            out: Any = response_log_probs(
                self.replay, part, temperature=_TEMPERATURE, entropy=entropy, self_check=False, **options
            )
        return tuple(one.values() for one in (out if entropy else (out,)))

    def _check(self, case: str, ways: Mapping[str, Callable[[TensorDict], tuple[Tensor, ...]]]) -> None:
        for part in self.parts:
            real = part["response_mask"].bool().to(self.device)
            found = {name: way(part) for name, way in ways.items()}
            for name, seen in found.items():
                for one, truth in zip(seen, found[VERL], strict=True):
                    off = float(((one if one.dim() == 1 else one[real]) - truth[real]).abs().max().detach())
                    if self.device.type == "cpu" and not off <= _TOLERANCE:
                        raise NotExact(f"{case}: {name} is {off:.2g} off {VERL}; expected at most {_TOLERANCE}.")

    def _forward_backward(self, way: Callable[[TensorDict], tuple[Tensor, ...]]) -> None:
        for part in self.parts:
            torch.stack([one.sum() for one in way(part)]).sum().backward()
        for made in (self.engine, self.fused):
            made.module.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _loop(self) -> None:
        """Log-probs of the logits of all tokens and their gradient, as verl takes them after its forward pass."""
        for part in self.parts:
            ids = part["input_ids"].values().to(self.device)
            logits = torch.zeros(ids.shape[0], self.shape.vocabulary, device=self.device, requires_grad=True)
            logprobs_from_logits(logits, ids).sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            return peak_bytes(work)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
