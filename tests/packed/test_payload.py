"""report_once: against naive sums over the tensors and plain pickles; the batches of a call stay as they are."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import samples
import torch
from tensordict import NonTensorStack, TensorDict

import maskpack as mp
from maskpack.packed.sizes import fields

ROWS = ((40, 300), (60, 700), (3, 10), (0, 0), (60, 512))


def batch():
    return samples.rollout(ROWS, 64, 768)


def nested():
    return mp.nest_batch_by_mask(batch(), pad_token_id=samples.PAD)


def jagged():
    """Two fields with offsets of their own, a third on those of the second, and a plain one beside them."""
    rows = [torch.arange(count) for count in (3, 0, 5)]
    first, second = (torch.nested.as_nested_tensor(rows, layout=torch.jagged) for _ in range(2))
    third = torch.nested.nested_tensor_from_jagged(second.values().float(), second.offsets())
    return TensorDict({"a": first, "b": second, "c": third, "d": torch.ones(3, 2)}, batch_size=[3])


def mixed():
    out = batch()
    out["responses"] = nested()["responses"]
    return out


def raw(x, known):
    """Bytes of the tensor; a jagged one has offsets of 8 bytes, one more than rows, unless a field before has them."""
    if not x.is_nested:
        return x.numel() * x.element_size()
    own = x.offsets().data_ptr() not in known
    known.add(x.offsets().data_ptr())
    return x.values().numel() * x.values().element_size() + 8 * (x.shape[0] + 1) * own


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("make", [batch, nested, jagged, mixed])
def test_every_tensor_has_its_bytes_and_its_form(make):
    data = make()
    report = mp.report_once(data, name=f"bytes of {make.__name__}", pad_token_id=samples.PAD)
    packed = mp.compress(data, pad_token_id=samples.PAD)
    tensors = {name: x for name, x in data.items() if isinstance(x, torch.Tensor)}
    known = set()
    wire = {field.path: field.wire_bytes for field in fields(packed)}
    seen = report.argument
    assert report.result is None
    assert [field.path for field in seen.fields] == [(name,) for name in tensors]
    for field, (name, x) in zip(seen.fields, tensors.items(), strict=True):
        assert field.dtype == x.dtype
        assert field.form == ("nested" if x.is_nested else "padded")
        assert len(field.shape) == x.dim()
        assert field.shape == ((x.shape[0], None, *x.shape[2:]) if x.is_nested else tuple(x.shape))
        assert field.raw_bytes == raw(x, known), name
        assert field.packed_bytes == wire[field.path]
    assert seen.rows == data.batch_size[0]
    assert seen.raw_bytes == sum(field.raw_bytes for field in seen.fields)
    assert seen.pickled_bytes == pytest.approx(len(cloudpickle.dumps(data, 5)), abs=64)
    assert seen.packed_bytes == pytest.approx(len(cloudpickle.dumps(packed, 5)), abs=64)
    assert min(seen.pickle_seconds, seen.unpickle_seconds, seen.pack_seconds, seen.unpack_seconds) > 0


def test_threads_report_a_name_once_and_a_failure_is_not_a_report():
    data, name = batch(), "of several threads"
    with pytest.raises(mp.errors.MaskpackError):
        mp.report_once(data, name=name, pad_token_id="0")
    barrier = threading.Barrier(4)

    def report(_):
        barrier.wait()
        return mp.report_once(data, name=name, pad_token_id=samples.PAD)

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(report, range(4)))
    assert sum(one is not None for one in reports) == 1
    assert [mp.report_once(data, name=other, pad_token_id=samples.PAD) is None for other in (name, "another")] == [
        True,
        False,
    ]


def test_a_result_is_packed_under_the_layouts_of_the_argument():
    data = batch()
    result = data.select("old_log_probs")
    report = mp.report_once(data, result, name="a result", pad_token_id=samples.PAD)
    alone = mp.compress(result.clone(), like=mp.compress(data, pad_token_id=samples.PAD))
    (field,) = report.result.fields
    assert field.packed_bytes == fields(alone)[0].wire_bytes
    assert report.result.packed_bytes == pytest.approx(len(pickle.dumps(alone, 5)), abs=64)
    assert report.result.packed_bytes < report.result.pickled_bytes


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("make", [batch, nested, jagged])
def test_the_batches_of_the_call_stay_as_they_are(make, monkeypatch):
    """Even if what is compressed were changed."""
    data, result = make(), make()
    before = samples.freeze(copy.deepcopy(make()))

    def changed(given, **options):
        packed = mp.compress(given, **options)
        for x in given.values():
            if isinstance(x, torch.Tensor):
                (x.values() if x.is_nested else x).zero_()
        return packed

    monkeypatch.setattr("maskpack.packed.payload.compress", changed)
    mp.report_once(data, result, name=f"unchanged {make.__name__}", pad_token_id=samples.PAD)
    assert samples.freeze(data) == samples.freeze(result) == before


def test_a_report_is_a_table_and_json():
    data = batch()
    data["object"] = NonTensorStack(*[{"x": row} for row in range(len(ROWS))])
    report = mp.report_once(data, data.select("responses"), name="shown\x1b", pad_token_id=samples.PAD)
    lines = str(report).splitlines()
    assert lines[0] == r"payload of shown\x1b"
    (row,) = (line.split() for line in lines if line.startswith("old_log_probs"))
    assert row[:5] == ["old_log_probs", "float32", "(5,", "768)", "padded"]
    field = next(field for field in report.argument.fields if field.path == ("old_log_probs",))
    assert row[5:7] == [f"{field.raw_bytes:,}", f"{field.packed_bytes:,}"]
    assert sum(line.startswith("pickled, all") for line in lines) == 2
    found = json.loads(json.dumps(report.to_dict()))
    assert found["name"] == "shown\x1b"
    assert found["argument"]["raw_bytes"] == report.argument.raw_bytes
    shown = {one["path"][0]: one for one in found["argument"]["fields"]}
    assert shown["old_log_probs"] == {
        "path": ["old_log_probs"],
        "dtype": "float32",
        "shape": [5, 768],
        "form": "padded",
        "raw_bytes": field.raw_bytes,
        "packed_bytes": field.packed_bytes,
    }
    assert [one["path"] for one in found["result"]["fields"]] == [["responses"]]
