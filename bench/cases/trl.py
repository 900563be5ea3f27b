"""A step of TRL's GRPOTrainer without its generation, padded and packed.

    completions, made up --> old log-probs --> reference log-probs --> a loss and its gradients a micro-batch --> AdamW
                             no gradients      no gradients

    padded   GRPOTrainer              packed   packed(GRPOTrainer), with one option where its name says so

TRL's defaults: float32 weights under bfloat16 autocast, checkpointed layers. All see the same completions, whose
lengths are log-normal, behind prompts that are as long as their width; a group of 8 shares one. Weights and tokens are
random. Synchronised wall time of whole steps, interleaved, medians; the peak is of a step, above the weights and the
state of the optimizer. On the CPU, in float32 and with tiny sizes. Before anything is timed, log-probs of both are
compared.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer

from bench.harness.measure import NotExact, progress
from bench.harness.passes import SEVERAL, the_device, timed
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.workloads.models import SMALL, Shape
from bench.workloads.rows import log_normal
from maskpack.adapters.trl import packed

PADDED, PACKED, ALONE = "padded", "packed", "packed, share_prefixes=False"
_KINDS = {
    PADDED: GRPOTrainer,
    PACKED: packed(GRPOTrainer),
    ALONE: packed(GRPOTrainer, share_prefixes=False),
}
_GROUP = 8
_WORDS = 512


@dataclass(frozen=True)
class Size:
    """A model, and the batch of one step: `rows` in micro-batches of `micro_batch`, `fill` of the response width."""

    name: str
    shape: Shape
    prompt: int
    response: int
    fill: float = 0.25
    rows: int = 32
    micro_batch: int = 8


SIZES: Mapping[str, Size] = {
    "tiny": Size("a tiny Qwen3", Shape(64, 2, 4, 2, 16, 128, 1_024), prompt=96, response=128),
    "small": Size("Qwen3-0.6B", SMALL, prompt=512, response=2_048),
}


@case(
    "trl",
    help="a step of TRL's GRPOTrainer without generation; tiny is for a CPU",
    on="both",
    rows=None,
    groups=tuple(SIZES),
    tiny={"only": ["tiny"], "sizes": {"tiny": Size("tiny", Shape(32, 2, 4, 2, 8, 48, 512), 24, 16, rows=16)}},
)
def run(rounds: int, *, only: Sequence[str] | None = None, sizes: Mapping[str, Size] = SIZES) -> RowGroups:
    """A round here is three of the command line. Raises NotExact if packed log-probs differ from padded ones."""
    device = the_device()
    for group in only or (["small"] if device.type == "cuda" else ["tiny"]):
        with tempfile.TemporaryDirectory() as folder:
            yield from _measured(sizes[group], Path(folder), -(-rounds // SEVERAL), device)
        gc.collect()


@dataclass
class Stage:
    """A trainer that has made a step, so that its optimizer has its state."""

    trainer: Any
    batch: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, kind: Any, of: Size, model: str, folder: Path, device: torch.device) -> Stage:
        prompts, completions = rollout(of)

        class Told(kind):
            """Its completions are given, not generated."""

            def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
                return [list(one) for one in completions], None

        gpu = device.type == "cuda"
        arguments = GRPOConfig(
            str(folder),
            use_cpu=not gpu,
            bf16=gpu,
            max_steps=1,
            per_device_train_batch_size=of.micro_batch,
            gradient_accumulation_steps=of.rows // of.micro_batch,
            steps_per_generation=of.rows // of.micro_batch,
            num_generations=_GROUP,
            num_iterations=2,  # so that old log-probs are computed
            beta=0.04,  # and reference log-probs
            max_completion_length=of.response,
            learning_rate=1e-6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        trainer = Told(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            _reward,
            arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=_tokenizer(),
        )
        trainer.train()
        return cls(trainer, [{"prompt": prompt} for prompt in prompts for _ in range(_GROUP)])

    def step(self) -> None:
        """All but the generation: one optimizer step over the batch."""
        trainer = self.trainer
        trainer._step, trainer._buffered_inputs = 0, None  # the next training_step takes new completions
        trainer.model.train()
        for _ in range(trainer.args.gradient_accumulation_steps):
            trainer.training_step(trainer.model_wrapped, self.batch, None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    def log_probs(self) -> torch.Tensor:
        """Those of the policy before a step, and of the reference model: [2, rows, C]."""
        trainer = self.trainer
        trainer.model.train()
        with torch.no_grad():
            out = trainer._generate_and_score_completions(self.batch)
        return torch.stack([out["old_per_token_logps"], out["ref_per_token_logps"]])

    def computed(self) -> float:
        """The computed tokens of padded cells, in all passes of a step; 1 where the trainer is TRL's."""
        metrics = self.trainer._metrics["train"]
        metrics.clear()
        self.step()
        return statistics.mean(metrics.get("maskpack/computed_fraction", [1.0]))


def _measured(of: Size, folder: Path, rounds: int, device: torch.device) -> RowGroups:
    name = f"trl, a GRPO step, shape of {of.name}"
    progress(name)
    model = _saved(of.shape, folder / "model", device)
    stages = {kind: Stage.of(made, of, model, folder / kind, device) for kind, made in _KINDS.items()}
    yield [
        Row(name, "rows", of.rows, "rows"),
        *(Row(name, f"computed tokens / padded cells, {kind}", one.computed(), "x") for kind, one in stages.items()),
        *_compared(name, stages, device),
    ]
    runs = {kind: stage.step for kind, stage in stages.items()}
    pairs = [(PADDED, kind, None) for kind in stages if kind != PADDED]
    yield timed(name, runs, rounds, device, pairs, above_held=True)


def _compared(name: str, stages: Mapping[str, Stage], device: torch.device) -> list[Row]:
    """How far log-probs are from padded ones, before the weights differ. Raises NotExact for more than rounding."""
    truth = stages[PADDED].log_probs()
    allowed = 0.25 if device.type == "cuda" else 1e-3  # of bfloat16, and of float32 after a step
    report: list[Row] = []
    for kind, stage in stages.items():
        if kind != PADDED:
            off = float((stage.log_probs() - truth).abs().max())
            if not off <= allowed:
                raise NotExact(f"{name}: log-probs of {kind} are off by {off:.3g}; expected at most {allowed}.")
            report.append(Row(name, f"log-probs, {kind}, largest difference", off, "nats"))
    return report


# -------------------------------------------------------------------- what is trained


def rollout(of: Size) -> tuple[list[str], list[list[int]]]:
    """Prompts of one width, a group of rows each, and completions of log-normal lengths up to the response width."""
    random = np.random.default_rng(0)
    ids = random.integers(3, _WORDS, (of.rows // _GROUP, of.prompt))
    lengths = log_normal(random, of.rows, 1.0, of.fill * of.response, of.response)
    prompts = [" ".join(f"w{word}" for word in row) for row in ids]
    return prompts, [random.integers(3, _WORDS, length).tolist() for length in lengths]


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *[f"w{word}" for word in range(3, _WORDS)]]
    of_words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _saved(shape: Shape, folder: Path, device: torch.device) -> str:
    """A folder with the model: TRL loads the reference model from where the policy came."""
    model = shape.model(device, torch.float32)
    config: Qwen3Config = model.config
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model.save_pretrained(folder)
    return str(folder)
