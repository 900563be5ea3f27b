"""from_engine: what a rollout engine returns, as a packed batch.

    vLLM     request.prompt_token_ids, request.outputs[i].token_ids, .logprobs, .routed_experts       objects
    SGLang   {"output_ids", "prompt_token_ids", "meta_info": {"output_token_logprobs", "routed_experts"}}

                              row     p p r r r      p prompt, r response tokens, side by side
    each completion is a row  padded  . p p | r r r . .      prompts are padded on the left, responses on the right

Both are read by the names of their attributes and keys; neither engine is imported. No padded tensor is made.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, getitem
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch

from maskpack.core.arguments import said, whole
from maskpack.core.bits import words
from maskpack.core.index import IntArray, ranges
from maskpack.core.pads import EDGE, Pads, PadValue
from maskpack.core.tree import Node
from maskpack.errors import LayoutError
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.schema import FieldForm, Schema
from maskpack.packed.batch import PackedBatch
from maskpack.packed.rows import Rows
from maskpack.packed.table import of_values

_CALL = "from_engine"
_MOST_EXPERTS = np.iinfo(np.int16).max
_KINDS = {"iu": "integers", "f": "floats"}


class _Row(NamedTuple):
    """A completion.

    Attributes:
        name: what errors call it.
        prompt, response: int64 [p] and [r].
        log_probs: float32 [r], or None.
        experts: int16 [p + r, layers, k], or None.
    """

    name: str
    prompt: IntArray
    response: IntArray
    log_probs: Any
    experts: Any


def from_engine(
    outputs: Sequence[Any],
    *,
    prompts: Sequence[Any] | None = None,
    pad_token_id: int = 0,
    prompt_width: int | None = None,
    response_width: int | None = None,
    experts_shape: tuple[int, int] | None = None,
) -> PackedBatch:
    """Packs what vLLM or SGLang generated: a row for each completion, those of a prompt one after the other.

    Args:
        outputs: requests of vLLM (`RequestOutput`), with one or several completions each, or dicts of SGLang, one for
            each completion.
        prompts: the token ids of the prompts, where the outputs do not have them: one for each output, or, for SGLang
            with n > 1, one for each n outputs. By default those of the outputs: `prompt_token_ids`, or the ids of
            SGLang's `input_token_logprobs` if these begin with the prompt.
        pad_token_id: what `decompress` puts where no token is.
        prompt_width, response_width: P and R of the padded batch; by default those of the longest rows.
        experts_shape: (layers, k) of routed experts that come without a shape, as SGLang's base64 text.

    Returns:
        PackedBatch of B rows with the fields of RL_FIELDS. int64: `prompts` [B, P], `responses` [B, R], `input_ids`,
        `attention_mask` and `position_ids` [B, P + R], `response_mask` [B, R]. If the engine returned them, also
        `rollout_log_probs` float32 [B, R], of the tokens that were sampled, and `routed_experts` int16
        [B, P + R, layers, k], which are -1 at a last token that the engine did not run, and at a
        prompt whose completion has no tokens and no experts.

    A completion without tokens, as of an aborted request, is a row with an empty response, whether it has log-probs and
    experts or not.

    Raises:
        LayoutError: no outputs, or neither of vLLM nor of SGLang; a prompt, ids, log-probs or experts that are missing
            in some rows, or of another type, length or range; a row longer than its width.
    """
    if not isinstance(outputs, Sequence) or isinstance(outputs, str | bytes) or not outputs:
        raise LayoutError(
            f"{_CALL}: outputs are {said(outputs)}; expected a list of at least one. Pass what generate returned."
        )
    shape = None if experts_shape is None else _shape_of(experts_shape)
    rows = list(_rows_of(outputs, prompts, shape))
    if not rows:
        raise LayoutError(
            f"{_CALL}: the {len(outputs)} outputs hold no completion; expected at least one. "
            "Leave aborted requests out."
        )
    rows = _alike(rows)
    widths = (
        _width("prompt_width", prompt_width, [row.prompt.size for row in rows], rows),
        _width("response_width", response_width, [row.response.size for row in rows], rows),
    )
    return _packed(rows, *widths, whole(pad_token_id, "pad_token_id", -(1 << 62), _CALL))


# -------------------------------------------------------------------- what engines return


def _rows_of(outputs: Sequence[Any], prompts: Any, shape: tuple[int, int] | None) -> Iterator[_Row]:
    each = 1
    if prompts is not None:
        listed: bool = isinstance(cast("object", prompts), Sequence) or hasattr(prompts, "__array__")
        count = len(prompts) if listed else 0
        each = len(outputs) // count if count and isinstance(outputs[0], Mapping) else 1
        if count * each != len(outputs):
            raise LayoutError(
                f"{_CALL}: {count} prompts for {len(outputs)} outputs; expected one for each, or, of SGLang, one for "
                "each n outputs. Pass the prompts in the order of the outputs."
            )
    first = isinstance(outputs[0], Mapping)
    for number, output in enumerate(outputs):
        if isinstance(output, Mapping) != first and (hasattr(output, "outputs") or not first):
            seen, other = ("a RequestOutput", "a dict") if first else ("a dict", "a RequestOutput")
            raise LayoutError(
                f"{_CALL}: output {number} is {seen}, and output 0 {other}; expected outputs of one engine. Pack "
                "those of each engine alone, and join them with PackedBatch.cat."
            )
        given = None if prompts is None else prompts[number // each]
        name = f"output {number}"
        if isinstance(output, Mapping):
            yield _of_sglang(cast("Mapping[str, Any]", output), given, name, shape)
        elif hasattr(output, "outputs"):
            yield from _of_vllm(output, given, name, shape)
        else:
            raise LayoutError(
                f"{_CALL}: {name} is {said(output)}; expected a RequestOutput of vLLM, or a dict of SGLang. Pass what "
                "generate returned."
            )


def _of_vllm(request: Any, given: Any, name: str, shape: tuple[int, int] | None) -> Iterator[_Row]:
    prompt = given if given is not None else getattr(request, "prompt_token_ids", None)
    if prompt is None:
        _fail(name, "prompt_token_ids", None, "the ids of the prompt", "Pass prompts=")
    ids = _numbers(prompt, "iu", name, "prompt_token_ids")
    before = getattr(request, "prompt_routed_experts", None)
    completions: Any = request.outputs
    if not isinstance(completions, Sequence) or not all(hasattr(one, "token_ids") for one in cast("Any", completions)):
        _fail(name, "outputs", said(completions), "a list of completions with token_ids", "Pass what generate returned")
    for completion in cast("Any", completions):
        own = f"{name}, completion {getattr(completion, 'index', 0)}"
        response = _numbers(completion.token_ids, "iu", own, "token_ids")
        log_probs, routed = (getattr(completion, field, None) for field in ("logprobs", "routed_experts"))
        experts = None
        if routed is not None:
            parts = [routed] if before is None else [before, routed]
            experts = _experts(parts, ids.size + response.size, own, shape)
        yield _Row(own, ids, response, None if log_probs is None else _sampled(log_probs, response, own), experts)


def _of_sglang(output: Mapping[str, Any], given: Any, name: str, shape: tuple[int, int] | None) -> _Row:
    about: Any = output.get("meta_info") or {}
    if not isinstance(about, Mapping):
        _fail(name, "meta_info", said(about), "a dict", "Pass what generate returned")
    about = cast("Mapping[str, Any]", about)
    pairs, count = about.get("output_token_logprobs"), about.get("prompt_tokens")
    response, log_probs = output.get("output_ids"), None
    if pairs is not None:
        values, own = _pairs(pairs, name, "output_token_logprobs")
        log_probs = _numbers(values, "f", name, "output_token_logprobs")
        response = _numbers(own if response is None else response, "iu", name, "output_ids")
        if response.tolist() != own:
            at = next((at for at, ids in enumerate(zip(own, response, strict=False)) if ids[0] != ids[1]), "the end")
            wanted = f"the {response.size} of output_ids, which differ at {at}"
            _fail(name, "output_token_logprobs", f"{len(own)} tokens", wanted)
    elif response is None and _never_begun(output, about):
        response = np.zeros(0, np.int64)
    elif response is None:
        _fail(name, "output_ids", None, "the ids of the completion", "Update SGLang, or pass return_logprob=True to it")
    else:
        response = _numbers(response, "iu", name, "output_ids")
    prompt, known = given, about.get("input_token_logprobs")
    if prompt is None:
        prompt = output.get("prompt_token_ids")
    if prompt is None and hasattr(known, "__len__") and len(known) == count:
        prompt = _pairs(known, name, "input_token_logprobs")[1]
    if prompt is None:
        remedy = "Pass prompts=, or return_prompt_token_ids=True to SGLang"
        _fail(name, "prompt_token_ids", None, "the ids of the prompt", remedy)
    ids = _numbers(prompt, "iu", name, "prompt_token_ids")
    if count is not None and count != ids.size:
        remedy = "Pass prompts in the order of outputs"
        _fail(name, "prompt_tokens", count, f"the {ids.size} tokens of its prompt", remedy)
    routed = about.get("routed_experts")
    experts = None if routed is None else _experts([routed], ids.size + response.size, name, shape)
    return _Row(name, ids, response, log_probs, experts)


def _never_begun(output: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether SGLang says that it generated no token, or aborted a request of which it has no text."""
    tokens, reason = about.get("completion_tokens"), about.get("finish_reason")
    aborted = isinstance(reason, Mapping) and cast("Mapping[str, Any]", reason).get("type") == "abort"
    return tokens == 0 or (tokens is None and aborted and not output.get("text"))


def _pairs(pairs: Any, name: str, field: str) -> tuple[list[Any], list[Any]]:
    """The log-probs and the token ids of SGLang's (log-prob, id, text)."""
    try:
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    except (TypeError, LookupError):
        _fail(name, field, said(pairs), "a list of (log-prob, token id, text)")


def _sampled(log_probs: Any, ids: IntArray, name: str) -> Any:
    """float32 [r]: the log-probs of sampled tokens, from vLLM's: flat lists of the candidates of all positions, the
    sampled one first; a dict of candidates for each position; or a number for each."""
    if hasattr(log_probs, "start_indices"):
        firsts = _numbers(log_probs.start_indices, "iu", name, "logprobs.start_indices")
        tokens = _numbers(log_probs.token_ids, "iu", name, "logprobs.token_ids")
        if firsts.size != ids.size:
            _fail(name, "logprobs", f"{firsts.size} positions", f"{ids.size}, the tokens")
        if not ((firsts >= 0) & (firsts < tokens.size)).all():
            _fail(name, "logprobs.start_indices", "out of range", f"places of {tokens.size} candidates", "Fix it")
        odd = np.flatnonzero(tokens[firsts] != ids)
        if odd.size:
            at = int(odd[0])
            _fail(name, "logprobs", f"other tokens at position {at}", f"token {ids[at]} first")
        numbers = _numbers(log_probs.logprobs, "f", name, "logprobs.logprobs")
        if numbers.size != tokens.size:
            _fail(name, "logprobs", f"{numbers.size} log-probs", f"one for each of {tokens.size} candidates", "Fix it")
        return numbers[firsts]
    listed: bool = isinstance(log_probs, Sequence | np.ndarray)
    if not listed:
        _fail(name, "logprobs", said(log_probs), "one for each token")
    if len(log_probs) != ids.size:
        _fail(name, "logprobs", f"{len(log_probs)} positions", f"{ids.size}, the tokens")
    if not ids.size or not isinstance(log_probs[0], Mapping):
        return _numbers(log_probs, "f", name, "logprobs")
    try:
        values: list[Any] = list(map(getitem, log_probs, ids.tolist()))
        values = list(map(attrgetter("logprob"), values)) if hasattr(values[0], "logprob") else values
    except (KeyError, TypeError, AttributeError) as error:
        seen = f"candidates without a sampled token or its log-prob ({error})"
        _fail(name, "logprobs", seen, "a log-prob of each sampled token")
    return _numbers(values, "f", name, "logprobs")


def _experts(parts: Sequence[Any], tokens: int, name: str, shape: tuple[int, int] | None) -> Any:
    """int16 [tokens, layers, k], from arrays of these dims or flat ones, or int32 in base64. An engine may leave out
    the last token, which it does not run."""
    arrays = [_array(part, name, shape) for part in parts]
    if len({array.shape[1:] for array in arrays}) > 1 or sum(map(len, arrays)) not in (tokens, tokens - 1):
        seen = " and ".join(str(array.shape) for array in arrays)
        _fail(name, "routed_experts", seen, f"({tokens} or {tokens - 1}, layers, k), of all tokens")
    ids = np.concatenate(arrays)
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < -1 or high > _MOST_EXPERTS:
        _fail(name, "routed_experts", f"ids from {low} to {high}", f"experts up to {_MOST_EXPERTS}, or -1")
    out = np.full((tokens, *ids.shape[1:]), -1, np.int16)
    out[: len(ids)] = ids
    return out


def _array(part: Any, name: str, shape: tuple[int, int] | None) -> Any:
    """Integers [n, layers, k]."""
    try:
        text = isinstance(part, str | bytes)
        ids: Any = np.frombuffer(base64.b64decode(part, validate=True), "<i4") if text else np.asarray(part)
    except (TypeError, ValueError) as error:
        _fail(name, "routed_experts", f"no base64 of int32, and no array ({error})", "one of them")
    if ids.dtype.kind not in "iu":
        _fail(name, "routed_experts", f"{ids.dtype}", "integers")
    if ids.ndim == 3:
        return ids
    if shape is None or ids.size % (shape[0] * shape[1]):
        expected = (
            "[tokens, layers, k], or experts_shape=" if shape is None else f"a multiple of {shape[0]} x {shape[1]}"
        )
        _fail(name, "routed_experts", f"{ids.size} flat ids", expected, "Pass experts_shape=(layers, k) of the model")
    return ids.reshape(-1, *shape)


def _numbers(values: Any, kind: str, name: str, field: str) -> Any:
    """int64 or float32 [n], from a list or an array. A list of floats is not taken for integers."""
    integers = kind == "iu"
    found: Any
    if isinstance(values, list | tuple):
        try:
            found = np.array(array("q" if integers else "f", cast("Any", values)))
        except (TypeError, OverflowError) as error:
            _fail(name, field, f"a list ({error})", _KINDS[kind])
        if integers and found.size and found.max() <= 1 and bool in set(map(type, cast("Any", values))):
            _fail(name, field, "a list with bools", _KINDS[kind])
    else:
        found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in kind):
        _fail(name, field, f"{found.dtype} {found.shape}", f"{_KINDS[kind]} (n,)")
    if integers and found.size and not 0 <= found.min() <= found.max() <= np.iinfo(np.int64).max:
        odd = found.min() if found.min() < 0 else found.max()
        _fail(name, field, str(int(odd)), "ids from 0 that int64 holds")
    return found.astype(np.int64 if integers else np.float32)


def _fail(name: str, field: str, seen: Any, expected: str, remedy: str = "Fix the producer") -> NoReturn:
    raise LayoutError(f'{_CALL}: "{field}" of {name} is {seen}; expected {expected}. {remedy}.')


# -------------------------------------------------------------------- rows


def _shape_of(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, tuple | list) or len(cast("Any", shape)) != 2:
        raise LayoutError(f"{_CALL}: experts_shape is {said(shape)}; expected (layers, k). Give two numbers.")
    layers, k = (whole(one, "experts_shape", 1, _CALL) for one in cast("Any", shape))
    return layers, k


def _alike(rows: list[_Row]) -> list[_Row]:
    """The rows, all with the same fields: a completion without tokens gets those of the others, -1 as the experts of
    its prompt. Raises LayoutError for fields that some rows have and others do not, and experts of different shapes."""
    for field, dtype in (("log_probs", np.float32), ("experts", np.int16)):
        seen = [None if (own := getattr(row, field)) is None else own.shape[1:] for row in rows]
        telling = [at for at, row in enumerate(rows) if row.response.size]
        telling = telling or [at for at, one in enumerate(seen) if one is not None] or [0]
        first, shape = rows[telling[0]], seen[telling[0]]
        odd = next((at for at in telling if seen[at] != shape), None)
        if odd is not None:
            said_of = [("none" if one is None else f"some for each token {one}") for one in (seen[odd], shape)]
            raise LayoutError(
                f"{_CALL}: {field} of {rows[odd].name} are {said_of[0]}, and of {first.name} {said_of[1]}; expected "
                "the same for all. Generate all rows with the same options."
            )
        for at, row in enumerate(rows):
            if seen[at] != shape:
                tokens = row.prompt.size if field == "experts" else 0
                unknown = None if shape is None else np.full((tokens, *shape), -1, dtype)
                rows[at] = row._replace(**{field: unknown})
    return rows


def _width(name: str, width: int | None, lengths: Sequence[int], rows: Sequence[_Row]) -> int:
    longest = max(lengths)
    if width is None:
        return longest
    if whole(width, name, 0, _CALL) < longest:
        raise LayoutError(
            f"{_CALL}: {name} is {width}, and {rows[lengths.index(longest)].name} has {longest} tokens; expected at "
            "least as many. Pass a larger width, or cut the row before."
        )
    return width


def _packed(rows: Sequence[_Row], prompt_width: int, response_width: int, pad: int) -> PackedBatch:
    prompts, responses = (
        np.array([ids.size for ids in column]) for column in zip(*(row[1:3] for row in rows), strict=True)
    )
    lengths = prompts + responses
    sequence = RowLayout.from_spans(
        (prompt_width - prompts)[lengths > 0],
        lengths[lengths > 0],
        (lengths > 0).astype(np.int64),
        prompt_width + response_width,
        anchor=prompt_width,
    )
    layouts = {
        "sequence": sequence,
        "prompt": sequence.narrow(0, prompt_width),
        "response": sequence.narrow(prompt_width, prompt_width + response_width),
    }
    columns: dict[str, tuple[str, PadValue, Any]] = {
        "prompts": ("prompt", pad, np.concatenate([row.prompt for row in rows])),
        "responses": ("response", pad, np.concatenate([row.response for row in rows])),
        "input_ids": ("sequence", pad, np.concatenate([ids for row in rows for ids in row[1:3]])),
        "attention_mask": ("sequence", 0, np.ones(int(lengths.sum()), np.int64)),
        "position_ids": ("sequence", EDGE, ranges(np.zeros_like(lengths), lengths)),
        "response_mask": ("response", 0, np.ones(int(responses.sum()), np.int64)),
    }
    if rows[0].log_probs is not None:
        columns["rollout_log_probs"] = ("response", 0, np.concatenate([row.log_probs for row in rows]))
    if rows[0].experts is not None:
        columns["routed_experts"] = ("sequence", 0, np.concatenate([row.experts for row in rows]))
    forms: list[FieldForm] = []
    values: list[Any] = []
    pads: dict[tuple[str, ...], Pads] = {}
    for name, (layout, value, column) in columns.items():
        tensor, spec = torch.from_numpy(column), RL_FIELDS.find((name,))
        about: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu", "shape": tuple(tensor.shape[1:])}
        forms.append(FieldForm((name,), "padded", layout, **about, hints=spec.hints if spec else ()))
        values.append(words(tensor).numpy())
        pads[name,] = Pads.of(value, tensor.dtype)
    axes = {form.layout: layouts[form.layout] for form in forms if form.layout is not None}
    schema = Schema(Node((), None), tuple(forms), tuple((name, own.width, own.anchor) for name, own in axes.items()))
    found = of_values(forms, values, layouts, len(rows), len(rows), pads)
    assert found is not None  # there are no bools
    return PackedBatch(len(rows), schema, Rows.of(found.table, schema), {})
