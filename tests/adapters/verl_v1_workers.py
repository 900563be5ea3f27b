"""The parts of `examples/verl_v1_parts.py` with all that a batch of verl's may have: values, images, routed experts,
several outputs, sessions that fail. Ray imports this module."""

from __future__ import annotations

import math

import torch
from transformers import BatchFeature
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl_v1_parts import TinyActor, TinyAgentLoop, TinyEngine, TinyTraining

IMAGE, LAYERS, EXPERTS = 2, 2, 3


class FullEngine(TinyEngine):
    """Log-probs of six weights and of every field that a row brings, so that a wrong row moves the result."""

    num_weights = 6

    def features(self, data):
        """[tokens, 6], from jagged ids, positions and routed experts, and from the images of each row."""
        ids = data["input_ids"]
        lengths = ids.offsets().diff()
        columns = [torch.ones(ids.values().shape), ids.values().float().sin()]
        positions = data["position_ids"].values().float()
        columns.append((positions if positions.dim() == 1 else positions.sum(0)).cos())
        columns.append(data["routed_experts"].values().float().sum((1, 2)) * 0.1)
        images = [item.get("pixel_values", torch.zeros(1)).sum() for item in tu.get(data, "multi_modal_inputs")]
        columns.append(torch.stack(images).float().repeat_interleave(lengths).cos())
        columns.append(data["input_ids"].values().float() / 100 * data["temperature"])
        return torch.stack(columns, dim=1)


class FullCritic(FullEngine):
    def outputs(self, data, scores):
        return {"values": scores}


EngineRegistry.register(model_type="language_model", backend="full", device="cpu")(FullEngine)
EngineRegistry.register(model_type="value_model", backend="full", device="cpu")(FullCritic)


class FullActor(TinyActor):
    """Of this module, so that a rank imports it and its engines."""


class FullTraining(TinyTraining):
    """As FullActor."""


class Processor:
    """An image processor with M-RoPE: four patches of four numbers for each image."""

    image_token_id = IMAGE

    def __call__(self, text, images, **options):
        if not images:
            return BatchFeature({})
        return BatchFeature(
            {
                "pixel_values": torch.cat([image + torch.arange(16).view(4, 4) / 7 for image in images]),
                "image_grid_thw": torch.tensor([[1, 2, 2]] * len(images)),
            }
        )

    def get_rope_index(self, input_ids, attention_mask, image_grid_thw=None, video_grid_thw=None):
        text = torch.arange(input_ids.shape[1])
        at_image = input_ids[0] == IMAGE
        return torch.stack([text, text - at_image.cumsum(0), text + at_image.cumsum(0)])[:, None], None


class FullLoop:
    """Prompts, responses and rewards by arithmetic from the number of the prompt and of the session."""

    def __init__(self, trainer_config, **options):
        self.options = trainer_config.config.tiny

    async def run(self, sampling_params, *, index, session_id, raw_prompt, **kwargs):
        index = int(index)
        if (index, session_id) in {tuple(pair) for pair in self.options.failing}:
            raise RuntimeError("This session is to fail.")
        turns = 2 if (index + session_id) % 3 == 0 else 1
        return [self.output(index, session_id, turn, turns, len(raw_prompt)) for turn in range(turns)]

    def output(self, index, session, turn, turns, messages):
        prompt = [3 + (7 * index + 3 * place + turn) % 50 for place in range(2 + (index + turn) % 4)]
        images = [float(index)] * (index % 3)
        prompt[1:1] = [IMAGE] * len(images)
        answer = [3 + (5 * index + 11 * session + place) % 60 for place in range(1 + (3 * index + 5 * session) % 9)]
        logs = [-0.1 - 0.05 * ((place + session) % 7) for place in range(len(answer))]
        logs[0] = -0.0 if index == 0 else logs[0]
        extra = {"min_global_steps": 0, "max_global_steps": 0, "turn": turn, "messages": messages}
        fields = {}
        if turn == turns - 1:
            fields["reward_score"] = math.sin(index + 2 * session)
            extra["reward_extra_info"] = {"acc": float((index + session) % 2)}
        tokens = torch.arange(len(prompt) + len(answer) - 1)
        experts = tokens[:, None, None] + torch.arange(LAYERS)[:, None] * 5 + torch.arange(EXPERTS) + index
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=answer,
            response_mask=[int(place % 4 != 2) for place in range(len(answer))],
            response_logprobs=logs,
            multi_modal_data={"images": images} if images else {},
            num_turns=2 + turn,
            metrics=AgentLoopMetrics(generate_sequences=0.5, tool_calls=0.25 * turn),
            extra_fields=extra,
            routed_experts=(experts % 16).numpy(),
            **fields,
        )


_agent_loop_registry["full"] = {"_target_": "verl_v1_workers.FullLoop"}


class FullAgentLoop(TinyAgentLoop):
    def __init__(self, config, *clients):
        super().__init__(config, *clients)
        self.processor = Processor()
