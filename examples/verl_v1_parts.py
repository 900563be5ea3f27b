"""The parts of verl's V1 trainer that need a GPU or a language model, in a few lines each: an engine, an agent loop, a
tokenizer. The workers around them are verl's own. Ray's workers import this module; `verl_v1_cpu.py` runs it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed
import transfer_queue as tq
from omegaconf import OmegaConf
from torch.nn.functional import softplus
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

EOS = 1

# -------------------------------------------------------------------- engine


class TinyEngine(BaseEngine):
    """The log-prob of a token depends on the token, its place and three weights."""

    is_param_offload_enabled = is_optimizer_offload_enabled = False
    num_weights = 3

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config = model_config

    def initialize(self):
        torch.set_num_threads(1)
        drawn = torch.randn(self.num_weights, generator=torch.Generator().manual_seed(self.model_config.seed))
        self.weights = torch.nn.Parameter(drawn * 0.3)
        self.optimizer = torch.optim.SGD([self.weights], lr=0.05)

    def features(self, data):
        """[tokens, num_weights] of a jagged micro-batch."""
        ids, positions = data["input_ids"].values().float(), data["position_ids"].values().float()
        return torch.stack([torch.ones_like(ids), ids.sin(), positions.cos()], 1)

    def outputs(self, data, scores):
        """What verl asks of a model, [tokens] each."""
        entropy = {"entropy": softplus(scores / 2)} if tu.get(data, "calculate_entropy", False) else {}
        return {"log_probs": -softplus(scores), **entropy}

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        tokens, group = data["loss_mask"].sum(), self.get_data_parallel_group()
        torch.distributed.all_reduce(tokens)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group)
        parts = []
        for part in micro_batches:
            jagged = partial(torch.nested.nested_tensor_from_jagged, offsets=part["input_ids"].offsets())
            outputs = self.outputs(part, self.features(part) @ self.weights)
            outputs = {name: jagged(values) for name, values in outputs.items()}
            loss, metrics = torch.tensor(1.0), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=outputs, data=part, dp_group=group)
            if not forward_only:
                loss.backward()
            outputs = {name: values.detach() for name, values in outputs.items()}
            parts.append({"model_output": outputs, "loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(output_lst=parts, indices=indices, data=data)

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
    """verl's TrainingWorker around an engine of the registry."""

    def __init__(self, model_type, seed, backend="tiny"):
        set_platform(Cpu())
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method="env://")
        sizes = {"max_token_len_per_gpu": 160, "micro_batch_size_per_gpu": None}
        sizes |= {f"infer_{name}": size for name, size in sizes.items()}
        engine = SimpleNamespace(strategy=backend, forward_only=False, use_dynamic_bsz=True, **sizes)
        parts = dict.fromkeys(["optimizer_config", "checkpoint_config", "profiler_config"])
        model = OmegaConf.create({"seed": seed})
        super().__init__(SimpleNamespace(model_type=model_type, model_config=model, engine_config=engine, **parts))
        self.flops_counter = SimpleNamespace(estimate_flops=lambda tokens, *_, **__: (float(sum(tokens)), 1000.0))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self):
        return self.engine.weights.detach()


class TinyActor(ActorRolloutRefWorker):
    """verl's ActorRolloutRefWorker around two of them, an actor and a reference."""

    def __init__(self, backend="tiny"):
        Worker.__init__(self)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank, config=None))
        self.role, self.enable_routing_replay = "actor_rollout_ref", False
        self.ref, self.actor = (TinyTraining("language_model", seed, backend) for seed in (1, 2))
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
    eos_token_id, pad_token_id = EOS, 0

    def decode(self, ids, skip_special_tokens=True):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return " ".join(str(token) for token in ids if token > EOS or not skip_special_tokens)


class TinyLoop:
    """A rollout by arithmetic: every fourth token is a tool's, and the reward is the share of multiples of 4."""

    def __init__(self, trainer_config, **options):
        pass

    async def run(self, sampling_params, *, index, session_id, **more):
        index = int(index)
        answer = [3 + (5 * index + 11 * session_id + place) % 60 for place in range(8 + (3 * index + session_id) % 9)]
        return AgentLoopOutput(
            prompt_ids=[3 + (7 * index + 3 * place) % 50 for place in range(16 + index % 4)],
            response_ids=[*answer, EOS],
            response_mask=[int(place % 4 != 2) for place in range(len(answer))] + [1],
            response_logprobs=[-0.1 * (token % 7) for token in answer] + [0.0],
            reward_score=sum(token % 4 == 0 for token in answer) / len(answer),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": 0, "max_global_steps": 0},
        )


_agent_loop_registry["tiny"] = {"_target_": f"{__name__}.TinyLoop"}


class TinyAgentLoop(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker without an engine. Prompts and sessions take turns: keys are listed in the order of arrival."""

    def __init__(self, config, *clients):
        self.config, self.processor, self.tokenizer = config, None, Tokenizer()
        self.reward_loop_worker_handles, self.distillation_enabled = None, False
        self.mm_processor_kwargs, self.tools = {}, []
        self.llm_client = self.hf_model_type = self.dataset_cls = None
        self.background_tasks, self.prompt_turn, self.session_turn = set(), asyncio.Lock(), asyncio.Lock()
        tq.init()

    async def _run_prompt(self, *args, **kwargs):
        async with self.prompt_turn:
            await super()._run_prompt(*args, **kwargs)

    async def _run_agent_loop(self, *args, **kwargs):
        async with self.session_turn:
            await super()._run_agent_loop(*args, **kwargs)
