"""assert_covered agrees with strict mode; the line that it names covers the field."""

from __future__ import annotations

import re

import pytest
import strategies
import torch
from hypothesis import given
from samples import PAD, freeze, rollout
from tensordict import NonTensorData

import maskpack as mp
from maskpack import RL_FIELDS, MaskNestingSpec
from maskpack.errors import CoverageError, LossyPadError
from maskpack.nesting.check import COVERAGE
from maskpack.testing import assert_covered


def test_a_covered_batch() -> None:
    batch = rollout(objects=False)
    before = freeze(batch)
    assert_covered(batch, pad_token_id=PAD)
    assert_covered(mp.nest_batch_by_mask(batch, pad_token_id=PAD), pad_token_id=PAD)
    assert freeze(batch) == before


def test_each_field_and_its_line() -> None:
    batch = rollout(objects=False)
    mask = batch["attention_mask"][:, -batch["responses"].shape[1] :]
    batch["kl"] = torch.where(mask.bool(), 0.5, -1.0)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), 3, -100)
    batch["odd"] = torch.zeros(len(batch), 3, 99)
    before = freeze(batch)
    with pytest.raises(AssertionError) as caught:
        assert_covered(batch, pad_token_id=PAD)
    said = str(caught.value)
    assert said.startswith("assert_covered: 3 of the fields are not covered by their mask; expected none:\n")
    assert '\n  "odd" (7, 3, 99) float32, 8,316 bytes: the registry does not know it\n' in said
    lines = re.findall(r"^    ('.*),(?:  #.*)?$", said, re.MULTILINE)
    assert lines == [
        "'kl': MaskNestingSpec('response', pad=-1.0)",
        "'labels': MaskNestingSpec('sequence', pad=-100)",
        "'odd': MaskNestingSpec(None)",
    ]
    assert freeze(batch) == before
    more = eval("{" + ",".join(lines) + "}", {"MaskNestingSpec": MaskNestingSpec})
    assert_covered(batch, RL_FIELDS | more, pad_token_id=PAD)
    mp.compress(batch, registry=RL_FIELDS | more, pad_token_id=PAD, strict_mask_nesting=True)


def test_values_under_a_mask_and_tensors_in_objects_are_found() -> None:
    batch = rollout(objects=False)
    batch["old_log_probs"][0, -1] = 7.0
    with pytest.raises(AssertionError, match=r'"old_log_probs" .*non-pad values'):
        assert_covered(batch, pad_token_id=PAD)
    batch = rollout(objects=False)
    batch["extra"] = NonTensorData({"x": torch.ones(3)}, batch_size=batch.batch_size)
    with pytest.raises(AssertionError, match=r"'extra': MaskNestingSpec\(None\)"):
        assert_covered(batch, pad_token_id=PAD)


@pytest.mark.filterwarnings("ignore")
@given(strategies.batches())
def test_it_fails_where_strict_mode_does(case: strategies.Case) -> None:
    try:
        mp.compress(case.batch, **case.options, strict_mask_nesting=True)
        refused = False
    except (CoverageError, LossyPadError):
        refused = True
    assert refused == any(one.kind in COVERAGE for one in mp.check(case.batch, **case.options))
    if refused:
        with pytest.raises(AssertionError, match=r"assert_covered: \d+ of the fields are not covered"):
            assert_covered(case.batch, **case.options)
    else:
        assert_covered(case.batch, **case.options)
