"""Random sequences of batches of changing kinds through one process, as it remembers plans: each is compressed and
decoded, and must be what it was.

A sequence has a few kinds: widths, dtypes, strides, masks, fields that follow from others, sub-batches, Python objects,
padded, jagged and nested batches, results under the layouts of another batch. A batch of a kind has rows, values and
lossy fields of its own. What is remembered is forgotten now and then, and some batches are worked on in threads.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import oracle
import torch
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import table

COUNT = 500
PAD = 7
KINDS, BATCHES = 4, 30
FORMS = ("padded", "jagged", "nested", "mixed", "result", "result under nested")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


class Kind(NamedTuple):
    """What batches have in common: `fields` are names, dtypes, words of an element, and whether they lie transposed."""

    form: str
    prompt: int
    response: int
    rows: int
    mask: torch.dtype
    alone: bool
    holes: bool
    fields: tuple[tuple[str, torch.dtype, tuple[int, ...], bool], ...]
    deep: bool
    objects: bool
    registry: dict[str, mp.MaskNestingSpec]


def kind_of(rng: np.random.Generator) -> Kind:
    """Some names are those of RL_FIELDS, whose hints name each other; `x0`, `x1`, ... are of a registry of its own."""
    names = ["old_log_probs", "rollout_log_probs", "advantages", "values", *(f"x{at}" for at in range(4))]
    chosen = [name for name in names if rng.random() < 0.5]
    fields: list[Any] = []
    registry = dict(mp.RL_FIELDS)
    for name in chosen:
        own = name[0] == "x" and name[1:].isdigit()
        dtype = DTYPES[rng.integers(len(DTYPES))] if own else torch.float32
        fields.append((name, dtype, (2,) if own and rng.random() < 0.3 else (), bool(own and rng.random() < 0.2)))
        if own:
            registry[name] = mp.MaskNestingSpec(["response", "sequence"], [0, 1])
    return Kind(
        FORMS[rng.integers(len(FORMS))],
        int(rng.integers(0, 6)),
        int(rng.integers(1, 9)),
        int(rng.choice([1, 3, 17])),
        (torch.int64, torch.bool, torch.float32)[rng.integers(3)],
        bool(rng.random() < 0.2),
        bool(rng.random() < 0.3),
        tuple(fields),
        bool(rng.random() < 0.2),
        bool(rng.random() < 0.3),
        registry,
    )


def padded(rng: np.random.Generator, kind: Kind, lossy: bool) -> TensorDict:
    rows = int(rng.integers(1, kind.rows + 1))
    before, behind = rng.integers(0, kind.prompt + 1, rows), rng.integers(0, kind.response + 1, rows)
    places = np.arange(kind.prompt)[None], np.arange(kind.response)[None]
    prompt, response = places[0] >= kind.prompt - before[:, None], places[1] < behind[:, None]
    holes = response & (rng.random(response.shape) < 0.7) if kind.holes else response
    on = torch.from_numpy(np.concatenate([prompt, response], 1))
    own = torch.from_numpy(response)
    ids = torch.from_numpy(rng.integers(0, 40_000, on.shape))
    ids = torch.where(on, ids, PAD)
    batch: dict[str, Any] = {"response_mask": torch.from_numpy(holes).to(kind.mask)}
    if kind.alone:
        own = torch.from_numpy(np.flip(np.maximum.accumulate(np.flip(holes, 1), 1), 1).copy())
    else:
        batch |= {"attention_mask": on.to(kind.mask), "prompts": ids[:, : kind.prompt].clone(), "input_ids": ids}
    batch["responses"] = torch.where(own, ids[:, kind.prompt :], PAD)
    for name, dtype, more, turned in kind.fields:
        x = torch.from_numpy(
            rng.integers(-3 if dtype.is_signed else 0, 2 if dtype is torch.bool else 99, (*own.shape, *more))
        )
        x = x.to(dtype) * (torch.rand(()).to(dtype) if dtype.is_floating_point else 1)
        x = torch.where(own.view(*own.shape, *[1] * len(more)), x, torch.zeros((), dtype=dtype))
        batch[name] = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
    out = TensorDict(batch, [rows])
    if lossy and kind.fields:
        x = batch[kind.fields[rng.integers(len(kind.fields))][0]]
        x.view(torch.uint8 if x.dtype is torch.bool else x.dtype)[rng.integers(rows), -1] = 1
    if kind.objects:
        out.set("temperature", NonTensorData(float(rng.random()), batch_size=[rows]))
    return TensorDict({"actor": out, "index": torch.arange(rows)}, [rows]) if kind.deep else out


def jagged(nested: TensorDict) -> TensorDict:
    return TensorDict({name: x for name, x in nested.items() if name != LAYOUTS}, nested.batch_size)


def check(rng: np.random.Generator, kind: Kind) -> str:
    """One batch of a kind; how it was sent."""
    options: dict[str, Any] = {"registry": kind.registry, "pad_token_id": PAD}
    whole = padded(rng, kind, bool(rng.random() < 0.15))
    want: Any = whole
    given: Any = whole
    like: Any = None
    if kind.form != "padded" and not (kind.deep and kind.form in ("jagged", "mixed")):
        nested = mp.nest_batch_by_mask(whole, **options)
        if kind.form.startswith("result") and not kind.alone and not kind.deep:
            like = nested if kind.form.endswith("nested") else mp.compress(whole, **options)
            given = want = whole.select("responses", *(name for name, *_ in kind.fields))
        elif kind.form == "nested":
            given = nested
        elif kind.form in ("jagged", "mixed"):
            given = want = jagged(nested)
            if kind.form == "mixed":
                given.set("index", torch.arange(len(whole)))
    packed = mp.compress(given, like=like, **options)
    oracle.assert_same_batch(mp.decompress(packed), want)
    rows = rng.integers(0, len(packed), 3).tolist()
    oracle.assert_same_batch(mp.decompress(pickle.loads(pickle.dumps(packed[rows]))), oracle.take_rows(want, rows))
    return kind.form


def play(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    kinds = [kind_of(rng) for _ in range(KINDS)]
    done: Counter[str] = Counter()
    table.forget()

    def one(number: int) -> str:
        own = np.random.default_rng([seed, number])
        return check(own, kinds[own.integers(len(kinds))])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
        for number in range(BATCHES):
            if rng.random() < 0.05:
                table.forget()
            done[one(number)] += 1
        with ThreadPoolExecutor(3) as pool:
            done.update(pool.map(one, range(BATCHES, 2 * BATCHES)))
    return done + Counter(batches=2 * BATCHES)
