"""from_engine against loops over the outputs of stand-ins, which have the attributes and keys of vLLM and SGLang."""

from __future__ import annotations

import base64
import random
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from needs import needs
from samples import padded
from tensordict import TensorDict

import maskpack as mp
from maskpack.errors import LayoutError
from maskpack.replay import PackedInputs
from maskpack.replay.options import ReplayOptions

PAD = 7
LAYERS, K = 2, 3


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class FlatLogprobs:
    """Candidates of all positions in flat lists, the sampled one first."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __len__(self):
        return len(self.start_indices)

    def append(self, candidates):
        self.start_indices.append(len(self.logprobs))
        self.token_ids += [token for token, _ in candidates]
        self.logprobs += [value for _, value in candidates]
        self.end_indices.append(len(self.logprobs))


@dataclass
class CompletionOutput:
    index: int
    token_ids: Any
    logprobs: Any = None
    routed_experts: Any = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: Any
    outputs: list[CompletionOutput]


@dataclass
class NewRequestOutput(RequestOutput):
    prompt_routed_experts: Any = None


@dataclass
class Row:
    """What a row holds, as lists."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float] | None = None
    experts: list[Any] | None = None  # of all tokens but the last


def rows_of(seed, prompts=4, each=3, *, log_probs=True, experts=False):
    """Rows of groups that share a prompt; some responses are empty."""
    source = random.Random(seed)

    def ids(least, most):
        return [source.randrange(50_000) for _ in range(source.randint(least, most))]

    made = []
    for _ in range(prompts):
        prompt = ids(1, 6)
        for _ in range(each):
            row = Row(prompt, ids(0, 9))
            if log_probs:
                row.log_probs = [-source.random() * 9 for _ in row.response]
            if experts:
                count = max(len(prompt) + len(row.response) - 1, 0)
                row.experts = [[source.sample(range(64), K) for _ in range(LAYERS)] for _ in range(count)]
            made.append(row)
    return made


def batch_of(rows, prompt_width=None, response_width=None):
    """The batch that a trainer pads, by loops."""
    p = max(len(row.prompt) for row in rows) if prompt_width is None else prompt_width
    r = max(len(row.response) for row in rows) if response_width is None else response_width
    prompts = padded([row.prompt for row in rows], pad=PAD, width=p, left=True)
    responses = padded([row.response for row in rows], pad=PAD, width=r)
    mask = padded([[1] * len(row.response) for row in rows], width=r)
    attention = torch.cat([padded([[1] * len(row.prompt) for row in rows], width=p, left=True), mask], 1)
    out = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
    }
    if rows[0].log_probs is not None:
        out["rollout_log_probs"] = padded([row.log_probs for row in rows], torch.float32, width=r)
    if rows[0].experts is not None:
        experts = [[*row.experts, [[-1] * K] * LAYERS][: len(row.prompt) + len(row.response)] for row in rows]
        parts = [(of[: len(row.prompt)], of[len(row.prompt) :]) for of, row in zip(experts, rows, strict=True)]
        heads, tails = zip(*parts, strict=True)
        kind = {"dtype": torch.int16, "trailing": (LAYERS, K)}
        out["routed_experts"] = torch.cat(
            [padded(heads, width=p, left=True, **kind), padded(tails, width=r, **kind)], 1
        )
    return TensorDict(out, batch_size=[len(rows)])


# -------------------------------------------------------------------- stand-ins


def dicts(row, source):
    """The sampled token among two others, in any order."""
    made = []
    for token, value in zip(row.response, row.log_probs, strict=True):
        candidates = {50_001: Logprob(-1.0), token: Logprob(value, 3), 50_002: Logprob(-2.0)}
        made.append(dict(source.sample(list(candidates.items()), 3)))
    return made


def flat(row, source):
    made = FlatLogprobs()
    for token, value in zip(row.response, row.log_probs, strict=True):
        made.append([(token, value), (50_001, -1.0)][: source.choice([1, 2])])
    return made


def columns(row, source):
    """As later releases have it: flat columns are arrays."""
    made = flat(row, source)
    made.token_ids, made.logprobs = np.array(made.token_ids, np.int32), np.array(made.logprobs, np.float32)
    return made


def floats(row, source):
    return [{token: value, 50_001: 0.0} for token, value in zip(row.response, row.log_probs, strict=True)]


FORMS = {
    "dicts": dicts,
    "flat": flat,
    "columns": columns,
    "floats": floats,
    "a list": lambda row, _: row.log_probs,
    "an array": lambda row, _: np.array(row.log_probs),
}


def array_of(experts, count=None):
    return np.array(experts[:count], np.int32).reshape(-1, LAYERS, K)


def vllm(rows, each=3, form=dicts, experts="whole"):
    source, made = random.Random(0), []
    for begin in range(0, len(rows), each):
        outputs, own = [], rows[begin : begin + each]
        for index, row in enumerate(own):
            log_probs = None if row.log_probs is None else form(row, source)
            routed = None
            if row.experts is not None:
                routed = array_of(row.experts)
                if experts == "split":
                    routed = routed[len(row.prompt) :]
            outputs.append(CompletionOutput(index, tuple(row.response), log_probs, routed))
        request = RequestOutput(own[0].prompt, outputs)
        if experts == "split":
            request = NewRequestOutput(own[0].prompt, outputs, array_of(own[0].experts, len(own[0].prompt)))
        made.append(request)
    return made


def sglang(rows, *, ids=True, prompts="none", experts="base64"):
    made = []
    for row in rows:
        about = {"prompt_tokens": len(row.prompt), "completion_tokens": len(row.response)}
        output = {"text": "", "meta_info": about}
        if ids:
            output["output_ids"] = row.response
        if row.log_probs is not None:
            about["output_token_logprobs"] = [
                (value, token, None) for value, token in zip(row.log_probs, row.response, strict=True)
            ]
        if prompts == "ids":
            output["prompt_token_ids"] = row.prompt
        if prompts == "log-probs":
            about["input_token_logprobs"] = [
                (None if at == 0 else -1.0, one, None) for at, one in enumerate(row.prompt)
            ]
        if row.experts is not None:
            routed = array_of(row.experts)
            as_text = base64.b64encode(routed.tobytes()).decode()
            about["routed_experts"] = {"base64": as_text, "arrays": routed, "flat": routed.reshape(len(routed), -1)}[
                experts
            ]
        made.append(output)
    return made


def assert_rows(packed, rows, **widths):
    expected = batch_of(rows, **widths)
    oracle.assert_same_batch(mp.decompress(packed), expected)
    theirs = mp.compress(expected, pad_token_id=PAD, strict_mask_nesting=True)
    assert packed.layouts == theirs.layouts
    nested = mp.decompress(packed, format="nested")
    oracle.assert_same_batch(mp.unnest_batch_by_mask(nested), expected)
    for (name,) in packed.forms:
        assert torch.equal(nested[name].values(), mp.decompress(theirs, name, format="nested")[name].values()), name
        assert packed.forms[name,].layout == theirs.forms[name,].layout


# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_vllm(form):
    for seed in range(20):
        rows = rows_of(seed)
        assert_rows(mp.from_engine(vllm(rows, form=form), pad_token_id=PAD), rows)


@pytest.mark.parametrize("prompts", ["ids", "log-probs", "each", "once"])
@pytest.mark.parametrize("ids", [True, False])
def test_sglang(prompts, ids):
    for seed in range(10):
        rows = rows_of(seed)
        given = {"each": [row.prompt for row in rows], "once": [row.prompt for row in rows[::3]]}.get(prompts)
        outputs = sglang(rows, ids=ids, prompts=prompts)
        assert_rows(mp.from_engine(outputs, prompts=given, pad_token_id=PAD), rows)


def test_without_log_probs():
    rows = rows_of(0, log_probs=False)
    packed = mp.from_engine(vllm(rows), pad_token_id=PAD)
    assert ("rollout_log_probs",) not in packed.forms
    assert_rows(packed, rows)
    other = mp.from_engine(sglang(rows, prompts="ids"), pad_token_id=PAD)
    assert_rows(other, rows)
    assert_rows(mp.PackedBatch.cat([packed, other]), rows * 2)  # as the error for outputs of two engines says


def test_ids_of_other_kinds():
    rows = rows_of(1, log_probs=False)
    kinds = [tuple, lambda ids: np.array(ids, np.int32), lambda ids: torch.tensor(ids, dtype=torch.int64), list]
    requests = [
        RequestOutput(kinds[at % 4](row.prompt), [CompletionOutput(0, kinds[at % 3](row.response))])
        for at, row in enumerate(rows)
    ]
    assert_rows(mp.from_engine(requests, pad_token_id=PAD), rows)


def test_prompts_of_vllm_may_be_given():
    rows = rows_of(2)
    outputs = vllm(rows)
    for one in outputs:
        one.prompt_token_ids = None
    assert_rows(mp.from_engine(outputs, prompts=[row.prompt for row in rows[::3]], pad_token_id=PAD), rows)


def test_widths():
    rows = rows_of(3)
    packed = mp.from_engine(vllm(rows), pad_token_id=PAD, prompt_width=16, response_width=40)
    assert_rows(packed, rows, prompt_width=16, response_width=40)
    joined = mp.PackedBatch.cat([packed, mp.from_engine(vllm(rows), pad_token_id=PAD, prompt_width=20)])
    oracle.assert_same_batch(mp.decompress(joined), batch_of(rows * 2, 20, 40))


@pytest.mark.parametrize("kind", ["whole", "split", "base64", "arrays", "flat"])
def test_routed_experts(kind):
    rows = rows_of(4, experts=True)
    for row in rows:  # experts of a prompt are those of its first row
        row.response = row.response or [5]
        row.log_probs = [-1.0] * len(row.response)
        more = len(row.prompt) + len(row.response) - 1
        row.experts = [[[(at + layer + k) % 64 for k in range(K)] for layer in range(LAYERS)] for at in range(more)]
    if kind in ("whole", "split"):
        packed = mp.from_engine(vllm(rows, experts=kind), pad_token_id=PAD)
    else:
        shape = None if kind == "arrays" else (LAYERS, K)
        packed = mp.from_engine(sglang(rows, prompts="ids", experts=kind), pad_token_id=PAD, experts_shape=shape)
    assert_rows(packed, rows)
    options = ReplayOptions(routed_experts=True)
    ours, theirs = (PackedInputs.of(one, options=options) for one in (packed, batch_of(rows)))
    assert torch.equal(ours.routed_experts.ids, theirs.routed_experts.ids)
    assert torch.equal(ours.input_ids, theirs.input_ids)


def test_experts_of_the_last_token_are_kept():
    routed = np.arange(18).reshape(3, LAYERS, K)
    one = RequestOutput([1, 2], [CompletionOutput(0, [3], None, routed)])
    assert mp.decompress(mp.from_engine([one]))["routed_experts"].tolist() == [routed.tolist()]


@pytest.mark.parametrize("rows", [[Row([4], [])], [Row([], []), Row([], [3])], [Row([1, 2], [3])]])
def test_rows_without_tokens(rows):
    for row in rows:
        row.log_probs = [-0.5] * len(row.response)
    assert_rows(mp.from_engine(vllm(rows, each=1), pad_token_id=PAD), rows)


ABORTED = {
    "nothing": CompletionOutput(0, []),
    "empty fields": CompletionOutput(0, [], [], routed_experts=None),
    "no tokens": {"output_ids": [], "meta_info": {}},
    "no ids": {"text": "", "meta_info": {"completion_tokens": 0}},
    "never begun": {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}},
}


@pytest.mark.parametrize("aborted", ABORTED.values(), ids=ABORTED)
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("fields", [True, False])
def test_an_aborted_completion_agrees_with_all(aborted, at, fields):
    """The experts of its prompt are -1: the router chooses."""
    rows = [row for row in rows_of(6, log_probs=fields, experts=fields) if row.response]
    prompt = rows[at].prompt
    rows[at] = Row(prompt, [], *([], [[[-1] * K] * LAYERS] * (len(prompt) - 1)) if fields else ())
    outputs = sglang(rows, experts="arrays") if isinstance(aborted, dict) else vllm(rows, each=1)
    outputs[at] = aborted if isinstance(aborted, dict) else RequestOutput(prompt, [aborted])
    assert_rows(mp.from_engine(outputs, prompts=[row.prompt for row in rows], pad_token_id=PAD), rows)
    alone = mp.from_engine(outputs[at : at + 1], prompts=[prompt], pad_token_id=PAD)
    assert mp.decompress(alone)["responses"].shape == (1, 0)


def test_replay_takes_it():
    transformers = needs("transformers")
    from maskpack.adapters.transformers import replayable

    config = transformers.Qwen3Config(
        vocab_size=101, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = replayable(transformers.Qwen3ForCausalLM(config))
    rows = rows_of(5)
    for row in rows:
        row.prompt, row.response = ([token % 101 for token in ids] for ids in (row.prompt, row.response))
    packed = mp.from_engine(vllm(rows), pad_token_id=PAD)
    seen = mp.replay.response_log_probs(model, packed)
    expected = mp.replay.response_log_probs(model, batch_of(rows))
    assert torch.equal(seen.values(), expected.values())
    assert seen.offsets().diff().tolist() == [len(row.response) for row in rows]
    assert torch.equal(
        seen.offsets(), mp.decompress(packed, "rollout_log_probs", format="nested")["rollout_log_probs"].offsets()
    )


def test_other_fields_join_and_files_hold_it():
    rows = rows_of(8)
    packed = mp.from_engine(vllm(rows), pad_token_id=PAD)
    advantages = batch_of(rows)["rollout_log_probs"] * 2
    more = mp.compress(TensorDict({"advantages": advantages}, [len(rows)]), like=packed, strict_mask_nesting=True)
    assert more.layouts["response"] == packed.layouts["response"]
    oracle.assert_same_tensor(mp.decompress(more)["advantages"], advantages)
    assert_rows(mp.PackedBatch.from_bytes(packed.to_bytes()), rows)
    expected = batch_of(rows)[torch.tensor([5, 0, 0])]
    oracle.assert_same_batch(mp.decompress(packed[[5, 0, 0]]), expected)


# -------------------------------------------------------------------- errors


def one(**more: Any) -> RequestOutput:
    request = RequestOutput([1, 2], [CompletionOutput(0, [3, 4])])
    for name, value in more.items():
        setattr(request.outputs[0] if hasattr(request.outputs[0], name) else request, name, value)
    return request


def told(**about: Any) -> dict[str, Any]:
    return {"output_ids": [3, 4], "prompt_token_ids": [1, 2], "meta_info": about}


def chosen(*tokens: int) -> list[Any]:
    """As SGLang has log-probs of these tokens."""
    return [(-1.0, token, None) for token in tokens]


def routed(*shape: int, fill: Any = 0) -> np.ndarray:
    return np.full(shape, fill)


PARTIAL = {"output_ids": [1], "meta_info": {"prompt_tokens": 3, "input_token_logprobs": chosen(5)}}
TEXT = base64.b64encode(bytes(72)).decode()
WRONG = {
    "[]": "outputs are a list; expected a list of at least one",
    "told()": "outputs are a dict; expected a list",
    "['a']": "output 0 is 'a'; expected a RequestOutput of vLLM, or a dict",
    "[one(), one(prompt_token_ids=None)]": (
        '"prompt_token_ids" of output 1 is None; expected the ids of the prompt. Pass prompts=.'
    ),
    "[{'output_ids': [1], 'meta_info': {'prompt_tokens': 3}}]": (
        '"prompt_token_ids" of output 0 is None; expected the ids of the prompt. Pass prompts=, or return_prompt_'
    ),
    "[PARTIAL]": '"prompt_token_ids" of output 0 is None',
    "[told(prompt_tokens=2), told(prompt_tokens=2)], prompts=[[1, 2], [1]]": (
        '"prompt_tokens" of output 1 is 2; expected the 1 tokens of its prompt. Pass prompts in the order'
    ),
    "[told(), told(), told()], prompts=[[1], [2]]": "2 prompts for 3 outputs; expected one for each",
    "[one(), one()], prompts=[[1]]": "1 prompts for 2 outputs",
    "[{'text': 'x', 'meta_info': {}}]": (
        '"output_ids" of output 0 is None; expected the ids of the completion. Update SGLang'
    ),
    "[one(token_ids=[1, -2])]": '"token_ids" of output 0, completion 0 is -2; expected ids from 0 that int64 holds',
    "[one(prompt_token_ids=np.array([-1, 2]))]": '"prompt_token_ids" of output 0 is -1; expected ids from 0',
    "[{'output_ids': [-1], 'prompt_token_ids': [1]}]": '"output_ids" of output 0 is -1; expected ids from 0',
    "[told()], prompts=[[-5]]": '"prompt_token_ids" of output 0 is -5; expected ids from 0',
    "[one(token_ids=[1, True])]": '"token_ids" of output 0, completion 0 is a list with bools; expected integers',
    "[one(token_ids=(np.True_, False))]": '"token_ids" of output 0, completion 0 is a ',
    "[one(), told()]": "output 1 is a dict, and output 0 a RequestOutput; expected outputs of one engine. Pack",
    "[told(), one()]": "output 1 is a RequestOutput, and output 0 a dict; expected outputs of one engine. Pack",
    "[{'text': 'x', 'meta_info': {'finish_reason': {'type': 'abort'}}}]": '"output_ids" of output 0 is None',
    "[one(token_ids=[1.5])]": '"token_ids" of output 0, completion 0 is a list (',
    "[one(token_ids=np.array([1.5]))]": (
        '"token_ids" of output 0, completion 0 is float64 (1,); expected integers (n,)'
    ),
    "[one(token_ids=np.array([[1]]))]": "is int64 (1, 1); expected",
    "[one(), one(logprobs=[{3: Logprob(-1.0)}])]": (
        '"logprobs" of output 1, completion 0 is 1 positions; expected 2, the tokens'
    ),
    "[one(logprobs=[{3: Logprob(-1.0)}, {5: Logprob(-1.0)}])]": (
        '"logprobs" of output 0, completion 0 is candidates without a sampled token or its log-prob (4); expected'
    ),
    "[one(logprobs=[-1.0, None])]": '"logprobs" of output 0, compl',
    "[one(logprobs=FlatLogprobs([0, 1], [1, 2], [3, 9], [-1.0, -2.0]))]": (
        "is other tokens at position 1; expected token 4 first"
    ),
    "[one(logprobs=[{3: Logprob(-1.0)}, {4: -1.0}])]": (
        '"logprobs" of output 0, completion 0 is candidates without a sampled token or its log-prob'
    ),
    "[one(logprobs=FlatLogprobs([0], [1], [3], [-1.0]))]": "is 1 positions; expected 2",
    "[one(), one(logprobs=[-1.0, -2.0])]": (
        "log_probs of output 1, completion 0 are some for each token (), and of output 0, completion 0 none; expected"
    ),
    "[told(output_token_logprobs=chosen(3, 5))]": (
        '"output_token_logprobs" of output 0 is 2 tokens; expected the 2 of output_ids, which differ at 1'
    ),
    "[told(output_token_logprobs=chosen(3, 4, 5))]": (
        "is 3 tokens; expected the 2 of output_ids, which differ at the end"
    ),
    "[one(routed_experts=routed(2, 2, 3))]": (
        '"routed_experts" of output 0, completion 0 is (2, 2, 3); expected (4 or 3, layers, k), of all tokens'
    ),
    "[one(routed_experts=routed(4, 2, 3, fill=0.0))]": "is float64; expected integers",
    "[one(routed_experts=routed(4, 2, 3, fill=40_000))]": (
        "is ids from 0 to 40000; expected experts up to 32767, or -1"
    ),
    "[told(routed_experts=TEXT)]": (
        '"routed_experts" of output 0 is 18 flat ids; expected [tokens, layers, k], or experts_shape=. Pass'
    ),
    "[told(routed_experts=TEXT)], experts_shape=(4, 2)": "is 18 flat ids; expected a multiple of 4 x 2",
    "[told(routed_experts='?')], experts_shape=(2, 3)": (
        '"routed_experts" of output 0 is no base64 of int32, and no array ('
    ),
    "[one(routed_experts=routed(4, 2, 3)), one(routed_experts=routed(4, 3, 3))]": (
        "experts of output 1, completion 0 are some for each token (3, 3), and of output 0, completion 0 some"
    ),
    "[one()], response_width=1": (
        "response_width is 1, and output 0, completion 0 has 2 tokens; expected at least as many"
    ),
    "[one()], experts_shape=(3,)": "experts_shape is a tuple",
    "[one()], pad_token_id='x'": "pad_token_id is 'x'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_errors(arguments):
    with pytest.raises(LayoutError, match=re.escape(WRONG[arguments])) as error:
        eval(f"mp.from_engine({arguments})")
    assert str(error.value).startswith("from_engine: ")


def test_outputs_are_not_changed():
    """And the rows share no memory with them."""
    prompt, response = np.array([1, 2]), np.array([3, 4, 5])
    log_probs, routed = -np.ones(3, np.float32), np.ones((4, LAYERS, K), np.int16)
    given = prompt, response, log_probs, routed
    before = [array.copy() for array in given]
    packed = mp.from_engine([RequestOutput(prompt, [CompletionOutput(0, response, log_probs, routed)])])
    assert all(np.array_equal(one, other) for one, other in zip(given, before, strict=True))
    held = mp.decompress(packed)
    for array in given:
        array[:] = 9
    oracle.assert_same_batch(mp.decompress(packed), held)
