"""verl's FSDP2 engine with replay in it. Importing this module registers the engine, so one line of configuration does:

    actor_rollout_ref.model.external_lib: maskpack.adapters.verl.engine

    micro-batch --replay_rows--> rows --response_log_probs--> jagged [B, j] on the response
                                      --on_whole_rows-------> jagged [B, j] on prompt and response, for verl's losses

Optimizer, checkpoints, weight sync, micro-batches and losses remain verl's. Needs verl 0.9.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.adapters.transformers import replayable
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs

_device: Any = importlib.import_module("verl.utils.device")
_registry: Any = importlib.import_module("verl.workers.engine.base").EngineRegistry
_Engine: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngineWithLMHead
_tu: Any = importlib.import_module("verl.utils.tensordict_utils")

_ON_RESPONSE = ("responses", "response_mask")


# verl's own engine is registered for a device and any vendor; it looks for one of this vendor first.
@_registry.register(
    model_type="language_model", backend="fsdp2", device=_device.get_device_name(), vendor=_device.get_vendor()
)
class ReplayEngine(_Engine):
    """verl's FSDP2 engine for language models, whose log-probs and entropies are computed by replay.

    Attributes:
        options: of replay, for all engines of the process. Unless they name masks to score by, it is response_mask, if
            the micro-batch has it: the output layer skips what tools wrote, whose log-probs and entropies are 0.

    Raises ReplayError where replay does not support the model, or a row does not pass the self-check.
    """

    options: ClassVar[ReplayOptions] = ReplayOptions()

    def initialize(self) -> None:
        """Loads and shards the model as verl does, and prepares it for replay."""
        super().initialize()
        self.replay = replayable(self.module)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss and the outputs of a micro-batch, as verl's engine returns them."""
        data: Any = micro_batch.to(_device.get_device_id())
        rows, entropy = replay_rows(data), bool(_tu.get_non_tensor_data(data, "calculate_entropy", False))
        names, dtype = ("log_probs", "entropy")[: 1 + entropy], self._autocast_dtype
        options = self.options
        if not options.scored and "response_mask" in rows.keys():  # noqa: SIM118
            options = replace(options, scored=("response_mask",))
        with torch.autocast(_device.get_device_name(), dtype, enabled=dtype != torch.float32):
            out = response_log_probs(
                self.replay, rows, temperature=data["temperature"], entropy=entropy, options=options
            )
            scored = dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True))
            model_output = on_whole_rows(data, rows, scored, options)
            loss, metrics = torch.ones((), device="cpu"), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output, data, dp_group=self.get_data_parallel_group())
        detached = {name: value.detach() for name, value in model_output.items()}
        return loss, {"model_output": detached, "loss": loss.item(), "metrics": metrics}


def replay_rows(data: TensorDictBase) -> TensorDictBase:
    """What replay reads of a micro-batch of verl: token ids, positions, the mask of padded rows, and the response."""
    return data.select("input_ids", "position_ids", "attention_mask", *_ON_RESPONSE, strict=False)


def on_whole_rows(
    data: TensorDictBase, rows: TensorDictBase, scored: dict[str, Tensor], options: ReplayOptions
) -> dict[str, Tensor]:
    """Values of response tokens [B, j], jagged, where verl's losses read them: on whole rows, at the token before each;
    0 elsewhere."""
    ids: Any = data["input_ids"]
    alone = replace(options, no_prompt="skip", share_prefixes=False, routed_experts=False)
    inputs = PackedInputs.of(rows, options=alone)
    zeros = torch.zeros(ids.values().shape, dtype=torch.float32, device=ids.device)
    return {
        name: torch.nested.nested_tensor_from_jagged(
            zeros.index_copy(
                0,
                inputs.predict,
                value.values() if inputs.scored is None else value.values().index_select(0, inputs.scored),
            ),
            ids.offsets(),
        )
        for name, value in scored.items()
    }
