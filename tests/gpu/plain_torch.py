"""What tests of replay on CUDA share: results of plain torch, and what makes ours as good as these.

Against a wide truth, our error may be twice that of plain torch in the same dtype, row by row; the largest four times,
because that is one rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attention_loops import head_major
from needs import needs
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack.layout.prefix_tree import PrefixTree
from maskpack.ops.attention import backend_for, packed_attention

transformers = needs("transformers")

DEVICE = torch.device("cuda")
PAD = 210
needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or backend_for(torch.empty(1, 1, 64, device=DEVICE).bfloat16(), None) != "flash",
    reason="needs flash-attn",
)


def with_gradients(call: Callable[..., Tensor], tensors: list[Tensor], slope: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def assert_as_good(seen: list[Tensor], plain: list[Tensor], truth: list[Tensor], least: float) -> None:
    for number, (x, y, z) in enumerate(zip(seen, plain, truth, strict=True)):
        assert x.shape == z.shape
        ours, theirs = ((one.double() - z).abs() for one in (x, y))
        for times, of in ((2, lambda off: off.square().mean().sqrt()), (4, torch.max)):
            error, allowed = float(of(ours)), float(of(theirs))
            assert error <= times * allowed + least, f"output {number}: {error} off, plain torch {allowed}"


# -------------------------------------------------------------------- attention


class Problem(NamedTuple):
    """Random queries, keys and values, what the gradient of the output is, and the places of the tokens of each row."""

    qkv: list[Tensor]
    slope: Tensor
    bounds: Tensor
    longest: int
    tree: PrefixTree | None
    rows: list[np.ndarray]


def problem(rows: Sequence[Any], heads: tuple[int, int], size: int, dtype: torch.dtype, tail: int = 0) -> Problem:
    """Of lengths of rows, or of rows of ids, which share prefixes."""
    if isinstance(rows[0], int):
        tree, counts = None, list(rows)
        paths = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    else:
        ids, offsets = np.array([token for row in rows for token in row]), np.cumsum([0, *map(len, rows)])
        tree = PrefixTree.from_ids(ids, offsets)
        counts = [*tree.nodes.counts.tolist(), *[tail] * bool(tail)]
        paths = [tree.of_row_token[a:b] for a, b in itertools.pairwise(tree.row_offsets)]
        paths.append(np.arange(tree.num_tokens, tree.num_tokens + tail))
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    source = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(sum(counts), number, size) for number in (heads[0], heads[1], heads[1], heads[0])]
    *qkv, slope = (torch.randn(*x, generator=source, device=DEVICE).mul_(1.5).to(dtype) for x in shapes)
    return Problem(qkv, slope, bounds, max(counts), tree, paths)


def dense(
    q: Tensor, k: Tensor, v: Tensor, rows: Sequence[np.ndarray], window: int | None, softcap: float | None
) -> Tensor:
    """All pairs of tokens, in the dtype of the inputs; each token sees the ones that its rows have before it."""
    tokens = q.shape[0]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device=DEVICE)
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


def check_attention(
    backend: Any,
    rows: Sequence[Any],
    heads: tuple[int, int] = (8, 2),
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    *,
    tail: int = 0,
    turned: Collection[int] = (),
) -> None:
    """Errors are at most twice those of plain torch in the same dtype. `turned` of q, k and v are head-major."""
    qkv, slope, bounds, longest, tree, paths = problem(rows, heads, size, dtype, tail)
    qkv = [head_major(x) if number in turned else x for number, x in enumerate(qkv)]

    def ours(*given: Tensor) -> Tensor:
        options: Any = {"scale": size**-0.5, "window": window, "softcap": softcap, "backend": backend, "tree": tree}
        return packed_attention(*given, bounds, longest, **options)

    seen = with_gradients(ours, qkv, slope)
    plain = with_gradients(lambda *given: dense(*given, paths, window, softcap), qkv, slope)
    truth = with_gradients(lambda *given: dense(*given, paths, window, softcap), [x.double() for x in qkv], slope)
    assert seen[0].dtype == dtype
    assert_as_good(seen, plain, truth, 1e-4 if dtype == torch.float32 else 1e-3)


# -------------------------------------------------------------------- models


def tiny(kind: str, dtype: torch.dtype, head_dim: int, **sizes: Any) -> Any:
    """Two layers with weights so large that attention matters."""
    sizes |= {
        "vocab_size": PAD + 1, "hidden_size": 4 * head_dim, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "attn_implementation": "sdpa",
    }  # fmt: skip
    if kind == "Gemma3Text":
        sizes |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()


def padded(rows: Sequence[tuple[int, Tensor]]) -> TensorDict:
    """Of the prompt's length and the ids of each row, padded on both sides, on the device."""
    width = max(prompt for prompt, _ in rows) + 1
    tall = max(len(row) - prompt for prompt, row in rows) + 2
    ids, mask = torch.full((len(rows), width + tall), PAD), torch.zeros(len(rows), width + tall, dtype=torch.int64)
    for b, (prompt, row) in enumerate(rows):
        real = slice(width - prompt, width - prompt + len(row))
        ids[b, real], mask[b, real] = row, 1
    fields = {
        "prompts": ids[:, :width], "responses": ids[:, width:], "input_ids": ids, "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }  # fmt: skip
    return TensorDict({name: x.clone() for name, x in fields.items()}, [len(rows)]).to(DEVICE)


def each_alone(model: nn.Module, batch: TensorDict) -> Tensor:
    """Packed log-probs of the responses, from a forward pass of each row without a pad."""
    found = []
    for ids, mask, response in zip(batch["input_ids"], batch["attention_mask"], batch["responses"], strict=True):
        real, count = ids[mask.bool()], int(mask[-response.numel() :].sum())
        logits = model(input_ids=real[None], use_cache=False).logits[0]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found += [wide[at].log_softmax(0)[real[at + 1]] for at in range(len(real) - count - 1, len(real) - 1)]
    return torch.stack(found)


def slopes_of(count: int) -> Tensor:
    return torch.linspace(-1, 1.5, count, device=DEVICE, dtype=torch.float64)


def gradients(model: nn.Module, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs.double() * slopes_of(log_probs.numel())).sum().backward()
    return {name: weight.grad.detach().clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in ours.items():
        error = float((gradient.double() - wanted[name]).norm() / wanted[name].norm())
        allowed = float((theirs[name].double() - wanted[name]).norm() / wanted[name].norm())
        assert error <= 2 * allowed + 1e-5, f"{name}: {error} off, each row alone {allowed}"
