"""invariant=True on CUDA, in half precision: log-probs of a row are the same bits alone and in random micro-batches,
with shared prefixes and gradients, and gradients the same bits in every run. What cannot is refused."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from needs import needs
from tensordict import TensorDict
from torch import Tensor

from maskpack.errors import ReplayError
from maskpack.replay import ReplayOptions, response_log_probs

transformers = needs("transformers")

from maskpack.adapters.transformers import replayable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [3, 4, 17, 65, 130, 260, 700, 33, 5, 128]
SHARED = ReplayOptions(share_prefixes=True, min_shared=1)


def tiny(kind: str, dtype: torch.dtype) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 1003, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    if kind == "Gemma3":
        config: Any = transformers.Gemma3TextConfig(**shape, sliding_window=40)
    else:
        config = transformers.Qwen3Config(**shape)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


def batch_of(lengths: list[int]) -> TensorDict:
    """Every second row begins as the row before it."""
    width, rows = max(lengths), len(lengths)
    ids = torch.randint(1, 1003, (rows, width), generator=torch.Generator().manual_seed(1))
    for row in range(1, rows, 2):
        same = min(lengths[row - 1 : row + 1]) // 2
        ids[row, :same] = ids[row - 1, :same]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    given = {"input_ids": ids * mask, "attention_mask": mask.long(), "responses": (ids * mask)[:, 1:]}
    return TensorDict(given, [rows]).to("cuda")


def bits(log_probs: Tensor) -> list[Tensor]:
    rows: Any = log_probs.unbind()
    return [row.detach().view(torch.int32).clone() for row in rows]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["eager", "fused"])
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3"])
def test_log_probs_do_not_depend_on_the_packing(kind: str, options: dict[str, bool]) -> None:
    replay, batch = replayable(tiny(kind, torch.bfloat16), invariant=True, **options), batch_of(LENGTHS)
    with torch.no_grad():
        want = [bits(response_log_probs(replay, batch[row : row + 1]))[0] for row in range(len(LENGTHS))]
    rng = np.random.default_rng(0)
    for turn in range(8):
        order, shares, learns = rng.permutation(len(LENGTHS)), turn % 2 == 1, turn % 4 > 1
        for rows in np.array_split(order, rng.integers(1, 5)):
            with torch.set_grad_enabled(learns):
                more: dict[str, Any] = {"options": SHARED} if shares else {}
                seen = cast("Tensor", response_log_probs(replay, batch[rows.tolist()], **more))
            assert seen.requires_grad == learns
            assert all(torch.equal(x, want[row]) for x, row in zip(bits(seen), rows, strict=True)), (turn, rows)


@pytest.mark.parametrize("shares", [False, True])
def test_gradients_have_the_same_bits_in_every_run(shares: bool) -> None:
    model = tiny("Qwen3", torch.bfloat16)
    replay, batch = replayable(model, invariant=True), batch_of(LENGTHS)
    runs: list[list[Tensor]] = []
    for _ in range(3):
        model.zero_grad()
        more: dict[str, Any] = {"options": SHARED} if shares else {}
        response_log_probs(replay, batch, **more).values().sum().backward()
        runs.append([weights.grad.clone() for weights in model.parameters()])
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))


def test_float32_is_refused() -> None:
    with pytest.raises(ReplayError, match="invariant=True"):
        response_log_probs(replayable(tiny("Qwen3", torch.float32), invariant=True), batch_of(LENGTHS))
