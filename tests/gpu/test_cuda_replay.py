"""Replay on CUDA: all attention backends against a dense mask, models against each row alone, counted synchronisations.

Against a wide truth, our error may be twice that of plain torch in the same dtype, row by row; the largest four times,
because that is one rounding.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import plain_torch
import pytest
import torch
from kernels import count_syncs
from needs import needs
from plain_torch import (
    DEVICE,
    PAD,
    assert_as_good,
    assert_gradients,
    check_attention,
    each_alone,
    gradients,
    needs_flash,
    padded,
)
from tensordict import TensorDict
from torch import Tensor, nn

from maskpack import compress, decompress, nest_batch_by_mask
from maskpack.ops import attention
from maskpack.ops.attention import backend_for
from maskpack.planning import plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs, response_values

transformers = needs("transformers")

from maskpack.adapters.transformers import replayable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [[1], [1, 1, 1], [7, 1, 130, 64, 33], [300, 5]]


# -------------------------------------------------------------------- attention

FLASH_4 = "flash_attn.cute"
BACKENDS = ["varlen", "rows", pytest.param("flash", marks=needs_flash)]


@pytest.mark.parametrize("window", [None, 1, 5, 64, 1000])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_as_good_as_each_row_alone(
    backend: str, lengths: list[int], heads: tuple[int, int], window: int | None
) -> None:
    check_attention(backend, lengths, heads, 64, torch.bfloat16, window)


@pytest.mark.parametrize("size", [32, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_other_sizes_and_dtypes(backend: str, dtype: torch.dtype, size: int) -> None:
    some = torch.empty(1, 1, size, dtype=dtype, device=DEVICE)
    if backend == "flash" and attention._flash_package(some, None) is None:
        pytest.skip("the flash-attn that is installed has no such heads")
    check_attention(backend, [33, 1, 140], (4, 2), size, dtype)


@pytest.mark.parametrize(
    ("heads", "window", "softcap", "dtype"),
    [
        ((4, 4), None, None, torch.bfloat16),
        ((8, 2), 5, None, torch.bfloat16),
        ((8, 2), None, 20.0, torch.bfloat16),
        ((4, 2), 64, 20.0, torch.float32),
    ],
)
def test_flex_attention_is_as_good_as_each_row_alone(
    heads: tuple[int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    for lengths in LENGTHS[1:]:
        check_attention("flex", lengths, heads, 64, dtype, window, softcap)


@pytest.mark.parametrize("sizes", [(400, 300, 90), (40, 400, 90), (90, 127, 128, 5)], ids=str)
def test_flex_attention_of_micro_batches_of_any_size(sizes: tuple[int, ...]) -> None:
    """Compiled anew, so that the order is that of a process."""
    torch.compiler.reset()
    attention._compiled_flex.cache_clear()
    for tokens in sizes:
        check_attention("flex", [tokens // 2, tokens - tokens // 2], (4, 2), 32, torch.float32)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 8, 24])
def test_flex_attention_of_small_heads(size: int, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check_attention("flex", [33, 1, 140], heads, size, dtype)
    check_attention("auto", [33, 1, 140], heads, size, torch.float32)


@needs_flash
def test_flash_attention_4_is_taken_where_it_is_and_no_other_where_it_cannot() -> None:
    if attention._varlen_func(FLASH_4) is None or torch.cuda.get_device_capability()[0] not in (9, 10, 11):
        pytest.skip("needs FlashAttention 4 and its GPUs")
    query = torch.empty(3, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    assert attention._flash_package(query, None) == FLASH_4
    assert attention._flash_package(query, 20.0) != FLASH_4
    assert attention._flash_package(query.float(), None) is None
    for size in (8, 16, 40, 48, 72, 80, 104, 112):  # of which its gradients are wrong
        check_attention("auto", [33, 1, 140], (4, 2), size, torch.bfloat16)
    check_attention("auto", [33, 1, 140], (4, 2), 64, torch.bfloat16, None, 20.0)  # by another
    check_attention("auto", [33, 1, 140], (4, 2), 256, torch.bfloat16)


def test_the_backends_that_are_taken() -> None:
    half, single = (torch.empty(3, 2, 16, device=DEVICE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert backend_for(half, None) in ("flash", "varlen")
    assert backend_for(half, 20.0) in ("flash", "flex")
    assert backend_for(single, None) == "flex"


# -------------------------------------------------------------------- models


def tiny(kind: str, dtype: torch.dtype) -> Any:
    more = {"query_pre_attn_scalar": 16} if kind == "Gemma3Text" else {}
    return plain_torch.tiny(kind, dtype, 16, initializer_range=0.15, **more)


def batch_of(prompts: list[int], responses: list[int]) -> TensorDict:
    source = torch.Generator().manual_seed(1)
    lengths = zip(prompts, responses, strict=True)
    return padded([(p, torch.randint(PAD, (p + r,), generator=source)) for p, r in lengths])


def packed(replay: Any, batch: TensorDict) -> Tensor:
    out: Any = response_log_probs(replay, batch, self_check=True)
    return out.values()


@pytest.mark.parametrize("option", [{}, {"fused": True}])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Gemma3Text"])
def test_log_probs_and_gradients_are_as_good_as_of_each_row_alone(
    kind: str, dtype: torch.dtype, checkpointed: bool, option: dict[str, bool]
) -> None:
    batch = batch_of([3, 1, 9, 4, 2], [30, 1, 6, 75, 12])
    model = tiny(kind, dtype)
    exact = tiny(kind, dtype).double()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    truth = each_alone(exact, batch)
    wanted = gradients(exact, truth)
    plain = each_alone(model, batch)
    theirs = gradients(model, plain)
    replay = replayable(model, **option)
    nested = nest_batch_by_mask(batch, pad_token_id=PAD)
    for given in (batch, nested):
        seen = packed(replay, given)
        ours = gradients(model, seen)
        assert seen.dtype == torch.float32
        assert ours.keys() == theirs.keys() == wanted.keys()
        assert_as_good([seen.detach()], [plain.detach()], [truth.detach()], 5e-5)
        assert_gradients(ours, theirs, wanted)
    if option.get("fused"):  # kernels, not what stayed as it is
        forwards = [forward.__func__ for x in model.modules() if (forward := vars(x).get("forward"))]
        assert len({type(forward) for forward in forwards}) == 3
        assert all(None not in forward._variants.values() for forward in forwards)


# -------------------------------------------------------------------- rows that come from elsewhere

FORMS: dict[str, Callable[[TensorDict], Any]] = {
    "padded": lambda batch: batch,
    "nested": lambda batch: nest_batch_by_mask(batch, pad_token_id=PAD),
    "packed": lambda batch: compress(batch, pad_token_id=PAD),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_batches_on_the_host_go_to_the_model(form: str, planned: bool) -> None:
    """They give the bits of the same batch on the GPU; results lie there."""
    there = batch_of([3, 1, 9, 4, 2], [30, 1, 6, 75, 12])
    here = there.to("cpu").clear_device_()
    replay = replayable(tiny("Qwen3", torch.bfloat16))
    plan = plan_micro_batches(here["attention_mask"].sum(1), 80) if planned else None
    head = nn.Linear(64, 1, dtype=torch.bfloat16, device=DEVICE)
    given = FORMS[form](here)
    before = decompress(given) if form == "packed" else given.clone()
    seen = [
        *response_log_probs(replay, given, plan=plan, entropy=True),
        response_values(replay, given, head, plan=plan),
    ]
    want = FORMS[form](there)
    wanted = [
        *response_log_probs(replay, want, plan=plan, entropy=True),
        response_values(replay, want, head, plan=plan),
    ]
    for x, y in zip(seen, wanted, strict=True):
        assert x.is_cuda
        assert x.values().is_cuda
        assert x.offsets().tolist() == y.offsets().tolist() == [0, 30, 31, 37, 112, 124]
        assert torch.equal(x.values(), y.values())
        assert x.requires_grad is not planned
    after = decompress(given) if form == "packed" else given
    for name in ("input_ids", "attention_mask", "responses"):
        x, y = before.get(name), after.get(name)
        assert not y.is_cuda
        assert torch.equal(x.values(), y.values()) if x.is_nested else torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
def test_fields_that_the_model_does_not_read_stay_on_the_host(form: str) -> None:
    here = batch_of([3, 1, 9, 4], [30, 1, 6, 75]).to("cpu").clear_device_()
    here["pictures"] = torch.zeros(4, 1 << 24, dtype=torch.uint8)
    replay = replayable(tiny("Qwen3", torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it stays dense
        given = FORMS[form](here)
    plan = plan_micro_batches(here["attention_mask"].sum(1), 80)
    with torch.no_grad():
        response_log_probs(replay, given, plan=plan)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        response_log_probs(replay, given, plan=plan)
        response_log_probs(replay, given)
    assert torch.cuda.max_memory_allocated() - before < 1 << 24


def test_a_batch_on_the_gpu_goes_to_a_model_on_the_host() -> None:
    there = batch_of([3, 1, 9], [30, 1, 6])
    replay = replayable(tiny("Qwen3", torch.float32).to("cpu"))
    wanted = response_log_probs(replay, there.to("cpu")).values()
    for form in FORMS.values():
        seen = response_log_probs(replay, form(there))
        assert not seen.is_cuda
        assert torch.equal(seen.values(), wanted)


# -------------------------------------------------------------------- threads


@pytest.mark.parametrize("reentrant", [False, True])
def test_threads_replay_as_one(reentrant: bool) -> None:
    """Models of their own, checkpointed, whose layers run again in autograd's threads; and one that all of them replay,
    and compare."""
    dtype = torch.bfloat16
    batches = [batch_of([3, 1, 9, 4, 2][:rows], [30, 1, 6, 75, 12][:rows]) for rows in (5, 4, 3)]
    kinds = ["Qwen3", "Llama", "Gemma3Text", "Qwen3"]

    def of_own(model: Any) -> list[Any]:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        replay = replayable(model)
        out: list[Any] = []
        for batch in batches:
            log_probs = response_log_probs(replay, batch, self_check=True).values()
            out.append((log_probs.detach(), gradients(model, log_probs)))
        return out

    def of_shared(replay: Any) -> list[Tensor]:
        with torch.no_grad():
            return [response_log_probs(replay, batch, self_check=True).values() for batch in batches]

    wanted = [of_own(tiny(kind, dtype)) for kind in kinds]
    shared_wanted = of_shared(replayable(tiny("Qwen3", dtype)))
    shared = replayable(tiny("Qwen3", dtype))
    ready = threading.Barrier(len(kinds))

    def work(model: Any) -> tuple[list[Any], list[Tensor]]:
        ready.wait(60)
        return of_own(model), of_shared(shared)

    with ThreadPoolExecutor(len(kinds)) as threads:
        seen = list(threads.map(work, [tiny(kind, dtype) for kind in kinds]))
    for (own, common), want in zip(seen, wanted, strict=True):
        assert all(map(torch.equal, common, shared_wanted))
        for (log_probs, grads), (wanted_log_probs, wanted_grads) in zip(own, want, strict=True):
            assert torch.equal(log_probs, wanted_log_probs)
            for name, gradient in grads.items():  # backward passes of attention add up in any order
                assert (gradient - wanted_grads[name]).norm() <= 0.02 * wanted_grads[name].norm() + 1e-6, name


# -------------------------------------------------------------------- synchronisations


def syncs(call: Callable[[], object]) -> list[str]:
    call()  # imports, compiles
    with count_syncs() as seen:
        call()
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_inputs_from_the_host_wait_for_nothing(form: str) -> None:
    given = FORMS[form](batch_of([3, 1, 9, 4], [30, 1, 6, 75]).to("cpu").clear_device_())
    assert syncs(lambda: PackedInputs.of(given, device=DEVICE, options=ReplayOptions(multiple_of=8))) == []
    made = PackedInputs.of(given, device=DEVICE, options=ReplayOptions(multiple_of=8))
    same = PackedInputs.of(given, device="cpu", options=ReplayOptions(multiple_of=8))
    for name in ("input_ids", "position_ids", "cu_seqlens", "predict", "targets"):
        assert getattr(made, name).is_cuda
        assert torch.equal(getattr(made, name).cpu(), getattr(same, name)), name


@pytest.mark.parametrize("form", ["padded", "nested", "packed", "of a plan"])
def test_inputs_wait_for_the_gpu_once_for_the_layout_and_once_for_documents(form: str) -> None:
    batch = batch_of([3, 1, 9, 4], [30, 1, 6, 75])
    given: Any = batch
    if form == "packed":
        given = compress(batch.to("cpu"), pad_token_id=PAD)
    elif form != "padded":
        given = nest_batch_by_mask(batch, pad_token_id=PAD)
    if form == "of a plan":
        given = next(plan_micro_batches([33, 2, 15, 79], 129).apply(given))
    device = DEVICE if form == "packed" else None
    seen = syncs(lambda: PackedInputs.of(given, device=device, options=ReplayOptions(multiple_of=8)))
    assert len(seen) <= (0 if form == "packed" else 2), seen
    made = PackedInputs.of(given, device=device, options=ReplayOptions(multiple_of=8))
    assert {x.device.type for x in (made.input_ids, made.cu_seqlens, made.predict, made.targets)} == {DEVICE.type}
    assert made.cu_seqlens.tolist() == [0, 33, 35, 50, 129, 136]


def test_waiting_would_be_seen() -> None:
    assert len(syncs(lambda: torch.ones(1, device=DEVICE).item())) == 1
