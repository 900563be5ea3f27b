"""Shared prefixes on CUDA: attention over trees by every backend against a dense mask; models, each row alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import plain_torch
import pytest
import torch
from needs import needs
from plain_torch import PAD, assert_gradients, check_attention, each_alone, gradients, needs_flash, padded, problem
from tensordict import TensorDict
from torch import Tensor

from maskpack import compress, nest_batch_by_mask
from maskpack.ops import attention
from maskpack.ops.attention import backend_for, packed_attention
from maskpack.planning import plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs

transformers = needs("transformers")

from maskpack.adapters.transformers import replayable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# -------------------------------------------------------------------- attention

TRIES = {
    "groups": [[b] * 130 + [100 + r] * (7 + 40 * r) for b in (1, 2, 3) for r in range(4)],
    "a prompt of one token": [[1] + [2 + r] * 65 for r in range(3)],
    "three levels": [[1] * 70 + [2 + r] * 33 + [5 + s] * (64 + s) for r in range(2) for s in range(3)] + [[9] * 20],
    "a deep trie": [[1] * (16 * n) + [2] * 5 for n in range(1, 13)],
    "nothing is shared": [[b] * 40 for b in range(4)],
}


BACKENDS = ["varlen", pytest.param("flash", marks=needs_flash), "rows"]


@pytest.mark.parametrize("window", [None, 1, 50, 1000])
@pytest.mark.parametrize("rows", TRIES.values(), ids=TRIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_trees(backend: Any, rows: list[list[int]], window: int | None) -> None:
    check_attention(backend, rows, window=window, tail=13)


@pytest.mark.parametrize("turned", [[0], [1], [2], [0, 1, 2]], ids=["queries", "keys", "values", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ["groups", "three levels"])
@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
def test_queries_keys_and_values_may_be_head_major(
    backend: Any, rows: str, dtype: torch.dtype, turned: list[int]
) -> None:
    check_attention(backend, TRIES[rows], tail=13, dtype=dtype, turned=turned)


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 64), ((3, 1), 128), ((4, 2), 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_other_heads_sizes_and_dtypes(
    backend: Any, dtype: torch.dtype, heads: tuple[int, int], size: int
) -> None:
    check_attention(backend, TRIES["groups"], heads=heads, size=size, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "window", "softcap", "dtype"),
    [
        ("groups", None, None, torch.bfloat16),
        ("three levels", 50, None, torch.float32),
        ("a deep trie", None, 20.0, torch.bfloat16),
    ],
)
def test_flex_attention_over_trees(rows: str, window: Any, softcap: Any, dtype: torch.dtype) -> None:
    check_attention("flex", TRIES[rows], window=window, softcap=softcap, dtype=dtype, tail=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_many_rows_are_not_lost(backend: Any) -> None:
    """A prefix of 512 rows, whose keys are copied for a window and whose gradients are of one sign."""
    rows = [[1] * 40 + [10 + r] * 4 for r in range(512)]
    (query, key, value), slope, bounds, longest, tree, _ = problem(rows, (4, 2), 64, torch.bfloat16)

    def slopes_of(dtype: torch.dtype) -> Tensor:
        leaf = value.to(dtype).requires_grad_()
        options: Any = {"scale": 0.125, "window": 30, "backend": backend if dtype == torch.bfloat16 else "rows"}
        out = packed_attention(query.to(dtype), key.to(dtype), leaf, bounds, longest, tree=tree, **options)
        return torch.autograd.grad(out, leaf, slope.abs().to(dtype))[0][:40]

    seen, truth = slopes_of(torch.bfloat16).double(), slopes_of(torch.float64)
    assert float((seen - truth).norm() / truth.norm()) < 0.01


def test_the_kernels_that_merge() -> None:
    (query, *_), _, _, _, tree, _ = problem(TRIES["groups"], (8, 2), 64, torch.bfloat16)
    backend = backend_for(query, None)
    names = {"flash": ("Flash4", "TorchFlash"), "varlen": ("TorchFlash",)}
    assert type(attention._merging_kernel(query, backend, tree)).__name__ in names[backend]
    assert attention._merging_kernel(query.float(), backend_for(query.float(), None), tree) is None


# -------------------------------------------------------------------- models


def tiny(kind: str, dtype: torch.dtype) -> Any:
    """Its heads are such as every kernel takes."""
    more = {"initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return plain_torch.tiny(kind, dtype, 32, **more)


def groups(prompts: list[int], responses: list[int], seed: int = 0) -> TensorDict:
    """A row for each prompt and response length."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in prompts:
        own = torch.from_numpy(rng.integers(0, PAD, prompt))
        rows += [(prompt, torch.cat([own, torch.from_numpy(rng.integers(0, 3, count))])) for count in responses]
    return padded(rows)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "Glm4", "Phi3", "GPTNeoX"])  # the last three turn heads
def test_log_probs_and_gradients_are_as_good_as_of_each_row_alone(
    kind: str, dtype: torch.dtype, checkpointed: bool
) -> None:
    batch = groups([30, 17, 64], [1, 30, 6, 75, 0, 12])
    model = tiny(kind, dtype)
    exact = copy.deepcopy(model).double()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    truth = each_alone(exact, batch)
    wanted = gradients(exact, truth)
    plain = each_alone(model, batch)
    theirs = gradients(model, plain)
    forms = batch, nest_batch_by_mask(batch, pad_token_id=PAD), compress(batch, pad_token_id=PAD), batch.cpu()
    for given in forms:
        out: Any = response_log_probs(
            replayable(model), given, self_check=True, options=ReplayOptions(share_prefixes=True)
        )
        ours = gradients(model, out.values())
        error, allowed = (float((x.detach().double() - truth).square().mean().sqrt()) for x in (out.values(), plain))
        assert error <= 1.5 * allowed + 5e-5
        assert ours.keys() == wanted.keys()
        assert_gradients(ours, theirs, wanted)


def test_a_plan_of_a_tree_gives_the_rows_in_order() -> None:
    batch = groups([30, 17, 64], [1, 30, 6, 75, 0, 12])
    model = tiny("Qwen3", torch.bfloat16)
    lengths, tree = batch["attention_mask"].sum(1).cpu(), prefix_tree(batch)
    whole: Any = response_log_probs(replayable(model), batch, options=ReplayOptions(share_prefixes=True))
    for budget in (150, 400):
        plan = plan_micro_batches(lengths, budget, tree=tree)
        parts: Any = response_log_probs(replayable(model), batch, plan=plan, options=ReplayOptions(share_prefixes=True))
        assert float((parts.values() - whole.values()).detach().abs().max()) < 0.2
        counted = [
            PackedInputs.of(part, options=ReplayOptions(share_prefixes=True)).num_tokens for part in plan.apply(batch)
        ]
        assert max(counted) <= budget
