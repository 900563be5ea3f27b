"""Storage units with logs: killed at any moment, they come back with every sample that was put, once."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import signal
import threading

import pytest
import torch
from frozen import freeze
from needs import needs
from tensordict import NonTensorStack, TensorDict

needs("transfer_queue")

import ray
import test_transferqueue_manager as managed
import transfer_queue as tq
from omegaconf import OmegaConf
from own_ray import own_ray
from test_transferqueue_backend import COLUMNS, ROWS
from test_transferqueue_manager import Direct, asked

import maskpack
from maskpack.adapters.transferqueue import durable, manager
from maskpack.adapters.transferqueue.chunk import packed
from maskpack.adapters.transferqueue.durable import SampleLog
from maskpack.adapters.transferqueue.large import LARGE, Large, joined, parted
from maskpack.adapters.transferqueue.library import ServerInfo
from maskpack.adapters.transferqueue.unit import Samples
from maskpack.errors import LayoutError, StorageError
from maskpack.store import RolloutLog, disk

PARTITION = "durable"


# -------------------------------------------------------------------- a unit in this process


def put(unit, samples, **fields):
    asyncio.run(managed.put(Direct([unit]), samples, fields))


def clear(unit, samples):
    asyncio.run(managed.clear(Direct([unit]), samples))


def got(unit, samples, *fields):
    return freeze(asyncio.run(managed.get(Direct([unit]), samples, *fields)))


def contents(unit):
    """Everything in a unit, field by field."""
    held = {}
    for sample, lying in unit.rows.items():
        fields = sorted(set().union(*(chunk.fields for chunk, _ in lying)))
        held[sample] = {name: got(unit, [sample], name) for name in fields}
    return held


def opened(folder, run="run"):
    return Samples(SampleLog(str(folder), run, "interval"))


def again(unit, run="run"):
    """The unit, started again, as after a kill."""
    unit.log.close()
    return opened(unit.log.path, run)


def picture(seed):
    return {"p": torch.full((LARGE // 4,), float(seed)), "seed": seed}


def test_columns_of_all_kinds_are_read_again(tmp_path):
    unit, plain = opened(tmp_path), Samples()
    samples = [*range(ROWS)]
    for each in (plain, unit):
        for kind, column in COLUMNS.items():
            put(each, samples, **{kind: column()})
        mask = torch.tensor([[0, 1, 1]] * ROWS)
        put(each, [*range(50, 50 + ROWS)], attention_mask=mask, input_ids=7 * mask)
        turned = [torch.arange(3 * n).reshape(3, n) for n in (2, 5)]
        put(each, [90, 91], turned=torch.nested.as_nested_tensor(turned, layout=torch.strided))
    assert contents(again(unit)) == contents(plain)


@pytest.mark.parametrize("seed", range(3))
def test_puts_and_clears_of_any_order(tmp_path, monkeypatch, seed):
    """Beside a unit without a log, with small segments, so that they are compacted."""
    monkeypatch.setattr(durable, "_SEGMENT", 1 << 14)
    monkeypatch.setattr(durable, "_LEAST", 8)
    rng, unit, plain = random.Random(seed), opened(tmp_path), Samples()
    for step in range(150):
        samples = [rng.randrange(40) for _ in range(rng.choice([1, 3, 12]))]
        if rng.random() < 0.2:
            clear(unit, samples)
            clear(plain, samples)
        else:
            names = rng.sample(["a", "b", "c", "o"], rng.randint(1, 3))
            rows = {name: torch.tensor([[step, rng.randrange(9)]] * len(samples)) for name in names}
            if "o" in names:
                rows["o"] = NonTensorStack(*[picture(rng.randrange(3)) for _ in samples])
            put(unit, samples, **rows)
            put(plain, samples, **rows)
        if rng.random() < 0.1:
            unit = again(unit)
        if step % 30 == 29:
            assert contents(unit) == contents(plain)
    assert contents(again(unit)) == contents(plain)


def test_the_log_does_not_grow_with_what_was_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_SEGMENT", 1 << 14)
    monkeypatch.setattr(durable, "_LEAST", 8)
    unit, sizes = opened(tmp_path), []
    put(unit, [1000], x=torch.arange(1), o=NonTensorStack(picture(5)))
    before = contents(unit)
    for _ in range(40):
        put(unit, [*range(8)], x=torch.randn(8, 200), o=NonTensorStack(*map(picture, range(8))))
        clear(unit, [*range(8)])
        sizes.append(unit.figures()["log_bytes"])
    assert max(sizes) < 3 * max(sizes[:10])
    unit = again(unit)
    assert contents(unit) == before
    assert (unit.figures()["samples"], unit.figures()["large_tensors"]) == (1, 1)


def test_a_put_that_is_repeated_changes_nothing(tmp_path):
    unit = opened(tmp_path)
    put(unit, [0, 1], x=torch.arange(2), o=NonTensorStack(picture(0), picture(0)))
    chunk, large = parted(packed(TensorDict({"o": NonTensorStack(picture(1))}, [1]), 1, "put")[0])
    whole, _ = joined(chunk, {digest: Large.of(digest, held, None) for digest, held in large.items()})
    for sent in (chunk, whole, whole):  # again after a kill: the answer was lost
        assert asked(unit, "put", [0], sent) == (set() if sent is whole else {*large})
        unit = again(unit)
        assert contents(unit)[0]["o"] == freeze(TensorDict({"o": NonTensorStack(picture(int(sent is whole)))}, [1]))
    assert unit.figures()["large_tensors"] == 2
    clear(unit, [0, 1])
    assert not unit.rows
    assert unit.figures()["large_tensors"] == 0


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path, monkeypatch):
    unit = opened(tmp_path)
    put(unit, [0, 1], x=torch.arange(2), o=NonTensorStack(picture(0), picture(1)))
    before, write = contents(unit), disk.write
    saved = str(tmp_path / "file"), asked(unit, "save", str(tmp_path / "file"))

    def full(file, at, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    for change in (
        lambda: put(unit, [0], x=torch.tensor([7])),
        lambda: put(unit, [0], o=NonTensorStack(picture(2))),
        lambda: clear(unit, [0]),
        lambda: loaded(unit, saved),
    ):
        with pytest.raises(StorageError, match="No space left"):
            change()
        assert contents(unit) == before
    monkeypatch.setattr(disk, "write", write)
    put(unit, [2], x=torch.tensor([2]))  # it is still of this run
    clear(unit, [2])
    assert contents(again(unit)) == before


def test_nested_batches_are_refused_before_they_are_stored(tmp_path):
    unit, batch = opened(tmp_path), TensorDict({"x": torch.ones(1, 3), "response_mask": torch.tensor([[1, 1, 0]])}, [1])
    nested = maskpack.nest_batch_by_mask(batch, {"response_mask": ("response_mask", 0), "x": ("response_mask", 1)})
    put(unit, [5], y=torch.ones(1))
    with pytest.raises(LayoutError, match=r'put_data: field "_maskpack" is .* a reserved name; .*unnest_batch_by_mask'):
        asyncio.run(managed.put(Direct([unit]), [0], nested))
    for sample, fine in enumerate((nested.exclude("_maskpack"), maskpack.unnest_batch_by_mask(nested))):
        asyncio.run(managed.put(Direct([unit]), [sample], fine))
    before = contents(unit)
    assert [*before] == [5, 0, 1]
    assert contents(again(unit)) == before


@pytest.mark.filterwarnings("ignore:RolloutLog")
def test_a_log_that_lost_a_record_does_not_give_older_values(tmp_path):
    unit = Samples(SampleLog(str(tmp_path), "run", "always"))
    put(unit, [0], x=torch.arange(900)[None])
    size = unit.log.nbytes
    put(unit, [0], x=torch.arange(900)[None] + 1)
    unit.log.close()
    segment = tmp_path / "000000.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: size + 200])
    with pytest.raises(StorageError, match=r"records of 000000\.seg are damaged or missing; .*load a checkpoint"):
        opened(tmp_path)
    segment.write_bytes(whole)
    assert got(opened(tmp_path), [0], "x") == got(unit, [0], "x")


def test_fields_without_values_are_refused():
    with pytest.raises(LayoutError, match='put_data: field "x" is on the meta device, without values'):
        put(Samples(), [0], x=torch.ones(1, 2, device="meta"))


def test_kinds_of_chunks_that_are_gone_are_forgotten():
    unit = Samples()
    for width in range(1, 40):
        mask = torch.tensor([[0] * width + [1]])
        put(unit, [width], attention_mask=mask, input_ids=7 * mask)
    clear(unit, range(40))
    assert not any(vars(unit)[name] for name in ("rows", "lives", "_small"))


# -------------------------------------------------------------------- a checkpoint, and the log of another run


def loaded(unit, saved):
    asked(unit, "load", *saved)
    asked(unit, "switch", True)
    return unit


def test_a_new_run_has_the_samples_of_the_checkpoint_with_what_was_put_since(tmp_path):
    unit = opened(tmp_path / "log", "first")
    for sample in range(5):
        put(unit, [sample], x=torch.tensor([sample]), o=NonTensorStack(picture(sample)))
    put(unit, [0, 2], y=torch.tensor([0, 2]))
    file = str(tmp_path / "file")
    saved = file, asked(unit, "save", file)
    before = contents(unit)
    put(unit, [1], x=torch.tensor([11]), o=NonTensorStack(picture(6)))  # overwritten
    put(unit, [3], y=torch.tensor([3]))  # a later field
    after = contents(unit)
    clear(unit, [0, 2])
    put(unit, [2], x=torch.tensor([22]), z=torch.tensor([22]))  # another sample, of the same index
    put(unit, [7], x=torch.tensor([7]), o=NonTensorStack(picture(9)))
    expected = {0: before[0], 1: after[1], 2: before[2], 3: after[3], 4: before[4]}

    unit = again(unit, "second")
    for name, *given in (("put", [0], None), ("clear", [0])):
        with pytest.raises(StorageError, match=rf"^{name}: .* samples of an earlier run; .*load_checkpoint"):
            asked(unit, name, *given)
    unit = loaded(again(unit, "second"), saved)
    for _ in range(2):
        assert contents(unit) == expected
        assert unit.figures()["large_tensors"] == len({0, 6, 2, 3, 4})
        unit = again(unit, "second")
    put(unit, [1], x=torch.tensor([12]))
    assert contents(loaded(unit, saved)) == before  # in the same run it goes back
    assert contents(again(unit, "second")) == before
    plain = Samples()
    asked(plain, "load", *saved)
    asked(plain, "switch", True)
    assert contents(plain) == before


def test_a_load_that_was_killed_is_done_again(tmp_path, monkeypatch):
    unit = opened(tmp_path / "log", "first")
    put(unit, [0, 1, 2], x=torch.arange(3))
    put(unit, [2], y=torch.arange(1))
    saved = str(tmp_path / "file"), asked(unit, "save", str(tmp_path / "file"))
    before = contents(unit)
    clear(unit, [0, 2])
    put(unit, [1, 5], x=torch.tensor([9, 9]))
    expected, append = {**before, 1: contents(unit)[1]}, RolloutLog.append
    for limit in range(6):
        unit, left = again(unit, "second"), [limit]

        def killed(self, *given, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return append(self, *given)

        monkeypatch.setattr(RolloutLog, "append", killed)
        asked(unit, "load", *saved)
        try:
            asked(unit, "switch", True)
        except KeyboardInterrupt:
            monkeypatch.setattr(RolloutLog, "append", append)
            continue
        break
    assert 2 <= limit < 5
    monkeypatch.setattr(RolloutLog, "append", append)
    assert contents(unit) == contents(again(unit, "second")) == expected


# -------------------------------------------------------------------- TransferQueue on a local Ray


def start(folder, **options):
    options = {"log": str(folder), "num_data_storage_units": 2} | options
    tq.init(OmegaConf.create({"backend": {"storage_backend": "Maskpack", "Maskpack": options}}))


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray():
        yield


@pytest.fixture
def queue(tmp_path):
    start(tmp_path / "log")
    yield tmp_path
    tq.close()


def of_units(keys, field):
    """Metadata that names a field, whatever the controller knows."""
    meta = tq.get_client().kv_retrieve_meta(keys, PARTITION, create=False)
    meta._field_names = [field]
    return meta


def processes():
    units = tq.interface._TQ_STORAGE["Maskpack"]
    return ray.get([unit.__ray_call__.remote(lambda _: os.getpid()) for unit in units])


def batch_of(keys, version):
    rows = [torch.arange((7 * key + version) % 5) + 1000 * version + key for key in keys]
    extra = [{"key": key, **picture(version + key % 2)} for key in keys]
    fields = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "extra": NonTensorStack(*extra)}
    return TensorDict(fields, batch_size=[len(keys)])


def put_keys(keys, version, model):
    tq.kv_batch_put([str(key) for key in keys], PARTITION, batch_of(keys, version))
    model.update(dict.fromkeys(keys, version))


def assert_model(model):
    """All of it equals the model; each key was read alone from the fields of its version."""
    got = tq.kv_batch_get([str(key) for key in model], PARTITION)
    for place, (key, version) in enumerate(model.items()):
        want = batch_of([key], version)
        assert freeze(got["ids"].unbind()[place]) == freeze(want["ids"].unbind()[0]), (key, version)
        assert freeze(got["extra"][place]) == freeze(want["extra"][0]), (key, version)


def test_units_that_are_killed_at_any_moment_lose_nothing(queue, monkeypatch):
    """While puts run, and when nothing does."""
    monkeypatch.setattr(manager, "_PATIENCE", 0.5)
    model, errors, stop, rng = {}, [], threading.Event(), random.Random(0)

    def puts():
        try:
            for version in itertools.count(0, 2):
                if stop.is_set():
                    break
                put_keys(sorted(rng.sample(range(200), rng.choice([1, 20]))), version, model)
        except Exception as error:
            errors.append(error)

    writer = threading.Thread(target=puts)
    writer.start()
    for place in (0, 1, 0):
        stop.wait(0.3)
        os.kill(processes()[place], signal.SIGKILL)
    stop.wait(0.3)
    stop.set()
    writer.join()
    assert not errors
    assert_model(model)
    put_keys([*range(200)], 2, model)
    tq.kv_clear([str(key) for key in range(70, 140)], PARTITION)
    for key in range(70, 140):
        del model[key]
    victims = processes()
    for process in victims:
        os.kill(process, signal.SIGKILL)
    assert_model(model)
    assert not set(victims) & set(processes())
    storage = tq.get_client().storage_manager
    figures = tq.get_client()._run_coroutine(storage.figures())
    assert sum(unit["samples"] for unit in figures) == len(model)
    mine, other = storage._units.infos
    killed = f"{mine.id.rpartition('-')[0]}-killed"  # the process before, whose port is reused
    storage._units.infos[0] = ServerInfo(mine.role, killed, other.ip, other.ports)
    assert_model(model)
    assert [info.id for info in storage._units.infos] == [mine.id, other.id]


def test_a_new_run_goes_on_with_the_log(queue):
    model = {}
    put_keys([*range(100)], 0, model)
    tq.save_checkpoint(queue / "checkpoint")
    put_keys([*range(40, 90)], 2, model)
    tq.kv_batch_put(["80"], PARTITION, TensorDict({"later": torch.ones(1)}, batch_size=[1]))
    tq.kv_clear([str(key) for key in range(60)], PARTITION)
    put_keys([*range(1000, 1050)], 4, {})  # some of them get the indexes of those that were cleared
    model.update(dict.fromkeys(range(60), 0))
    for process in processes():
        os.kill(process, signal.SIGKILL)
    tq.close()
    start(queue / "log", fsync="always")
    with pytest.raises(StorageError, match="samples of an earlier run"):
        put_keys([2000], 0, {})
    tq.load_checkpoint(queue / "checkpoint")
    assert_model(model)
    assert not list(tq.kv_batch_get(["80"], PARTITION, "later").keys())  # the controller does not know it
    assert tq.get_client().get_data(of_units(["80"], "later"))["later"].tolist() == [1]
    put_keys([*range(95, 120)], 6, model)
    assert_model(model)
