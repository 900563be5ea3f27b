"""The parts of verl's V1 trainer that need a GPU or a language model, in a few lines each: an engine, an agent loop, a
tokenizer. The workers around them are verl's own. Ray imports this module."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed
import transfer_queue as tq
from omegaconf import OmegaConf
from transformers import BatchFeature
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

EOS, IMAGE, LAYERS, EXPERTS = 1, 2, 2, 3


# -------------------------------------------------------------------- engine


class TinyEngine(BaseEngine):
    """Log-probs of six parameters and of every field that a row brings, so that a wrong row moves the result."""

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.seed = model_config.seed

    def initialize(self):
        torch.set_num_threads(1)
        drawn = torch.randn(6, generator=torch.Generator().manual_seed(self.seed))
        self.weights = torch.nn.Parameter(drawn * 0.3)
        self.optimizer = torch.optim.SGD([self.weights], lr=0.05)

    def features(self, data):
        """[tokens, 6], from jagged ids, positions and routed experts, and from the images of each row."""
        ids = data["input_ids"]
        lengths = ids.offsets().diff()
        columns = [torch.ones(ids.values().shape), ids.values().float().sin()]
        positions = data["position_ids"].values().float()
        columns.append((positions if positions.dim() == 1 else positions.sum(0)).cos())
        experts = data["routed_experts"].values().float().sum((1, 2)) if "routed_experts" in data else torch.zeros(1)
        columns.append((experts * 0.1).expand(ids.values().shape))
        images = [item.get("pixel_values", torch.zeros(1)).sum() for item in tu.get(data, "multi_modal_inputs")]
        columns.append(torch.stack(images).float().repeat_interleave(lengths).cos())
        columns.append(data["input_ids"].values().float() / 100 * data["temperature"])
        return torch.stack(columns, dim=1)

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        tokens = data["loss_mask"].sum()
        torch.distributed.all_reduce(tokens)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=self.get_data_parallel_group())
        outputs = []
        for micro_batch in micro_batches:
            offsets = micro_batch["input_ids"].offsets()
            scores = self.features(micro_batch) @ self.weights
            jagged = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
            model_output = {"log_probs": jagged(-torch.nn.functional.softplus(scores))}
            if tu.get(micro_batch, "calculate_entropy", False):
                model_output["entropy"] = jagged(torch.nn.functional.softplus(scores * 0.5))
            loss, metrics = torch.tensor(1.0), {}
            if loss_function is not None:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
            if not forward_only:
                loss.backward()
            detached = {name: value.detach() for name, value in model_output.items()}
            outputs.append({"model_output": detached, "loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def optimizer_step(self):
        torch.distributed.all_reduce(self.weights.grad)
        self.optimizer.step()
        return self.weights.grad.norm().item()

    def lr_scheduler_step(self):
        return 0.05

    def train_mode(self, **options):
        return nullcontext()

    eval_mode = train_mode

    def get_data_parallel_size(self):
        return torch.distributed.get_world_size()

    def get_data_parallel_rank(self):
        return torch.distributed.get_rank()

    def get_data_parallel_group(self):
        return torch.distributed.group.WORLD

    def is_mp_src_rank_with_outputs(self):
        return True

    def save_checkpoint(self, local_path, *args):
        pass

    load_checkpoint = save_checkpoint


EngineRegistry.register(model_type="language_model", backend="tiny", device="cpu")(TinyEngine)


class Cpu(PlatformCUDA):
    """A platform without an accelerator, which verl has not; counts of memory are 0 as long as CUDA is not used."""

    device_name = "cpu"


class TinyTraining(TrainingWorker):
    """verl's TrainingWorker around a TinyEngine."""

    def __init__(self, seed):
        set_platform(Cpu())
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method="env://")
        engine = SimpleNamespace(
            strategy="tiny",
            forward_only=False,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=160,
            infer_max_token_len_per_gpu=160,
            micro_batch_size_per_gpu=None,
            infer_micro_batch_size_per_gpu=None,
        )
        parts = dict.fromkeys(["optimizer_config", "checkpoint_config", "profiler_config"])
        model = OmegaConf.create({"seed": seed})
        super().__init__(
            SimpleNamespace(model_type="language_model", model_config=model, engine_config=engine, **parts)
        )
        self.flops_counter = SimpleNamespace(estimate_flops=lambda tokens, *_, **__: (float(sum(tokens)), 1000.0))


class TinyActor(ActorRolloutRefWorker):
    """verl's ActorRolloutRefWorker around two of them, an actor and a reference."""

    def __init__(self):
        Worker.__init__(self)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank, config=None))
        self.role, self.enable_routing_replay = "actor_rollout_ref", False
        self.ref, self.actor = TinyTraining(1), TinyTraining(2)
        for name, part in (("ref", self.ref), ("actor", self.actor)):
            self.set_dispatch_collect(mesh_name=name, **part.get_dispatch_collect())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(self, config):
        """Weights and loss as at the start of a training."""
        self.ref.reset()
        self.actor.reset()
        self.actor.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self):
        return self.actor.engine.weights.detach()


# -------------------------------------------------------------------- agent loop


class Tokenizer:
    eos_token_id = EOS
    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=True):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return " ".join(str(token) for token in ids if token > EOS or not skip_special_tokens)


class Processor:
    """An image processor with M-RoPE: four numbers of pixels for each image."""

    image_token_id = IMAGE

    def __call__(self, text, images, **options):
        if not images:
            return BatchFeature({})
        return BatchFeature(
            {
                "pixel_values": torch.stack([image + torch.arange(4) / 7 for image in images]),
                "image_grid_thw": torch.tensor([[1, 2, 2]] * len(images)),
            }
        )

    def get_rope_index(self, input_ids, attention_mask, image_grid_thw=None, video_grid_thw=None):
        text = torch.arange(input_ids.shape[1])
        at_image = input_ids[0] == IMAGE
        return torch.stack([text, text - at_image.cumsum(0), text + at_image.cumsum(0)])[:, None], None


class TinyLoop:
    """Prompts, responses and rewards by arithmetic from the number of the prompt and of the session."""

    def __init__(self, trainer_config, **options):
        pass

    async def run(self, sampling_params, *, index, session_id, raw_prompt, **kwargs):
        index = int(index)
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
        fields["routed_experts"] = (experts % 16).numpy()
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=answer,
            response_mask=[int(place % 4 != 2) for place in range(len(answer))],
            response_logprobs=logs,
            multi_modal_data={"images": images} if images else {},
            num_turns=2 + turn,
            metrics=AgentLoopMetrics(generate_sequences=0.5, tool_calls=0.25 * turn),
            extra_fields=extra,
            **fields,
        )


_agent_loop_registry["tiny"] = {"_target_": "verl_v1_workers.TinyLoop"}


class TinyAgentLoop(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker with TinyLoop in it. Prompts and sessions take turns: keys are listed in the order of arrival."""

    def __init__(self, config, *clients):
        self.begin(config)
        self.reward_loop_worker_handles, self.distillation_enabled = None, False
        self.tokenizer, self.mm_processor_kwargs, self.tools = Tokenizer(), {}, []
        self.llm_client = self.hf_model_type = self.dataset_cls = None
        self.background_tasks, self.prompt_turn, self.session_turn = set(), asyncio.Lock(), asyncio.Lock()
        tq.init()

    def begin(self, config):
        self.config, self.processor = config, Processor()

    async def _run_prompt(self, *args, **kwargs):
        async with self.prompt_turn:
            await super()._run_prompt(*args, **kwargs)

    async def _run_agent_loop(self, *args, **kwargs):
        async with self.session_turn:
            await super()._run_agent_loop(*args, **kwargs)
