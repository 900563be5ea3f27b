"""Log-probs and gradients of batches without masks, jagged or in one line, against each row or document alone in the
plain model, in float64. `jagged_batches` makes them, verl's by verl's own code."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from jagged_batches import LINES, SHAPES, Made, Row, prime_rl_line, prime_rl_samples, slime, verl_joined, verl_v1
from needs import needs
from samples import row_list
from tensordict import TensorDict
from torch import Tensor

needs("transformers")

from tiny_models import VOCABULARY, pair, qwen3, qwen25_vl

import maskpack as mp
from maskpack.adapters.transformers import replayable
from maskpack.fields import presets
from maskpack.planning import plan_micro_batches
from maskpack.replay import ReplayOptions, response_log_probs

LIMIT = 1e-10
PAD = 0


@functools.cache
def models(make: Any) -> tuple[Any, Any]:
    """One that replays, and one that keeps its own attention."""
    changed, plain = pair(make, torch.float64)
    return replayable(changed), plain


def alone(model: Any, ids: Tensor, places: Tensor) -> Tensor:
    """[n - 1]: the log-probs of all tokens of a row but the first, from a forward pass of that row alone."""
    assert int(ids.max()) < VOCABULARY
    where = places[None] if places.dim() == 1 else places[:, None]
    out = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], position_ids=where, use_cache=False)
    scores = out.logits[0].log_softmax(-1)
    return torch.stack([scores[at - 1, token] for at, token in enumerate(ids.tolist()) if at] or [scores.new_zeros(())])


def truth_of(model: Any, row: Row, ids: str, scored: list[bool]) -> Tensor:
    """[scored]: the log-probs at the last tokens of a row, 0 where one is not scored or nothing scores it."""
    count = len(row[ids])
    line = alone(model, row[ids], row.get("position_ids", torch.arange(count)))
    first = count - len(scored)
    zero = line.new_zeros(())
    return torch.stack([line[at - 1] if on and at else zero for at, on in enumerate(scored, first)])


def check(make: Any, batch: Any, truth: Any, **options: Any) -> None:
    """Log-probs row by row, and the gradients of a weighted sum of them by each parameter, within LIMIT."""
    replay, plain = models(make)
    seen = response_log_probs(replay, batch, options=ReplayOptions(**options))
    wanted: list[Tensor] = truth(plain)
    rows = row_list(seen)
    assert [len(row) for row in rows] == [len(row) for row in wanted]
    values, whole = seen.values(), torch.cat(wanted)
    assert values.dtype == torch.float64
    assert float((values - whole).detach().abs().max()) <= LIMIT
    assert torch.equal(values == 0, whole == 0)
    if not whole.any():  # nothing is scored
        return
    weights = torch.linspace(0.3, 1.3, whole.numel(), dtype=torch.float64)
    pairs = [(dict(replay.model.named_parameters()), values), (dict(plain.named_parameters()), whole)]
    grads = [torch.autograd.grad((x * weights).sum(), [*own.values()], allow_unused=True) for own, x in pairs]
    assert list(pairs[0][0]) == list(pairs[1][0])
    assert any(grad is not None and grad.any() for grad in grads[1])
    for name, got, want in zip(pairs[0][0], *grads, strict=True):
        got, want = (torch.zeros(()) if grad is None else grad for grad in (got, want))
        assert float((got - want).norm()) <= LIMIT * max(float(want.norm()), 1.0), name


def forms(case: Made) -> dict[str, Any]:
    return {
        "as it is": case.batch,
        "nested": mp.nest_batch_by_mask(case.batch, case.registry, pad_token_id=PAD),
        "packed": mp.compress(case.batch, registry=case.registry, pad_token_id=PAD),
        "decoded": mp.decompress(mp.compress(case.batch, registry=case.registry, pad_token_id=PAD)),
    }


FORMS = pytest.mark.parametrize("form", ["as it is", "nested", "packed", "decoded"])
WITH_PROMPTS = [shape for shape, rows in SHAPES.items() if all(p for p, _ in rows)]


# -------------------------------------------------------------------- verl


def of_responses(case: Made, mask: str | None = None) -> Any:
    """Of each row, at the tokens of its response, or at those of a mask."""

    def truth(model: Any) -> list[Tensor]:
        scored = [row[mask].bool().tolist() if mask else [True] * len(row["responses"]) for row in case.rows]
        return [truth_of(model, row, "input_ids", on) for row, on in zip(case.rows, scored, strict=True)]

    return truth


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_responses_of_verl(shape: str, form: str) -> None:
    """All of them, and those of the response mask, whose name is of the registry or not."""
    case = verl_v1(SHAPES[shape])
    batch = forms(case)[form]
    options = {} if shape in WITH_PROMPTS else {"no_prompt": "skip"}
    check(qwen3, batch, of_responses(case), **options)
    check(qwen3, batch, of_responses(case, "response_mask"), scored=("response_mask",), **options)
    check(qwen3, batch, of_responses(case, "loss_mask"), scored=("loss_mask",), **options)


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loss_mask_on_the_sequence_names_the_tokens(shape: str, form: str) -> None:
    """Of rows without prompts and responses, as samples of prime-rl have them under the names of verl."""
    names = {"token_ids": "input_ids", "mask": "loss_mask", "logprobs": "rollout_log_probs"}
    case = prime_rl_samples(SHAPES[shape])
    rows = [{new: row[old] for old, new in names.items()} for row in case.rows]
    case = Made(renamed(case.batch, names), rows, mp.RL_FIELDS)

    check(qwen3, forms(case)[form], of_marked(case, whole=True), scored=("loss_mask",), no_prompt="skip")
    check(qwen3, forms(case)[form], of_marked(case, whole=True), no_prompt="skip")


def of_marked(case: Made, whole: bool = False) -> Any:
    """At the tokens of the loss mask of each row, 0 at the first token of a row; of the `whole` row 0 elsewhere."""

    def truth(model: Any) -> list[Tensor]:
        masks = [row["loss_mask"] for row in case.rows]
        rows = [truth_of(model, row, "input_ids", on.tolist()) for row, on in zip(case.rows, masks, strict=True)]
        return rows if whole else [row[on] for row, on in zip(rows, masks, strict=True)]

    return truth


def renamed(batch: TensorDict, names: dict[str, str]) -> TensorDict:
    out = TensorDict({}, batch_size=batch.batch_size)
    for old, new in names.items():
        out.set(new, batch.get(old))
    return out


@FORMS
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", ["of all lengths", "of equal prompts"])
def test_responses_of_verl_at_positions_of_m_rope(shape: str, joined: bool, form: str) -> None:
    case = (verl_joined if joined else verl_v1)(SHAPES[shape], sections=True)
    check(qwen25_vl, forms(case)[form], of_responses(case))


def test_responses_of_verl_in_micro_batches_and_with_shared_prompts() -> None:
    case, replay = verl_v1(SHAPES["of all lengths"]), models(qwen3)[0]
    plan = plan_micro_batches([len(row["input_ids"]) for row in case.rows], 12)
    whole = response_log_probs(replay, case.batch)
    parts = [response_log_probs(replay, part) for part in plan.apply(case.batch)]
    for seen in (plan.restore(parts), response_log_probs(replay, case.batch, plan=plan)):
        assert float((seen.values() - whole.values()).detach().abs().max()) <= LIMIT
    twice = mp.nesting.take(case.batch, [0, 1, 2, 2, 1, 0])
    shared = response_log_probs(replay, twice, options=ReplayOptions(share_prefixes=True, min_shared=1))
    rows = row_list(whole)
    wanted = torch.cat([rows[row] for row in (0, 1, 2, 2, 1, 0)])
    assert float((shared.values() - wanted).detach().abs().max()) <= LIMIT


def test_log_probs_can_be_subtracted_from_those_of_the_batch() -> None:
    """As a loss does it with the old ones: one offsets tensor, whichever call made the batch."""
    case = verl_v1(SHAPES["of all lengths"])
    for batch in forms(case).values():
        seen = response_log_probs(models(qwen3)[0], batch)
        for other in forms(case).values():
            old = mp.decompress(other) if isinstance(other, mp.PackedBatch) else other
            if other is case.batch:  # its offsets are of verl
                continue
            ratio = (seen - old["old_log_probs"]).exp()
            rows = [row["old_log_probs"] for row in case.rows]
            wanted = [(x - y).exp() for x, y in zip(row_list(seen), rows, strict=True)]
            assert all(map(torch.equal, row_list(ratio), wanted))


# -------------------------------------------------------------------- slime


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_responses_of_slime(shape: str, form: str) -> None:
    case = slime(SHAPES[shape])
    options: dict[str, Any] = {"input_ids": "tokens", "registry": presets.slime}
    options |= {} if shape in WITH_PROMPTS else {"no_prompt": "skip"}

    def truth(model: Any) -> list[Tensor]:
        return [truth_of(model, row, "tokens", [True] * len(row["loss_masks"])) for row in case.rows]

    def masked(model: Any) -> list[Tensor]:
        return [truth_of(model, row, "tokens", row["loss_masks"].bool().tolist()) for row in case.rows]

    check(qwen3, forms(case)[form], truth, **options)
    check(qwen3, forms(case)[form], masked, scored=("loss_masks",), **options)


# -------------------------------------------------------------------- prime-rl


def of_line(case: Made) -> Any:
    """At all tokens of the line, 0 where the loss mask is and at the first token of a document."""

    def truth(model: Any) -> list[Tensor]:
        return [torch.cat([truth_of(model, row, "input_ids", row["loss_mask"].tolist()) for row in case.rows])]

    return truth


OF_LINES = pytest.mark.parametrize("shape", ["of all lengths", "of two tokens", "without prompts"])


@pytest.mark.parametrize("form", ["as it is", "nested", "decoded"])
@OF_LINES
@pytest.mark.parametrize("line", LINES)
def test_lines_of_prime_rl(line: str, shape: str, form: str) -> None:
    """Without an axis of the registry, a line is one row."""
    case = LINES[line](SHAPES[shape], 3)._replace(registry=mp.RL_FIELDS)
    check(qwen3, forms(case)[form], of_line(case), scored=("loss_mask",), no_prompt="skip")


@OF_LINES
@pytest.mark.parametrize("line", LINES)
def test_packed_lines_of_prime_rl(line: str, shape: str) -> None:
    case = LINES[line](SHAPES[shape], 3)._replace(registry=mp.RL_FIELDS)
    check(qwen3, forms(case)["packed"], of_line(case), scored=("loss_mask",), no_prompt="skip")


@FORMS
@OF_LINES
def test_lines_of_prime_rl_under_its_preset(shape: str, form: str) -> None:
    """A row for each document by their cu_seqlens, and in it the tokens of the loss mask."""
    case = prime_rl_line(SHAPES[shape], 3, dims=1)
    options: dict[str, Any] = {"scored": ("loss_mask",), "no_prompt": "skip", "registry": presets.prime_rl}
    check(qwen3, forms(case)[form], of_marked(case), **options)
