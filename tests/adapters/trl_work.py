"""Runs of TRL's trainers for test_trl.py, on a tiny model, a tokenizer of words and rewards that count; and what a rank
does in the tests of several processes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset
from tiny_models import scaled
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from maskpack.adapters.trl import packed
from maskpack.errors import ReplayError
from maskpack.replay import MismatchLimit

WORDS = ["<pad>", "<bos>", "<eos>", *[f"w{number}" for number in range(29)]]
TIMES = ("time", "second", "runtime")
SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ARGUMENTS = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4, "logging_steps": 1,
    "max_completion_length": 12, "report_to": [], "learning_rate": 1e-3, "disable_tqdm": True, "save_strategy": "no",
    "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
}  # fmt: skip


def tokenizer() -> Any:
    of_words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=of_words, **names)


def prompts(count: int = 16) -> Any:
    """Prompts of 3 to 22 words, which TRL pads on the left."""
    source = random.Random(0)
    return Dataset.from_dict(
        {"prompt": [" ".join(source.choices(WORDS[3:], k=3 + 5 * row % 20)) for row in range(count)]}
    )


def saved(folder: Path, kind: str = "Qwen3", scale: float = 6.0, **sizes: Any) -> str:
    """A model with random weights, large enough that the log-probs of tokens differ by nats."""
    torch.manual_seed(0)
    head = {"head_dim": 8} if kind == "Qwen3" else {}
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(tf, name)(getattr(tf, f"{kind}Config")(**SIZES | head | sizes))
    scaled(model, scale).save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@dataclass
class Rewards:
    """Even ids count, and everything that it was shown is kept."""

    shown: list[Any] = field(default_factory=list)
    __name__ = "even"

    def __call__(self, prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
        self.shown.append((prompts, completion_ids, scores))
        return scores


def trainer(kind: Any, folder: Any, model: Any, peft: Any = None, **options: Any) -> Any:
    """A trainer of GRPO or RLOO; of a model or the folder of one."""
    config = GRPOConfig if issubclass(kind, GRPOTrainer) else RLOOConfig
    rewards = Rewards()
    torch.manual_seed(0)
    made = kind(
        loaded(model) if isinstance(model, str) else model,
        rewards,
        config(str(folder), **ARGUMENTS | options),
        train_dataset=prompts(),
        eval_dataset=prompts(4),
        processing_class=tokenizer(),
        peft_config=peft,
    )
    made.rewards = rewards
    return made


def trained(kind: Any, folder: Any, model: Any, resume: Any = None, **options: Any) -> Any:
    run = trainer(kind, folder, model, **options)
    run.train(resume_from_checkpoint=resume)
    return run


def history(run: Any) -> list[dict[str, float]]:
    """All logged numbers, without times and what maskpack adds."""
    return [
        {
            name: value
            for name, value in step.items()
            if not any(time in name for time in TIMES) and "maskpack" not in name
        }
        for step in run.state.log_history
    ]


class Tooled(GRPOTrainer):
    """TRL's trainer, as if tools had written some tokens, and the sampler had recorded log-probs of its own."""

    samples = False

    def _generate(self, prompts: Any) -> Any:
        out = list(super()._generate(prompts))
        ids = out[1]
        out[2] = [[int(nth == 0 or token % 3 > 0) for nth, token in enumerate(row)] for row in ids]
        if self.samples:
            out[4] = [[-((token * 7 + nth) % 11) / 3 for nth, token in enumerate(row)] for row in ids]
        return tuple(out)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        self.outs = [*getattr(self, "outs", []), out]
        return out


class Sampled(Tooled):
    samples = True


# -------------------------------------------------------------------- ranks


def join_accelerate(sharded: bool) -> None:
    """Tells accelerate of the group that this process is in. It shards on GPUs alone: it is told so."""
    import torch.distributed as dist
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}
    if sharded:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def weights(run: Any) -> dict[str, Any]:
    """Whole weights, by name."""
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in run.model.named_parameters()
    }
    return {name.removeprefix("module."): value.detach().numpy().copy() for name, value in full.items()}


def of_rank(folder: str, model: str, cases: Sequence[str], sharded: bool, options: dict[str, Any]) -> list[Any]:
    """Trains once for each case on this rank. The trainer of the case "bypassed" runs what DDP wraps, not DDP."""
    join_accelerate(sharded)
    if sharded:
        options = options | {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    return [_of_case(f"{folder}/{case}", model, case, options) for case in cases]


def _of_case(folder: str, model: str, case: str, options: dict[str, Any]) -> Any:
    kind: Any = GRPOTrainer if case == "padded" else packed(GRPOTrainer, min_shared=2)
    run = trainer(kind, folder, model, **options)
    ran: list[str] = []
    method = run._get_per_token_logps_and_entropies

    def seen(model: Any, *args: Any, **more: Any) -> Any:
        ran.append(type(model).__name__)
        return method(model.module if case == "bypassed" and hasattr(model, "module") else model, *args, **more)

    run._get_per_token_logps_and_entropies = seen
    run.train()
    assert case == "padded" or run._refused is None, run._refused
    return history(run), weights(run), set(ran), run.rewards.shown


def mismatch_of_rank(folder: str, model: str, options: dict[str, Any]) -> tuple[list[dict[str, float]], list[int], str]:
    """The logged mismatches of this rank, the tokens of its own rows, and what a limit says."""
    join_accelerate(False)
    run = trained(packed(Sampled, min_shared=2), f"{folder}/0", model, **options)
    steps = [
        {name: value for name, value in step.items() if "mismatch" in name}
        for step in run.state.log_history
        if "maskpack/rollout_mismatch/k3" in step
    ]
    own = [int((out["completion_mask"] * out["tool_mask"]).sum()) for out in run.outs]
    try:
        trained(packed(Sampled, mismatch_limit=MismatchLimit(k3=1e-3)), f"{folder}/1", model, **options)
    except ReplayError as error:
        return steps, own, str(error)
    return steps, own, ""
