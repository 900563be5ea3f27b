# ruff: noqa: SIM118 (a TensorDict iterates over rows)
"""The batches of maskpack.testing are what trainers make; read here by naive loops over rows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import NoSuchExample
from oracle import assert_same_batch
from tensordict import TensorDict

import maskpack as mp
from maskpack.errors import MaskpackError
from maskpack.testing import assert_covered, batches

PAD = 7
ON_RESPONSES = {
    *("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "values", "returns", "advantages"),
    *("token_level_scores", "token_level_rewards", "rm_scores", "response_mask", "loss_mask"),
}


def found(wanted: Any, **options: Any) -> TensorDict:
    """A batch that is as wanted."""
    from hypothesis import find

    options = {"pad_token_id": PAD, **options}
    quiet = settings(max_examples=2000, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    return find(batches(**options), wanted, settings=quiet)


@given(batches(pad_token_id=PAD))
def test_they_are_padded_as_a_trainer_pads(batch: TensorDict) -> None:
    rows, width = batch["prompts"].shape
    assert batch["responses"].shape[0] == rows == batch.batch_size[0]
    for row in range(rows):
        prompt, response = batch["prompts"][row].tolist(), batch["responses"][row].tolist()
        mask = [bool(x) for x in batch["attention_mask"][row].tolist()]
        assert batch["input_ids"][row].tolist() == prompt + response
        assert [token != PAD for token in prompt + response] == mask
        assert mask[:width] == sorted(mask[:width])
        assert mask[width:] == sorted(mask[width:], reverse=True)
        for name in ON_RESPONSES & set(batch.keys()):
            zeros = [str(x) in ("0", "0.0", "False") for x in batch[name][row].tolist()]
            assert all(zero or real for zero, real in zip(zeros, mask[width:], strict=True)), name
        if "position_ids" in batch.keys():
            wanted, place = [], 0
            for real in mask:
                wanted.append(place)
                place += real and place < sum(mask) - 1
            assert batch["position_ids"][row].tolist() == wanted


@given(batches(pad_token_id=PAD, awkward=True))
def test_they_are_covered_and_come_back(batch: TensorDict) -> None:
    assert_covered(batch, pad_token_id=PAD)
    assert_same_batch(mp.decompress(mp.compress(batch, pad_token_id=PAD, strict_mask_nesting=True)), batch)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda b: b.batch_size[0] == 0,
        lambda b: b.batch_size[0] == 6,
        lambda b: b["prompts"].shape[1] == 0 and b.batch_size[0] > 0,
        lambda b: b["responses"].numel() > 3 and not b["attention_mask"].any(),
        lambda b: b.batch_size[0] > 1 and not b["attention_mask"][0].any() and b["attention_mask"][1].any(),
        lambda b: "response_mask" in b.keys() and b["responses"].ne(PAD).any() and not b["response_mask"].any(),
        lambda b: "loss_mask" in b.keys() and (b["loss_mask"].bool() ^ b["responses"].ne(PAD)).any(),
        lambda b: "uid" in b.keys() and 1 < len(set(b["uid"])) < len(b) and b["prompts"][0].equal(b["prompts"][1]),
        lambda b: "advantages" in b.keys() and len({*b["advantages"].reshape(-1).tolist(), 0.0}) > 3,
        lambda b: "values" in b.keys() and b["values"].dtype == torch.bfloat16 and bool(b["values"].any()),
        lambda b: b["attention_mask"].dtype == torch.bool,
        lambda b: "routed_experts" in b.keys() and bool(b["routed_experts"].any()),
        lambda b: any(key not in ON_RESPONSES and b[key].dim() == 1 for key in b.keys(True, True) if "temp" not in key),
    ],
)  # fmt: skip
def test_examples_of_each_kind_are_drawn(wanted: Any) -> None:
    assert wanted(found(wanted, objects=True))


def test_awkward_floats_are_drawn_and_others_are_not() -> None:
    def bits(batch: TensorDict) -> set[int]:
        floats = [x for x in batch.values() if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
        return {int(word) & 0xFFFFFFFF for x in floats for word in x.contiguous().view(torch.int32).reshape(-1)}

    for word in (0x80000000, 0x7F800000, 0xFF800000, 1):
        found(lambda batch, word=word: word in bits(batch), awkward=True)
    payloads = found(
        lambda batch: any(0x7FC00000 != word > 0x7F800000 and word < 0x80000000 for word in bits(batch)), awkward=True
    )
    assert payloads is not None
    with pytest.raises(NoSuchExample):
        found(lambda batch: any(word & 0x7F800000 == 0x7F800000 for word in bits(batch)))


def test_the_fields_of_a_batch_vary() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(batches())
    def count(batch: TensorDict) -> None:
        seen.update(batch.keys())

    count()
    assert set(seen) >= ON_RESPONSES | {"position_ids", "routed_experts", "reward_baselines", "temperature", "uid"}
    assert all(seen[name] == seen["prompts"] for name in ("responses", "input_ids", "attention_mask"))
    assert all(0 < seen[name] < seen["prompts"] for name in ON_RESPONSES)


def test_hypothesis_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, maskpack.testing; print('hypothesis' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False False\n"
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(MaskpackError, match=r"hypothesis is not installed; .* pip install 'maskpack\[testing\]'"):
        batches()
