"""What a rank does in the tests of verl's FSDP engine with replay in it: the same rows through the engine, and each row
alone through a plain copy of the model.

    rows --> left_right_2_no_padding --> engine.forward_backward_batch --> no_padding_2_padding --> [B, R]
         --> model(row) for each row                                                           --> [B, R]

Of verl only the platform is replaced, because it has none for the CPU: a name, a device, and no memory to report."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import rows_alone
import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from tiny_models import pair, qwen3
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

from maskpack.replay import ReplayOptions


class Cpu(PlatformCUDA):
    """A platform without an accelerator, which verl does not have: a name, a device, no memory to report."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False, mem_get_info=lambda: (0, 0), memory_allocated=lambda: 0, memory_reserved=lambda: 0
    )

    def current_device(self) -> Any:
        return "cpu"


set_platform(Cpu())  # before the engine is imported, which reads the name of the device

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # engines whose packages are not installed
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

MODULE = "maskpack.adapters.verl.engine"
PROMPT, RESPONSE = 5, 6
ROWS = ((3, 6), (5, 2), (1, 4), (4, 0), (2, 1), (5, 6), (2, 3))
"""Prompt and response tokens of each row."""
EXACT = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


# -------------------------------------------------------------------- model, engine, rows


def engine_of(model: Any, **more: Any) -> Any:
    """The engine that verl's registry has for a checkpoint of the model, by its own `initialize`. All ranks of the
    group call it. `more` is of the model's configuration."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        more |= {"load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}}
        own = HFModelConfig(path=shared[0], **more)
        config = FSDPEngineConfig(strategy="fsdp2", mixed_precision=EXACT, use_torch_compile=False)
        made = EngineRegistry.new(
            model_type="language_model",
            backend=config.strategy,
            model_config=own,
            engine_config=config,
            optimizer_config=FSDPOptimizerConfig(lr=0.01, total_training_steps=1),
            checkpoint_config=CheckpointConfig(),
        )
        made.initialize()
        dist.barrier()
    return made


def batch_of(rows: Sequence[tuple[int, int]], seed: int = 0) -> TensorDict:
    """A padded batch as verl's trainer holds it, with a weight for each log-prob and entropy of a loss."""
    batch, source = rows_alone.batch_of(rows, PROMPT, RESPONSE, seed=seed), torch.Generator().manual_seed(seed)
    answered = batch["attention_mask"][:, PROMPT:].bool()
    scored = answered & (torch.rand(answered.shape, generator=source) < 0.7)  # tools wrote the others
    weights = torch.rand(2, *answered.shape, generator=source) * scored / RESPONSE
    return batch.update({"response_mask": scored.long(), "weights": weights[0], "entropy_weights": weights[1]})


# -------------------------------------------------------------------- two ways to log-probs, entropies, gradients


Seen = dict[str, Tensor]
"""Log-probs and entropies [B, R], 0 where no token is, and the gradients of a weighted sum by parameter."""


def off(seen: Seen, truth: Seen) -> dict[str, float]:
    """The largest difference of each."""
    assert seen.keys() == truth.keys()
    return {name: float((one - truth[name]).abs().max()) for name, one in seen.items()}


def loss_of(log_probs: Tensor, entropy: Tensor | None, batch: TensorDict) -> Tensor:
    loss = (log_probs * batch["weights"]).sum()
    return loss if entropy is None else loss + (entropy * batch["entropy_weights"]).sum()


def gradients_of(module: Any) -> Seen:
    """Of all parameters, which have none afterwards."""
    out: Seen = {}
    for name, weight in module.named_parameters():
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        out[f"gradient of {name}"] = grad.clone()
        weight.grad = None
    return out


def by_engine(engine: Any, batch: TensorDict, *, temperature: float, entropy: bool, jagged: bool) -> Seen:
    """By the engine's micro-batches of 24 tokens, on the rows of this rank. `jagged`: prompts, responses and their mask
    too, as the trainer over TransferQueue holds them."""
    data = left_right_2_no_padding(batch.copy())
    if jagged:
        for name in ("prompts", "responses", "response_mask"):
            mask = batch["attention_mask"][:, slice(None, PROMPT) if name == "prompts" else slice(PROMPT, None)].bool()
            rows = [row[own] for row, own in zip(batch[name], mask, strict=True)]
            data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        del data["attention_mask"]
    options = {"calculate_entropy": entropy, "use_remove_padding": True, "return_model_output": True}
    options |= {"use_fused_kernels": False, "temperature": temperature}
    tu.assign_non_tensor(data, max_token_len_per_gpu=24, use_dynamic_bsz=True, **options)

    def loss_function(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        parts = [no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy")[: 1 + entropy]]
        return loss_of(parts[0], parts[1] if entropy else None, data), {}

    with engine.train_mode(zero_grad_on_exit=False):
        out = engine.forward_backward_batch(data, loss_function)["model_output"]
    parts = {name: no_padding_2_padding(out[name], data) for name in ("log_probs", "entropy")[: 1 + entropy]}
    return parts | gradients_of(engine.module)


def by_row(model: Any, batch: TensorDict, *, temperature: float, entropy: bool) -> Seen:
    """Each row alone; gradients are the mean over the ranks, as FSDP takes it."""
    answered, scored = batch["attention_mask"][:, PROMPT:].bool(), batch["response_mask"]
    parts = rows_alone.truth_of(model, batch, temperature)
    log_probs, entropies = (torch.zeros(scored.shape).masked_scatter(answered, part) * scored for part in parts)
    loss_of(log_probs, entropies if entropy else None, batch).backward()
    found = gradients_of(model)
    for grad in found.values():
        dist.all_reduce(grad.div_(dist.get_world_size()))
    return found | {"log_probs": log_probs.detach()} | ({"entropy": entropies.detach()} if entropy else {})


def own_rows() -> TensorDict:
    """Of this rank: all rows on one, other counts on each of two."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return batch_of(ROWS if ranks == 1 else (ROWS[:5], ROWS[3:])[rank], seed=rank)


# -------------------------------------------------------------------- what a rank does

WAYS = ((1.0, False), (0.7, True))
"""Temperatures, and whether entropies are computed."""


def replay_engine(tied: bool, shared: bool) -> dict[str, dict[str, float]]:
    """How far the engine of MODULE is off each row alone. verl's own engine is the one for this device until the
    configuration of the model names the module. `shared`: rows begin alike, and replay computes that once."""
    kind = {"model_type": "language_model", "backend": "fsdp2"}
    EngineRegistry.register(**kind, device="cpu")(FSDPEngineWithLMHead)
    assert EngineRegistry.get_engine_cls(**kind) is FSDPEngineWithLMHead
    (model, _), batch = pair(qwen3, tie_word_embeddings=tied), own_rows()
    if shared:
        prompt = slice(None, PROMPT)
        batch["prompts"].copy_((1 + batch["position_ids"][:, prompt]) * batch["attention_mask"][:, prompt])
        assert torch.equal(batch["input_ids"][:, prompt], batch["prompts"])  # a view
    made, found = engine_of(model, external_lib=MODULE), {}
    assert type(made) is EngineRegistry.get_engine_cls(**kind) is sys.modules[MODULE].ReplayEngine
    if shared:
        type(made).options = ReplayOptions(share_prefixes=True, min_shared=1)
    tokens: list[int] = []
    made.module.get_input_embeddings().register_forward_hook(lambda _, args, out: tokens.append(args[0].numel()))
    for temperature, entropy in WAYS:
        ways: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
        truth = by_row(model, batch, **ways)
        for jagged in (True, False):
            tokens.clear()
            found[f"jagged={jagged}, {ways}"] = off(by_engine(made, batch, jagged=jagged, **ways), truth)
    whole = int(batch["attention_mask"].sum())
    assert sum(tokens) < whole if shared else sum(tokens) == whole  # of the last pass, without a self-check
    return found
