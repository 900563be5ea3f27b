"""Shared prefixes on CUDA: attention over trees by every backend against a dense mask; models, each row alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs
from plain_torch import DEVICE, assert_as_good, assert_gradients, each_alone, gradients, needs_flash, with_gradients
from tensordict import TensorDict
from torch import Tensor

from maskpack import compress, nest_batch_by_mask
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops import attention
from maskpack.ops.attention import backend_for, packed_attention
from maskpack.planning import plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs

transformers = needs("transformers")

from maskpack.adapters.transformers import replayable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAD = 210

# -------------------------------------------------------------------- attention

TRIES = {
    "groups": [[b] * 130 + [100 + r] * (7 + 40 * r) for b in (1, 2, 3) for r in range(4)],
    "a prompt of one token": [[1] + [2 + r] * 65 for r in range(3)],
    "three levels": [[1] * 70 + [2 + r] * 33 + [5 + s] * (64 + s) for r in range(2) for s in range(3)] + [[9] * 20],
    "a deep trie": [[1] * (16 * n) + [2] * 5 for n in range(1, 13)],
    "nothing is shared": [[b] * 40 for b in range(4)],
}


def problem(rows: list[list[int]], tail: int, heads: tuple[int, int], size: int, dtype: torch.dtype) -> Any:
    ids, offsets = np.array([token for row in rows for token in row]), np.cumsum([0, *map(len, rows)])
    tree = PrefixTree.from_ids(ids, offsets)
    counts = [*tree.nodes.counts.tolist(), *[tail] * bool(tail)]
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    source = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(tree.num_tokens + tail, number, size) for number in (heads[0], heads[1], heads[1], heads[0])]
    *qkv, slope = (torch.randn(*x, generator=source, device=DEVICE).mul_(1.5).to(dtype) for x in shapes)
    return tree, bounds, max(counts), qkv, slope


def dense(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, window: int | None, softcap: float | None) -> Tensor:
    """All pairs of tokens, in the dtype of the inputs; each token sees the ones that its rows have before it."""
    tokens = q.shape[0]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device=DEVICE)
    own = tree.of_row_token
    rows = [own[a:b] for a, b in itertools.pairwise(tree.row_offsets)] + [np.arange(tree.num_tokens, tokens)]
    for row in rows:
        at = torch.from_numpy(row).to(DEVICE)
        place = torch.arange(at.numel(), device=DEVICE)
        apart = place[:, None] - place
        seen[at[:, None], at] |= (apart >= 0) & (apart < (window or tokens))
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def head_major(x: Tensor) -> Tensor:
    """Equal values, head after head in memory, as rotary embeddings that end in torch.cat leave them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def check(
    backend: Any,
    rows: list[list[int]],
    *,
    tail: int = 0,
    heads: tuple[int, int] = (8, 2),
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    turned: Collection[int] = (),
) -> None:
    """Errors are at most twice those of plain torch in the same dtype. `turned` of q, k and v are head-major."""
    tree, bounds, longest, qkv, slope = problem(rows, tail, heads, size, dtype)
    qkv = [head_major(x) if number in turned else x for number, x in enumerate(qkv)]

    def ours(*given: Tensor) -> Tensor:
        options: Any = {"scale": size**-0.5, "window": window, "softcap": softcap, "backend": backend, "tree": tree}
        return packed_attention(*given, bounds, longest, **options)

    seen = with_gradients(ours, qkv, slope)
    plain = with_gradients(lambda *given: dense(*given, tree, window, softcap), qkv, slope)
    truth = with_gradients(lambda *given: dense(*given, tree, window, softcap), [x.double() for x in qkv], slope)
    assert seen[0].dtype == dtype
    assert_as_good(seen, plain, truth, 1e-4 if dtype == torch.float32 else 1e-3)


BACKENDS = ["varlen", pytest.param("flash", marks=needs_flash), "rows"]


@pytest.mark.parametrize("window", [None, 1, 50, 1000])
@pytest.mark.parametrize("rows", TRIES.values(), ids=TRIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_trees(backend: Any, rows: list[list[int]], window: int | None) -> None:
    check(backend, rows, window=window, tail=13)


@pytest.mark.parametrize("turned", [[0], [1], [2], [0, 1, 2]], ids=["queries", "keys", "values", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ["groups", "three levels"])
@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
def test_queries_keys_and_values_may_be_head_major(
    backend: Any, rows: str, dtype: torch.dtype, turned: list[int]
) -> None:
    check(backend, TRIES[rows], tail=13, dtype=dtype, turned=turned)


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 64), ((3, 1), 128), ((4, 2), 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_other_heads_sizes_and_dtypes(
    backend: Any, dtype: torch.dtype, heads: tuple[int, int], size: int
) -> None:
    check(backend, TRIES["groups"], heads=heads, size=size, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "window", "softcap", "dtype"),
    [
        ("groups", None, None, torch.bfloat16),
        ("three levels", 50, None, torch.float32),
        ("a deep trie", None, 20.0, torch.bfloat16),
    ],
)
def test_flex_attention_over_trees(rows: str, window: Any, softcap: Any, dtype: torch.dtype) -> None:
    check("flex", TRIES[rows], window=window, softcap=softcap, dtype=dtype, tail=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_many_rows_are_not_lost(backend: Any) -> None:
    """A prefix of 512 rows, whose keys are copied for a window and whose gradients are of one sign."""
    rows = [[1] * 40 + [10 + r] * 4 for r in range(512)]
    tree, bounds, longest, (query, key, value), slope = problem(rows, 0, (4, 2), 64, torch.bfloat16)

    def slopes_of(dtype: torch.dtype) -> Tensor:
        leaf = value.to(dtype).requires_grad_()
        options: Any = {"scale": 0.125, "window": 30, "backend": backend if dtype == torch.bfloat16 else "rows"}
        out = packed_attention(query.to(dtype), key.to(dtype), leaf, bounds, longest, tree=tree, **options)
        return torch.autograd.grad(out, leaf, slope.abs().to(dtype))[0][:40]

    seen, truth = slopes_of(torch.bfloat16).double(), slopes_of(torch.float64)
    assert float((seen - truth).norm() / truth.norm()) < 0.01


def test_the_kernels_that_merge() -> None:
    tree, _, _, (query, *_), _ = problem(TRIES["groups"], 0, (8, 2), 64, torch.bfloat16)
    backend = backend_for(query, None)
    names = {"flash": ("Flash4", "TorchFlash"), "varlen": ("TorchFlash",)}
    assert type(attention._merging_kernel(query, backend, tree)).__name__ in names[backend]
    assert attention._merging_kernel(query.float(), backend_for(query.float(), None), tree) is None


# -------------------------------------------------------------------- models


def tiny(kind: str, dtype: torch.dtype) -> Any:
    """Two layers with weights so large that attention matters, and heads that every kernel takes."""
    sizes: dict[str, Any] = {
        "vocab_size": PAD + 1, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1,
        "attn_implementation": "sdpa", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "Gemma3Text":
        sizes |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()


def groups(prompts: list[int], responses: list[int], seed: int = 0) -> TensorDict:
    """A row for each prompt and response length, padded on both sides, on the device."""
    rng = np.random.default_rng(seed)
    width, tall = max(prompts) + 1, max(responses) + 2
    ids = torch.full((len(prompts) * len(responses), width + tall), PAD)
    mask = torch.zeros_like(ids)
    for group, prompt in enumerate(prompts):
        own = torch.from_numpy(rng.integers(0, PAD, prompt))
        for nth, response in enumerate(responses):
            row, real = group * len(responses) + nth, slice(width - prompt, width + response)
            ids[row, real] = torch.cat([own, torch.from_numpy(rng.integers(0, 3, response))])
            mask[row, real] = 1
    fields = {
        "prompts": ids[:, :width], "responses": ids[:, width:], "input_ids": ids, "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }  # fmt: skip
    return TensorDict({name: x.clone() for name, x in fields.items()}, [len(ids)]).to(DEVICE)


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
