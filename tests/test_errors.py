"""The errors: of which kind of Python's each is too, that they pickle, and that they say what they were given."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import maskpack as mp

KINDS = {
    mp.errors.LayoutError: ValueError,
    mp.errors.PlanError: ValueError,
    mp.errors.RegistryError: ValueError,
    mp.errors.WireFormatError: ValueError,
    mp.errors.FieldError: KeyError,
    mp.errors.CoverageError: RuntimeError,
    mp.errors.StorageError: RuntimeError,
}
ERRORS = [kind for kind in vars(mp.errors).values() if isinstance(kind, type) and issubclass(kind, mp.MaskpackError)]
TEXT = 'compress: field "x" is (2, 3); it\'s\nno field. Fix it.'


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_shows_its_message_and_keeps_it_in_a_pickle(kind):
    error = kind(TEXT)
    assert str(error) == TEXT
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == TEXT


@pytest.mark.parametrize("kind", ERRORS)
def test_kinds(kind):
    assert issubclass(kind, mp.MaskpackError)
    assert issubclass(kind, KINDS.get(kind, Exception))
    assert kind.__doc__


def test_a_field_error_is_a_layout_error():
    assert issubclass(mp.errors.FieldError, mp.errors.LayoutError)


def batch():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    return TensorDict({"attention_mask": mask, "input_ids": mask * 5, "responses": mask[:, 2:]}, batch_size=[2])


PACKED = mp.compress(batch(), pad_token_id=0)
VIEW = mp.views.BatchView.of(PACKED)


@pytest.mark.parametrize(
    "ask",
    [
        lambda name: mp.decompress(PACKED, name),
        lambda name: PACKED.select(name),
        lambda name: VIEW.materialize(name),
        lambda name: VIEW.to_packed(name),
        lambda name: VIEW.select(name),
        lambda name: mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch(), pad_token_id=0), name),
        lambda name: mp.select_and_pad_to_response(batch(), name),
        lambda name: PACKED.lengths(name),
        lambda name: VIEW.lengths(name),
    ],
)
def test_a_name_that_is_not_there_is_a_field_error_everywhere(ask):
    with pytest.raises(mp.errors.FieldError) as caught:
        ask("nope")
    assert isinstance(caught.value, KeyError)
    text = str(caught.value)
    assert '"nope"' in text
    assert text.endswith("Name one of these.")
    assert "\\" not in text


def test_a_tuple_of_fields_is_not_several_fields():
    with pytest.raises(mp.errors.FieldError, match="A tuple names one field in a sub-TensorDict"):
        mp.decompress(PACKED, ("responses", "input_ids"))
    assert list(mp.decompress(PACKED, "responses", "input_ids").keys()) == ["input_ids", "responses"]


def test_a_list_of_fields_says_how_to_unpack_it():
    with pytest.raises(mp.errors.LayoutError, match=r"unpack them: \*names"):
        mp.decompress(PACKED, ["responses"])
    assert list(mp.decompress(PACKED, *["responses"]).keys()) == ["responses"]


def test_a_batch_without_layouts_has_no_layout_to_name():
    packed = mp.compress(TensorDict({"x": torch.ones(2)}, batch_size=[2]))
    for held in (packed, mp.views.BatchView.of(packed)):
        with pytest.raises(
            mp.errors.FieldError, match=r'no layout "sequence"; the batch has none, because no mask covers'
        ):
            held.lengths("sequence")
