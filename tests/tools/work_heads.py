"""What ranks do in the tests of output layers that are more than one weight: a model that FSDP2 shards, and heads that
are split over the ranks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import transformers
import work_rows
from lora_layer import with_lora
from samples import in_chunks
from tiny_models import TINY, scaled
from torch import Tensor
from torch.distributed.tensor import DTensor
from work_rows import alone, far, own_rows, passes_off, said_of

from maskpack.adapters.transformers import replayable
from maskpack.ops import Logits, packed_log_probs
from maskpack.replay import response_log_probs


def model_of(kind: str) -> Any:
    """With a scale or a cap, and an output layer with a bias and two adapters."""
    sizes: dict[str, Any] = TINY | {"hidden_size": 64, "tie_word_embeddings": False}
    torch.manual_seed(0)
    if kind == "scale":
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(logits_scaling=3.0, **sizes))
    else:
        more = {"head_dim": 16, "final_logit_softcapping": 4.0, "attn_implementation": "eager"}
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **more))
    return with_lora(scaled(model, 5), bias=True, one=4, two=2)


def sharded(kind: str) -> dict[str, float]:
    """How far log-probs are off those of each row alone, with gradients (of the mean over ranks) and without, where
    the root shards its weights again after each pass, and with a cap the output layer has shards of its own; and how
    many weights stay whole."""
    model = model_of(kind)
    plain = copy.deepcopy(model)
    work_rows.sharded(model, *model.model.layers, *[model.lm_head] * (kind == "cap"), reshard_after_forward=True)
    replay, batch = replayable(model), own_rows()
    truth = alone(plain, batch)
    off: dict[str, float] = {}
    with torch.no_grad():
        off["without gradients"] = far(response_log_probs(replay, batch, self_check=True), truth)
        off["whole"] = sum(not isinstance(weight, DTensor) for weight in model.parameters())
    off |= passes_off(replay, plain, batch, truth)
    with torch.no_grad():
        off["again"] = far(response_log_probs(replay, batch), truth)
    return off


# -------------------------------------------------------------------- heads that are split over ranks

BOUNDS = {1: (0, 41), 2: (0, 17, 41), 3: (0, 17, 17, 41)}


def _problem(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    source = torch.Generator().manual_seed(2)
    sizes = ((30, 6), (41, 6), (41,), (3, 6), (41, 3))  # hidden, weight, bias, lora_a, lora_b
    tensors = [torch.randn(size, generator=source).to(dtype) for size in sizes]
    return tensors, torch.randint(41, (30,), generator=source), torch.randn(2, 30, generator=source).double()


def _outputs(tensors: list[Any], ids: Tensor, parts: str, softcap: float | None, **options: Any) -> Any:
    bias, low, high = tensors[2:]
    logits = Logits(
        bias=bias if "bias" in parts else None,
        lora_a=low if "lora" in parts else None,
        lora_b=high if "lora" in parts else None,
        lora_scale=0.5,
        scale=0.3,
        softcap=softcap,
    )
    return packed_log_probs(*tensors[:2], ids, temperature=0.7, entropy=True, logits=logits, **options)


def split(dtype_name: str) -> float:
    """The largest difference of outputs and gradients from those of one process, over all parts."""
    dtype = getattr(torch, dtype_name)
    begin, end = BOUNDS[dist.get_world_size()][dist.get_rank() :][:2]
    off = 0.0
    for parts, softcap in itertools.product(("bias", "lora", "bias and lora", ""), (None, 2.0)):
        tensors, ids, factors = _problem(dtype)
        own = [x[begin:end] if at in (1, 2, 4) else x for at, x in enumerate(tensors)]
        results: list[list[Any]] = []
        for given, options in ((tensors, {}), (own, {"group": dist.group.WORLD})):
            leaves = [x.clone().requires_grad_() for x in given]
            with in_chunks(7 if options else None):
                out = _outputs(leaves, ids, parts, softcap, **options)
            sum((x.double() * factor).sum() for x, factor in zip(out, factors, strict=True)).backward()
            results.append([*(x.detach() for x in out), *(x.grad for x in leaves)])
        for at, (want, got) in enumerate(zip(*results, strict=True)):
            if got is None:
                assert want is None
                continue
            want = want[begin:end] if at - 2 in (1, 2, 4) else want
            off = max(off, float((got - want).abs().max()) if got.numel() else 0.0)
    return off


def differences() -> list[str]:
    """The errors where rank 1 has other options."""
    tensors, ids, _ = _problem(torch.float32)
    rank, said = dist.get_rank(), []
    plain, trained = tensors[3], tensors[3].clone().requires_grad_()
    for given in (
        [Logits(scale=1.0), Logits(scale=2.0)],
        [Logits(softcap=30.0), Logits()],
        [Logits(bias=tensors[2]), Logits()],
        [Logits(lora_a=tensors[3], lora_b=tensors[4]), Logits(lora_a=tensors[3][:2], lora_b=tensors[4][:, :2])],
        [Logits(lora_a=plain, lora_b=tensors[4]), Logits(lora_a=trained, lora_b=tensors[4])],
        [Logits(lora_a=plain, lora_b=tensors[4]), Logits(lora_a=plain, lora_b=tensors[4], lora_scale=2.0)],
        [Logits(), Logits(softcap=-1.0)],
    ):
        options = {"group": dist.group.WORLD, "logits": given[min(rank, 1)]}
        said.append(said_of(packed_log_probs, *tensors[:2], ids, **options))
    return said
