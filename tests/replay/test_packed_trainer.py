"""The worked trainer: its packed losses are the padded ones; and the trainers of transformers, as docs/trainers.md
makes it, and of TRL on packed rows."""

from __future__ import annotations

import random
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from needs import needs
from samples import padded

needs("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import packed_trainer

from maskpack.adapters.transformers import replayable
from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.errors import ReplayError

CLOSE = 1e-5  # of losses from 4 down to 0.01, over 24 optimizer steps


# -------------------------------------------------------------------- the example


def test_packed_and_padded_training_have_one_curve():
    packed, padded = packed_trainer.train_packed(), packed_trainer.train_padded()
    assert len(packed) == packed_trainer.STEPS + packed_trainer.WEIGHTED_STEPS
    np.testing.assert_allclose(packed, padded, rtol=0, atol=CLOSE)
    assert packed[packed_trainer.STEPS - 1] < packed[0] - 0.3  # something was learned
    assert max(map(abs, packed[packed_trainer.STEPS :])) > 0.01  # and the weighted steps are no zeros


@pytest.mark.parametrize("fault", ["bounds", "labels"])
def test_a_wrong_bound_or_label_would_be_seen(fault, monkeypatch):
    """Rows that see each other, and rows whose first token counts."""

    class Wrong(PackedCollator):
        def _packed(self, samples):
            out = super()._packed(samples)
            total = out["input_ids"].numel()
            if fault == "bounds":
                out["cu_seq_lens_q"], out["max_length_q"] = torch.tensor([0, total], dtype=torch.int32), total
            else:
                out["labels"][0, out["cu_seq_lens_q"][1:-1].long()] = 7
            return out

    monkeypatch.setattr(packed_trainer, "COLLATOR", Wrong(extras=("weights",)))
    samples = packed_trainer.samples_of(0, weighted=False)
    model = replayable(packed_trainer.tiny_model()).model
    wrong = sum(loss.item() for loss in packed_trainer.packed_losses(model, samples))
    right = sum(loss.item() for loss in packed_trainer.padded_losses(packed_trainer.tiny_model(), samples))
    assert abs(wrong - right) > 10 * CLOSE


# -------------------------------------------------------------------- trainers


def dataset(rows=22):
    """Rows with prompts that are not trained on."""
    rng = random.Random(0)
    out = []
    for _ in range(rows):
        tokens = rng.randint(3, 20)
        prompt = rng.randint(1, tokens - 1)
        ids = [rng.randrange(2, packed_trainer.VOCABULARY) for _ in range(tokens)]
        out.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return out


def collated(samples):
    return {
        "input_ids": padded([sample["input_ids"] for sample in samples]),
        "labels": padded([sample["labels"] for sample in samples], pad=-100),
        "attention_mask": padded([[1] * len(sample["input_ids"]) for sample in samples]),
    }


OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
}


def losses_of(trainer):
    trainer.train()
    names = ("loss", "eval_loss")
    return [line[name] for line in trainer.state.log_history for name in names if name in line]


def trained(make, tmp_path):
    """The losses of a trainer that `make` returns."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), **OPTIONS, eval_strategy="epoch", remove_unused_columns=False)
    data = dataset()
    return losses_of(make(args=arguments, train_dataset=data, eval_dataset=data[3:]))


def trainer_of_the_page(args, **options):
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "trainer_of" in block)
    names = {}
    exec(compile(block, "trainers.md", "exec"), names)
    return names["trainer_of"](packed_trainer.tiny_model(), args, **options)


def packed_model():
    return replayable(packed_trainer.tiny_model()).model


def test_the_trainer_of_transformers(tmp_path):
    needs("accelerate")
    from transformers import Trainer

    packed = trained(trainer_of_the_page, tmp_path)
    own = trained(partial(Trainer, packed_trainer.tiny_model(), data_collator=collated), tmp_path)
    assert len(own) == 6 + 2  # steps and evaluations
    assert own[-1] < own[0]
    np.testing.assert_allclose(packed, own, rtol=0, atol=CLOSE)


def test_the_trainer_passes_its_count_on_to_the_attention(tmp_path):
    """Why the model must say that it takes no keywords of losses; the attention refuses what it does not know."""
    needs("accelerate")
    from transformers import Trainer

    with pytest.raises(ReplayError, match="packed attention with num_items_in_batch"):
        trained(partial(Trainer, packed_model(), data_collator=PackedCollator()), tmp_path)


def supervised(model, collator, tmp_path, **options):
    """TRL's trainer, with a tokenizer that it asks for and does not use."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"t{number}": number for number in range(packed_trainer.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
    arguments = SFTConfig(str(tmp_path), **OPTIONS, bf16=False, max_length=None, **options)
    data = Dataset.from_list(dataset())
    return losses_of(
        SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, data_collator=collator)
    )


def test_the_trainer_of_trl(tmp_path):
    """As it is, with its gradient checkpointing."""
    needs("trl")
    packed = supervised(packed_model(), PackedCollator(), tmp_path)
    own = supervised(packed_trainer.tiny_model(), collated, tmp_path)
    assert len(own) == 6
    np.testing.assert_allclose(packed, own, rtol=0, atol=CLOSE)


def test_the_collator_of_trl_needs_another_attention(tmp_path):
    """It always gives seq_idx, which maskpack's attention does not know."""
    needs("trl")
    with pytest.raises(ReplayError, match="packed attention with seq_idx"):
        supervised(packed_model(), None, tmp_path, padding_free=True)
