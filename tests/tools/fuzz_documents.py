"""Batches whose rows hold several documents, told by positions, by the numbers of a mask, or by the bounds of one row:
log-probs of a replay, in float64, against each document alone in the plain model.

Documents come from a small pool, so that rows share them, and are cut, so that they share beginnings. Rows have padding
on both sides, and masked columns inside documents and between them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as tf
from rows_alone import gpt2
from tensordict import TensorDict
from tiny_models import TINY, VOCABULARY, gemma3, llama, pair, qwen3, qwen25_vl
from torch import Tensor

import maskpack as mp
from maskpack.adapters.transformers import replayable
from maskpack.errors import ReplayError
from maskpack.replay import ReplayOptions, response_log_probs

COUNT = 2000
LIMIT = 1e-10
TOLD = ("positions", "mask", "mask and positions", "mask, positions go on", "cu_seqlens", "seq_lens")
FORMS = ("padded", "nested", "packed")


def lfm2(**more: Any) -> Any:
    """Its first layer is a short convolution."""
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**TINY | {"layer_types": ["conv", "full_attention"]} | more))


MAKERS = {"qwen3": qwen3, "llama": llama, "gemma3": gemma3, "gpt2": gpt2, "qwen25_vl": qwen25_vl, "lfm2": lfm2}


@functools.cache
def models(name: str) -> tuple[Any, Any]:
    changed, plain = pair(MAKERS[name], torch.float64)
    return replayable(changed), plain


class Document(NamedTuple):
    """Its row, its columns, and its positions [n], or [3, n] for M-RoPE."""

    row: int
    columns: list[int]
    positions: np.ndarray


def a_batch(rng: np.random.Generator, told: str, sections: bool) -> tuple[TensorDict, list[Document]]:
    pool = [rng.integers(3, VOCABULARY, 9).tolist() for _ in range(3)]
    one = told in ("cu_seqlens", "seq_lens")
    rows = [
        [pool[rng.integers(3)][: rng.integers(1, 10)] for _ in range(rng.integers(1, 5))]
        for _ in range(1 if one else rng.integers(1, 5))
    ]
    holes = rng.random() < 0.4
    lines, documents = [], []
    for number, row in enumerate(rows):
        column, line, count = int(rng.integers(0, 3)), {}, 0
        for nth, document in enumerate(row):
            columns = []
            for token in document:
                column += int(holes and rng.random() < 0.2)
                line[column] = (token, nth + 1)
                columns.append(column)
                column += 1
            places = np.array(columns) - columns[0] if holes and rng.random() < 0.5 else np.arange(len(columns))
            if told == "mask, positions go on":
                places, count = np.arange(len(columns)) + count, count + len(columns)
            if sections:
                places = np.stack([places, places // 2, np.maximum(places - 2, 0)])
            documents.append(Document(number, columns, places))
        lines.append(line)
    width = max(max(line, default=0) for line in lines) + 1 + int(rng.integers(0, 3))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, line in enumerate(lines):
        for column, (token, nth) in line.items():
            ids[number, column] = token
            mask[number, column] = nth if told.startswith("mask") else 1
    loss = (mask > 0).long() * torch.from_numpy(rng.integers(0, 3, mask.shape) > 0)
    batch = TensorDict({"input_ids": ids, "attention_mask": mask, "loss_mask": loss}, [] if one else [len(rows)])
    if "positions" in told or sections:
        given = torch.zeros(len(rows), 3, width, dtype=torch.int64) if sections else torch.zeros_like(ids)
        for row, columns, places in documents:
            given[row][..., columns] = torch.from_numpy(places)
        batch["position_ids"] = given
    else:
        documents = [at._replace(positions=np.arange(len(at.columns))) for at in documents]
    lengths = torch.tensor([len(document.columns) for document in documents])
    if told == "cu_seqlens":
        batch["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    if told == "seq_lens":
        batch["seq_lens"] = lengths
    return batch, documents


@torch.no_grad()
def truth_of(plain: Any, batch: TensorDict, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """[B, S]: the log-probs of the scored tokens of each document alone, 0 elsewhere; and those that are scored but
    come first."""
    truth = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    first = torch.zeros(truth.shape, dtype=torch.bool)
    for row, columns, places in documents:
        ids = batch["input_ids"][row, columns][None]
        where = torch.from_numpy(places)
        where = where[None] if where.dim() == 1 else where[:, None]
        scores = plain(input_ids=ids, position_ids=where, attention_mask=torch.ones_like(ids), use_cache=False)
        scores = scores.logits[0].log_softmax(-1)
        for nth, column in enumerate(columns):
            if batch["loss_mask"][row, column] and nth:
                truth[row, column] = scores[nth - 1, ids[0, nth]]
            elif batch["loss_mask"][row, column]:
                first[row, column] = True
    return truth, first


def play(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    name, told, form = (str(rng.choice(names)) for names in ([*MAKERS], TOLD, FORMS))
    replay, plain = models(name)
    batch, documents = a_batch(rng, told, sections=name == "qwen25_vl")
    truth, first = truth_of(plain, batch, documents)
    given: Any = batch
    if form == "nested":
        given = mp.nest_batch_by_mask(batch, pad_token_id=0)
    elif form == "packed":
        given = mp.compress(batch, pad_token_id=0)
    share = bool(rng.random() < 0.4)
    options: dict[str, Any] = {"scored": ("loss_mask",), "share_prefixes": share, "min_shared": 1}
    kind = f"{name}: {told}, {form}{', shared' * share}"
    if first.any():
        with pytest.raises(ReplayError, match=r"no output scores|response but no prompt"):
            response_log_probs(replay, given, options=ReplayOptions(**options))
    skips: dict[str, Any] = {"no_prompt": "skip"} if first.any() else {}
    seen = response_log_probs(replay, given, options=ReplayOptions(**options, **skips))
    valid = batch["attention_mask"] > 0
    assert (seen.values() != 0).sum() == (truth != 0).sum(), kind
    off = float((seen.values().detach() - truth[valid]).abs().max()) if valid.any() else 0.0
    assert off <= LIMIT, f"{kind}: off by {off:.3g}"
    return Counter({kind.partition(":")[0]: 1, told: 1, form: 1, "documents": len(documents), "shared": int(share)})
