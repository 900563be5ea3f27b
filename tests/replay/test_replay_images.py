"""Replay of rows with images and videos: log-probs and gradients, also of the vision tower, against the model's own
forward of each row alone; and what must raise instead of giving other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.errors import ReplayError
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs, response_values

tf = needs("transformers")
import tiny_vision as tiny
import work_images
from ranks import run_ranks, values
from rows_alone import off
from tiny_models import llama, pair
from tiny_vision import IMAGE, ROWS, WITH_VIDEO, Row, Sample, batch_of, samples, truth

from maskpack.adapters.transformers import model as adapter

replayable = adapter.replayable
passes = adapter.passes

LIMIT, GRADIENT_LIMIT = 5e-6, 1e-5
SHARE: dict[str, Any] = {"options": ReplayOptions(share_prefixes=True, min_shared=1)}
GRIDS = [make for make in tiny.GRIDS if make is not tiny.qwen35_vl]
MODELS = {make.__name__: make for make in (*GRIDS, tiny.llava, tiny.internvl, tiny.mistral3)}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
main_models = pytest.mark.parametrize("make", [tiny.qwen25_vl, tiny.qwen3_vl, tiny.llava])


def given_to(make: Callable[..., Any], rows: Any = None, seed: int = 0) -> list[Sample]:
    """With videos for the models whose videos are told apart from images."""
    videos = make in (tiny.qwen25_vl, tiny.qwen2_vl, tiny.qwen3_vl)
    return samples(make, rows or (WITH_VIDEO if videos else ROWS), seed)


def gradients(model: Any, values: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (values * torch.linspace(0.3, 1.3, values.numel())).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def close_gradients(seen: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Weights without gradient in one of the two have zeros in the other. That of a bias of keys is zero but for
    rounding, since a softmax does not see it: it is measured by that of its weight."""
    for name in seen.keys() | want.keys():
        got, expected = seen.get(name), want.get(name)
        if got is None or expected is None:
            assert (expected if got is None else got).abs().max() == 0, name
        else:
            size = want[name.replace("k_proj.bias", "k_proj.weight")].norm()
            assert float((got - expected).norm()) <= GRADIENT_LIMIT * float(size) + 1e-12, name
    assert len(want) > 20


def check(ready: Any, plain: Any, given: list[Sample], batch: TensorDict | None = None, **options: Any) -> Tensor:
    """Log-probs and the gradients of all weights are those of each row alone; these log-probs."""
    seen = response_log_probs(ready, batch_of(plain, given) if batch is None else batch, **options)
    want = truth(plain, given)
    assert off(seen, want) <= LIMIT
    close_gradients(gradients(ready.model, seen.values()), gradients(plain, want))
    return want


# -------------------------------------------------------------------- right numbers


@all_models
@pytest.mark.parametrize("media", ["objects", "jagged"])
def test_log_probs_and_gradients_are_those_of_each_row_alone(make: Any, media: str) -> None:
    model, plain = pair(make)
    given = given_to(make)
    want = check(replayable(model), plain, given, batch_of(plain, given, media=media))
    assert want.min() < -3
    assert any("vis" in name and weight.grad.abs().max() > 0 for name, weight in model.named_parameters())


@pytest.mark.parametrize("shares", [False, True])
def test_images_before_layers_that_carry_state(shares: bool) -> None:
    model, plain = pair(tiny.qwen35_vl)
    ready = replayable(model)
    options = ReplayOptions(share_prefixes=shares, min_shared=1)
    check(ready, plain, given_to(tiny.qwen35_vl), self_check=True, options=options)
    assert all(way.startswith("rows: ") for way in ready.mixers.values())


@main_models
def test_images_matter(make: Any) -> None:
    """So that the tests above would see other pixels."""
    _, plain = pair(make)
    given = given_to(make)
    want = truth(plain, given)
    given[0].media["pixel_values"] = given[0].media["pixel_values"].flip(0).flip(-1)
    assert (truth(plain, given) - want).abs().max() > 1e-3


@main_models
def test_a_micro_batch_of_text_alone(make: Any) -> None:
    model, plain = pair(make)
    given = samples(make, [Row(3, 4), Row(2, 5)])
    ready = replayable(model)
    for media in ("objects", "none"):
        assert off(response_log_probs(ready, batch_of(plain, given, media=media)), truth(plain, given)) <= LIMIT


@main_models
def test_nested_and_packed_batches_and_plans(make: Any) -> None:
    model, plain = pair(make)
    given = given_to(make)
    ready, want = replayable(model), truth(plain, given)
    for media in ("objects", "jagged"):
        batch = batch_of(plain, given, media=media)
        plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(-1), 30)
        assert len(plan.micro_batches) > 2
        assert plan.micro_batches != sorted(plan.micro_batches) or any(m != sorted(m) for m in plan.micro_batches)
        for form in (batch, mp.nest_batch_by_mask(batch, pad_token_id=0), mp.compress(batch, pad_token_id=0)):
            assert off(response_log_probs(ready, form), want) <= LIMIT
            assert off(response_log_probs(ready, form, plan=plan, self_check=True), want) <= LIMIT


@main_models
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(make: Any, reentrant: bool) -> None:
    model, plain = pair(make)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model.train().gradient_checkpointing_enable(**options)
    if reentrant:
        model.enable_input_require_grads()
    check(replayable(model), plain.train(), given_to(make))


@main_models
def test_padded_replay(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    model, plain = pair(make)
    check(replayable(model), plain, given_to(make), self_check=True)


@main_models
def test_values(make: Any) -> None:
    model, plain = pair(make)
    given = given_to(make)
    head = torch.nn.Linear(32, 1)
    seen = response_values(replayable(model), batch_of(plain, given), head)
    bare = response_values(replayable(model.model), batch_of(plain, given), head, self_check=True)
    hidden = []
    for one in given:
        if one.ids:
            ids, more = torch.tensor([one.ids]), dict(one.media)
            if hasattr(plain.model, "get_rope_index") and one.media:
                more["mm_token_type_ids"] = tiny.kinds_of(ids)
            hidden.append(plain.model(input_ids=ids, **more).last_hidden_state[0, -1 - one.response : -1])
    want = head(torch.cat(hidden))[:, 0]
    assert off(seen, want) <= LIMIT
    assert off(bare, want) <= LIMIT


def test_rows_without_tokens_may_have_images() -> None:
    """Rows that are left out keep their objects."""
    model, plain = pair(tiny.qwen25_vl)
    given = given_to(tiny.qwen25_vl)
    assert not given[3].ids
    given[3].media = given[0].media
    text = [given[1], given[3], given[5]]
    assert PackedInputs.of(batch_of(plain, text)).media is None
    for media in ("objects", "jagged"):
        assert (
            off(response_log_probs(replayable(model), batch_of(plain, given, media=media)), truth(plain, given))
            <= LIMIT
        )


def test_entries_for_positions_and_none_are_left_out() -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = given_to(tiny.qwen25_vl)
    batch = batch_of(plain, given)
    dicts = [dict(one.media) or None for one in given]
    dicts[-1] |= {"second_per_grid_ts": [1.0], "mm_token_type_ids": torch.ones(1, 7), "image_sizes": None}
    batch["multi_modal_inputs"] = NonTensorStack(*dicts)
    assert off(response_log_probs(replayable(model), batch), truth(plain, given)) <= LIMIT


def test_other_towers() -> None:
    model, plain = pair(tiny.llava, tower="siglip")
    given = given_to(tiny.llava)
    assert off(response_log_probs(replayable(model), batch_of(plain, given)), truth(plain, given)) <= LIMIT


# -------------------------------------------------------------------- the model


@main_models
def test_the_vision_tower_keeps_its_attention(make: Any) -> None:
    model, plain = pair(make)
    ready = replayable(model)
    assert model.config.get_text_config()._attn_implementation == passes.NAME
    assert (
        model.config.vision_config._attn_implementation
        == plain.config.vision_config._attn_implementation
        != passes.NAME
    )
    told: list[set[str]] = []
    vision = next(
        part for name, part in model.named_modules() if type(part).__name__.endswith("Attention") and "vis" in name
    )
    vision.register_forward_pre_hook(lambda _part, _args, given: told.append(set(given)), with_kwargs=True)
    given = given_to(make)
    response_log_probs(ready, batch_of(plain, given))
    assert told
    assert not any({"cu_seq_lens_q", "max_length_q"} & names for names in told)
    tower = model.model.visual if make in tiny.GRIDS else model.model.vision_tower
    grid = {"grid_thw": given[0].media["image_grid_thw"]} if make in tiny.GRIDS else {}
    told.clear()
    tower(given[0].media["pixel_values"], **grid, cu_seq_lens_q=torch.tensor([0, 16]), max_length_q=16)
    assert told
    assert not any({"cu_seq_lens_q", "max_length_q"} & names for names in told)
    released = ready.release()
    assert [part._attn_implementation for part in passes.configurations(released.config)] == [
        part._attn_implementation for part in passes.configurations(plain.config)
    ]
    assert off(truth(released, given), truth(plain, given)) == 0


def test_the_vision_tower_is_told_nothing_of_packed_rows() -> None:
    """Of all that replay gives to the model, and the layers of text are told."""
    model, plain = pair(tiny.qwen35_vl)
    ready = replayable(model)
    told: dict[str, set[str]] = {}
    for name, part in (
        ("base", model.model),
        ("layer", model.model.language_model.layers[0]),
        ("tower", model.model.visual),
    ):
        part.register_forward_pre_hook(
            lambda _part, _args, given, name=name: told.setdefault(name, set()).update(given), with_kwargs=True
        )
    given = given_to(tiny.qwen35_vl)
    response_log_probs(ready, batch_of(plain, given), self_check=False, **SHARE)
    of_rows = told["base"] & told["layer"] - {"position_ids", "use_cache"}
    assert {"cu_seq_lens_q", "mixer_rows"} <= of_rows
    assert not of_rows & told["tower"]


def test_the_self_check_compares_a_row_with_images() -> None:
    """The longest row is of text alone."""
    model, plain = pair(tiny.qwen25_vl)
    given = samples(tiny.qwen25_vl, [Row(3, 4, images=[(1, 4, 4)]), Row(30, 40), Row(2, 3, images=[(1, 2, 4)])])
    batch, ready = batch_of(plain, given), replayable(model)
    response_log_probs(ready, samples_of_text(plain))
    inner = ready._states

    def shifted(**more: Any) -> Tensor:
        if "pixel_values" in more:
            more["pixel_values"] = more["pixel_values"].roll(1, -1)
        return inner(**more)

    ready._states = shifted
    with pytest.raises(ReplayError, match="off by"):
        response_log_probs(ready, batch)


def samples_of_text(plain: Any) -> TensorDict:
    return batch_of(plain, samples(tiny.qwen25_vl, [Row(3, 4), Row(2, 5)]))


# -------------------------------------------------------------------- shared prefixes


def group(make: Any, rows: Any, copies: int, seed: int = 0) -> list[Sample]:
    """Each row several times with the same objects and prompt, and responses of their own."""
    out = []
    source = torch.Generator().manual_seed(seed + 1)
    for one in samples(make, rows, seed):
        prompt = one.ids[: len(one.ids) - one.response]
        for n in range(copies):
            response = torch.randint(3, 70, (one.response + n,), generator=source).tolist()
            out.append(Sample(prompt + response, len(response), one.media))
    return out


SHARED = (
    Row(5, 4, images=[(1, 4, 4)]),
    Row(9, 3),
    Row(4, 6, images=[(1, 2, 4), (1, 4, 6)]),
    Row(6, 2, images=[(1, 4, 4)]),
)


@all_models
@pytest.mark.parametrize("media", ["objects", "jagged"])
def test_images_of_a_group_are_seen_once(make: Any, media: str) -> None:
    """Equal objects, or equal numbers; groups lie one among the other."""
    model, plain = pair(make)
    given = group(make, SHARED, 3)
    given = [given[n] for n in (4, 9, 0, 7, 2, 3, 11, 6, 1, 5, 10, 8)]
    batch = batch_of(plain, given, media=media)
    entries = []
    model.model.register_forward_pre_hook(
        lambda _part, _args, told: entries.append(len(told["pixel_values"])), with_kwargs=True
    )
    check(replayable(model), plain, given, batch, self_check=False, **SHARE)
    assert 3 * entries[0] == sum(len(one.media.get("pixel_values", ())) for one in given)
    response_log_probs(replayable(model), batch, self_check=True, **SHARE)


@pytest.mark.parametrize("media", ["objects", "jagged"])
def test_equal_ids_with_other_pixels_share_nothing(media: str) -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = group(tiny.qwen25_vl, [Row(5, 4, images=[(1, 4, 4)])], 4)
    for one in given[2:]:
        pixels = one.media["pixel_values"].clone()
        pixels[-1, -1] += 30
        one.media = one.media | {"pixel_values": pixels}
    batch = batch_of(plain, given, media=media)
    tree = prefix_tree(batch, options=ReplayOptions(min_shared=1))
    assert tree.num_tokens == sum(len(one.ids) for one in given) - 2 * (len(given[0].ids) - 4)
    seen = response_log_probs(replayable(model), batch, **SHARE)
    want = truth(plain, given)
    assert (want[:4] - want[15:19]).abs().max() > 1e-3
    assert off(seen, want) <= LIMIT
    plan = mp.planning.plan_micro_batches(tree.lengths, tree.num_tokens, tree=tree)
    assert (
        off(
            response_log_probs(replayable(model), batch, plan=plan, **SHARE),
            want,
        )
        <= LIMIT
    )


def test_short_prefixes_are_not_shared_and_images_go_in_for_each() -> None:
    model, plain = pair(tiny.qwen3_vl)
    short = [Row(1, 4, images=[(1, 2, 2)]), Row(1, 4, images=[(1, 2, 4)])]
    given = group(tiny.qwen3_vl, [*short, Row(12, 4, images=[(1, 4, 4)])], 3)
    given = [given[n] for n in (0, 6, 3, 1, 4, 7, 5, 2, 8)]  # the tree does not have them in this order
    batch = batch_of(plain, given)
    inputs = PackedInputs.of(batch, options=ReplayOptions(share_prefixes=True))
    assert inputs.tree is not None
    assert inputs.num_tokens == sum(len(one.ids) for one in given) - 2 * (12 + 4 + 2)
    seen = response_log_probs(replayable(model), batch, options=ReplayOptions(share_prefixes=True))
    assert off(seen, truth(plain, given)) <= LIMIT


def test_rows_that_share_one_of_two_images_are_refused() -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = group(tiny.qwen25_vl, [Row(4, 6, images=[(1, 4, 4), (1, 2, 2)])], 2)
    assert given[1].ids[9] == tiny.AFTER
    given[1].ids[9] = 7  # between the images
    batch = batch_of(plain, given)
    refused(model, batch, r"shares some places .* Leave share_prefixes out", **SHARE)
    assert off(response_log_probs(replayable(model), batch), truth(plain, given)) <= LIMIT


def test_dropout_of_the_tower_with_shared_images_is_refused() -> None:
    model, plain = pair(tiny.llava)
    given = group(tiny.llava, [Row(5, 4, images=[(1, 4, 4)])], 2)
    model.config.vision_config.attention_dropout = 0.1
    batch = batch_of(plain, given)
    response_log_probs(replayable(model), batch, options=ReplayOptions(share_prefixes=True))
    model.train()
    with pytest.raises(ReplayError, match=r"has dropout \(attention_dropout\) and is in train mode"):
        response_log_probs(replayable(model), batch, options=ReplayOptions(share_prefixes=True))


# -------------------------------------------------------------------- refused


def refused(model: Any, batch: Any, match: str, **options: Any) -> None:
    with pytest.raises(ReplayError, match=match):
        response_log_probs(replayable(model), batch, **options)


def test_media_of_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = given_to(tiny.qwen25_vl)
    given[0].media, given[2].media = given[2].media, given[0].media
    right = batch_of(plain, given_to(tiny.qwen25_vl), media="none")
    right["multi_modal_inputs"] = NonTensorStack(*[one.media for one in given])
    for packing in ("0", "1"):
        monkeypatch.setenv("MASKPACK_PACKED_REPLAY", packing)
        refused(model, right, r"row 0 has 4 image tokens .* expected 8 tokens")


@pytest.mark.parametrize("make", [tiny.llava, tiny.internvl, tiny.mistral3])
def test_images_of_other_rows_are_refused_without_grids(make: Any) -> None:
    model, plain = pair(make)
    given = given_to(make)
    media = [one.media for one in given]
    right = batch_of(plain, given, media="none")
    right["multi_modal_inputs"] = NonTensorStack(*[media[n] for n in (1, 0, 2, 3, 4, 5)])
    refused(model, right, "row 0 has .* image tokens .* expected 0 tokens")
    if make is not tiny.mistral3:  # whose images have other sizes
        right["multi_modal_inputs"] = NonTensorStack(*[media[n] for n in (2, 1, 0, 3, 4, 5)])
        refused(model, right, "row 2 has .* image tokens .* expected (2|8|32) tokens")


@pytest.mark.parametrize("change", [1, -1])
def test_a_place_too_many_or_too_few(change: int) -> None:
    """Also where another row makes up for it."""
    model, plain = pair(tiny.qwen25_vl)
    given = samples(tiny.qwen25_vl, [Row(3, 4, images=[(1, 4, 4)]), Row(3, 4, images=[(1, 4, 4)])])
    batch = batch_of(plain, given)
    ids, where = batch["input_ids"], batch["input_ids"] == IMAGE
    first, last = int(where[0].int().argmax()), where.shape[1] - 1 - int(where[1].flip(0).int().argmax())
    ids[0, first - 1] = IMAGE if change > 0 else ids[0, first - 1]
    ids[0, first] = IMAGE if change > 0 else 5
    refused(model, batch, rf"row 0 has {4 + change} image tokens in its ids.*expected 4 tokens")
    ids[1, last + (change < 0)] = 5 if change > 0 else IMAGE
    refused(model, batch, rf"row 0 has {4 + change} image tokens in its ids.*expected 4 tokens")


def test_places_without_media_and_audio_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = given_to(tiny.qwen25_vl)
    batch = batch_of(plain, given, media="none")
    for packing in ("0", "1"):
        monkeypatch.setenv("MASKPACK_PACKED_REPLAY", packing)
        refused(model, batch, "input_ids contain placeholders of images.*expected text alone: the batch has no pixels")
    batch["multi_modal_inputs"] = NonTensorStack(*[{}] * len(given))
    refused(model, batch, "input_ids contain placeholders of images.*expected text alone")
    dicts = [one.media for one in given]
    batch["multi_modal_inputs"] = NonTensorStack(*[*dicts[:2], {}, *dicts[3:]])
    refused(model, batch, "row 2 has 8 image tokens in its ids, and media of 0 entries.*expected 0")
    batch["multi_modal_inputs"] = NonTensorStack(*[*dicts[:-1], {"input_features": torch.ones(1, 2)}])
    refused(model, batch, 'audio in "input_features"')
    batch = batch_of(plain, samples(tiny.qwen25_vl, [Row(3, 4)]))
    batch["input_features"] = torch.ones(1, 2)
    refused(model, batch, 'audio in "input_features"')


def test_media_with_a_text_model_are_refused() -> None:
    model, _ = pair(llama)
    _, plain = pair(tiny.llava)
    batch = batch_of(plain, given_to(tiny.llava))
    refused(model, batch, r"images or videos \(pixel_values\), and LlamaForCausalLM takes text alone")

    class Own:
        device = torch.device("cpu")
        hidden = dense_hidden = self_check = print

    with pytest.raises(ReplayError, match=r"not declare support for PackedInputs\.media.*takes_media = True"):
        response_log_probs(Own(), batch)


def test_positions_without_sections_are_refused() -> None:
    model, plain = pair(tiny.qwen3_vl)
    batch = batch_of(plain, given_to(tiny.qwen3_vl))
    refused(model, batch.exclude("position_ids"), r"M-RoPE.*expected position_ids \[B, 3, S\] or \[B, 4, S\]")
    batch["position_ids"] = batch["position_ids"][:, 0]
    refused(model, batch, "M-RoPE")


def test_attention_in_both_directions_is_refused() -> None:
    model, plain = pair(tiny.gemma3)
    given = samples(tiny.gemma3, [Row(3, 4, images=[(1, 4, 4)]), Row(2, 3)])
    for one in given:
        one.ids = [token for n, token in enumerate(one.ids) if token != IMAGE or n % 4 == 0]
    refused(model, batch_of(plain, given), "makes its own masks.*expected causal attention")
    text = samples(tiny.gemma3, [Row(3, 4), Row(2, 3)])
    assert off(response_log_probs(replayable(model), batch_of(plain, text)), truth(plain, text)) <= LIMIT


def test_fields_of_other_forms_are_refused() -> None:
    model, plain = pair(tiny.qwen25_vl)
    given = given_to(tiny.qwen25_vl)
    dicts = [one.media for one in given]
    batch, first = batch_of(plain, given, media="none"), dicts[0]

    def changed(**more: Any) -> Any:
        return NonTensorStack(first | more, *dicts[1:])

    for objects, message in (
        (NonTensorData(dicts, batch_size=[8]), r"is .* for 8 rows; expected a dict of tensors.*NonTensorStack"),
        (NonTensorData("pixels", batch_size=[8]), r"is .* for 8 rows; expected a dict of tensors.*NonTensorStack"),
        (torch.ones(8, 2), '"multi_modal_inputs" is Tensor for 8 rows'),
        (changed(pixel_values=[1.0]), '"pixel_values" in "multi_modal_inputs" of row 0 is a list'),
        (changed(pixel_values=torch.ones(16, 25)), r'entries of "pixel_values" are \(25,\).*\(24,\)'),
        (NonTensorStack(first | {"image_grid_thw": torch.ones(1, 2).long()}, *[{}] * 7), r"integers \[entries, 3\]"),
        (
            NonTensorStack({"pixel_values": first["pixel_values"]}, *dicts[1:]),
            "a row has pixel_values, another image_grid_thw, pixel_values",
        ),
        (
            NonTensorStack(*[one | ({"mask": torch.ones(1)} if "pixel_values" in one else {}) for one in dicts]),
            "mask of images or videos, which Qwen2_5_VLModel does not take",
        ),
        (
            changed(pixel_values=first["pixel_values"][:8]),
            "row 0 has 8 patches in pixel_values, and image_grid_thw says 16",
        ),
    ):
        refused(model, batch.clone().set("multi_modal_inputs", objects), message)
    both = batch_of(plain, given).set("pixel_values", batch_of(plain, given, media="jagged")["pixel_values"])
    refused(model, both, 'media in "multi_modal_inputs" and in pixel_values; expected one of the two')
    dense = batch.clone().set("pixel_values", torch.ones(8, 16, 24))
    refused(model, dense, r'"pixel_values" is \(8, 16, 24\); expected a jagged tensor')


# -------------------------------------------------------------------- over ranks


def test_sharded_replay_is_that_of_each_row_alone() -> None:
    """Rank 0 has images, the other a video."""
    for off_of in values(run_ranks(work_images.sharded, 2, "qwen25_vl", "qwen3_vl")):
        for apart in off_of.values():
            assert apart["gradients"] <= GRADIENT_LIMIT
            assert max(apart["packed"], apart["padded"]) <= LIMIT


def test_what_ranks_refuse_together() -> None:
    """Images on some ranks of a sharded model; images in shards of a context group."""
    for sharded, in_shards in values(run_ranks(work_images.refused, 2)):
        assert len(sharded) == 2
        assert all("is sharded, and some ranks have rows with images" in one for one in sharded)
        assert "images or videos came with context_group; expected text alone" in in_shards
