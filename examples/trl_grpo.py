"""GRPO with TRL, padded and packed: the same trainer, and the same trainer in `packed`.

    prompts --> GRPOTrainer           --> completions, rewards, losses
    prompts --> packed(GRPOTrainer)   --> the same

    python examples/trl_grpo.py        a tiny model of random weights on the CPU, ten seconds; needs maskpack[trl]

The reward is the share of even words. Both runs begin with the same weights and seeds, and share nothing else.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from maskpack.adapters.trl import packed

WORDS = ["<pad>", "<bos>", "<eos>", *[f"w{word}" for word in range(3, 64)]]
STEPS = 12


def tokenizer() -> PreTrainedTokenizerFast:
    of_words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=of_words, **names)


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen3ForCausalLM(config)


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(word % 2 == 0 for word in ids) / len(ids) for ids in completion_ids]


def train(trainer_class: type[GRPOTrainer]) -> list[dict[str, float]]:
    """What the trainer logged at every step."""
    prompts = [" ".join(WORDS[3 + (row + word) % 61] for word in range(2 + 7 * row % 24)) for row in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            num_generations=8,
            num_iterations=2,  # a second update on the same completions, which takes old log-probs
            max_completion_length=24,
            learning_rate=5e-3,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = trainer_class(
            tiny_model(),
            even_words,
            arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [step for step in trainer.state.log_history if "loss" in step]


def main() -> None:
    logging.set_verbosity_error()
    print(f"training {STEPS} steps padded, then packed: ten seconds on a free CPU", flush=True)
    padded, ours = train(GRPOTrainer), train(packed(GRPOTrainer))
    print("step  reward     loss, padded     loss, packed   computed tokens of padded cells")
    reward = 0.0
    for step, (theirs, own) in enumerate(zip(padded, ours, strict=True), 1):
        assert theirs.get("reward") == own.get("reward")
        reward = own.get("reward", reward)
        fraction = own["maskpack/computed_fraction"]
        print(f"{step:4}  {reward:6.3f}  {theirs['loss']:15.8f}  {own['loss']:15.8f}   {fraction:.2f}")


if __name__ == "__main__":
    main()
