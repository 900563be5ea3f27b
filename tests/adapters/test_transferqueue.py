"""The storage backend of TransferQueue on a local Ray: options, large tensors, checkpoints, faults."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from needs import needs
from tensordict import NonTensorStack, TensorDict

needs("transfer_queue")

import ray
import transfer_queue as tq
import zmq
from omegaconf import OmegaConf
from own_ray import own_ray
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from maskpack.adapters.transferqueue import manager as manager_module
from maskpack.adapters.transferqueue import unit
from maskpack.adapters.transferqueue.chunk import packed
from maskpack.adapters.transferqueue.large import LARGE
from maskpack.errors import MaskpackError, StorageError

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray():
        yield
        stop()


@pytest.fixture
def queue():
    """Starts TransferQueue with some options; what ran before with the same ones goes on, empty."""

    def start(**options):
        if _running == [options]:
            for partition, samples in tq.kv_list().items():
                if samples:
                    tq.kv_clear(keys=list(samples), partition_id=partition)
            return tq.get_client().storage_manager
        stop()
        _running.append(options)
        backend = {"storage_backend": "Maskpack", **({"Maskpack": options} if options else {})}
        configuration = OmegaConf.create({"backend": backend})
        OmegaConf.set_struct(configuration, True)  # as Hydra gives it
        tq.init(configuration)
        return tq.get_client().storage_manager

    return start


_running = []


def stop():
    tq.close()
    _running.clear()


def figures(manager):
    """The sums of what the storage units say."""
    units = tq.get_client()._run_coroutine(manager.figures())
    return {name: sum(unit[name] for unit in units) for name in units[0]}


def images(samples, *, group, seed=0):
    """Rows with a picture of 65,536 floats for each `group` of them, and one small tensor."""
    torch.manual_seed(seed)
    levels = torch.rand(256)
    pictures = [levels[torch.randint(256, (LARGE // 16, 4))] for _ in range(-(-samples // group))]
    rows = [{"pixel_values": pictures[row // group], "grid": torch.tensor([1, row])} for row in range(samples)]
    fields = {"multi_modal_inputs": NonTensorStack(*rows), "n": torch.arange(samples)}
    return TensorDict(fields, batch_size=[samples])


def keys(samples):
    return [f"key-{next(_numbers)}" for _ in range(samples)]


def assert_images(got, want):
    for row, other in zip(got["multi_modal_inputs"], want["multi_modal_inputs"], strict=True):
        assert torch.equal(row["pixel_values"], other["pixel_values"])
        assert torch.equal(row["grid"], other["grid"])


# -------------------------------------------------------------------- large tensors


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_picture_is_stored_once_for_all_samples_and_puts(queue, codec):
    manager = queue(codec=codec)
    data, names = images(16, group=8), keys(16)
    for at in range(0, 16, 2):  # in eight puts
        tq.kv_batch_put(keys=names[at : at + 2], partition_id=f"part-{at % 4}", fields=data[at : at + 2])
    seen = figures(manager)
    assert seen["large_tensors"] == 2
    assert seen["large_bytes"] <= LARGE * 4 * 2 // 2  # two pictures of 4 * LARGE bytes, two bytes for a float of four
    odd = [name for at in range(0, 16, 4) for name in names[at : at + 2]]
    got = tq.kv_batch_get(keys=odd, partition_id="part-0")
    assert_images(got, torch.cat([data[at : at + 2] for at in range(0, 16, 4)]))
    pictures = [row["pixel_values"].data_ptr() for row in got["multi_modal_inputs"]]
    assert len(set(pictures)) == 2  # one memory for each picture
    tq.kv_clear(keys=odd, partition_id="part-0")
    assert figures(manager)["large_tensors"] == 2
    rest = [name for name in names if name not in odd]
    tq.kv_clear(keys=rest, partition_id="part-2")
    after = figures(manager)
    assert not any(after.values())
    sent = [row["pixel_values"] for row in got["multi_modal_inputs"]]
    assert torch.equal(sent[0], data["multi_modal_inputs"][0]["pixel_values"])  # not the memory of a unit


def test_floats_of_many_values_and_other_words_are_large_tensors_too(queue):
    queue()
    rows = [
        {"x": torch.randn(LARGE), "y": torch.arange(LARGE), "z": torch.randn(LARGE).bfloat16()},
        {"x": torch.full((LARGE,), float("nan")), "y": torch.zeros(LARGE, dtype=torch.uint8), "z": torch.zeros(3)},
    ]
    names = keys(2)
    tq.kv_batch_put(keys=names, partition_id="a", fields=TensorDict({"o": NonTensorStack(*rows)}, batch_size=[2]))
    got = tq.kv_batch_get(keys=names[::-1], partition_id="a")["o"]
    for row, other in zip(got, rows[::-1], strict=True):
        for name in other:
            assert row[name].dtype == other[name].dtype
            assert row[name].shape == other[name].shape
            assert torch.equal(row[name].view(torch.uint8), other[name].view(torch.uint8))


# -------------------------------------------------------------------- sizes


def test_single_samples_are_joined_and_mostly_dead_chunks_are_rewritten(queue):
    manager = queue()
    names = keys(40)
    rows = [torch.randint(0, 1000, (50 + at,)) for at in range(40)]
    for name, row in zip(names, rows, strict=True):
        fields = TensorDict({"input_ids": row[None], "uid": NonTensorStack(name)}, batch_size=[1])
        tq.kv_batch_put(keys=[name], partition_id="a", fields=fields)
    before = figures(manager)
    assert before["chunks"] < 40  # 32 in one unit are one
    got = tq.kv_batch_get(keys=names[::-1], partition_id="a")
    assert all(map(torch.equal, got["input_ids"].unbind(), rows[::-1]))
    assert list(got["uid"]) == names[::-1]
    assert figures(manager)["chunks"] == before["chunks"]  # a get rewrites nothing
    tq.kv_clear(keys=names[1:], partition_id="a")
    after = figures(manager)
    assert after["samples"] == after["chunks"] == 1
    assert after["chunk_bytes"] < before["chunk_bytes"] / 4
    assert torch.equal(tq.kv_batch_get(keys=names[0], partition_id="a")["input_ids"].unbind()[0], rows[0])


# -------------------------------------------------------------------- checkpoints


def numbers(samples, version):
    return TensorDict({"x": torch.arange(samples)[:, None] + 1000 * version}, batch_size=[samples])


def test_a_checkpoint_is_of_all_units_and_for_as_many(queue, tmp_path):
    queue()
    data, names = images(100, group=50), keys(100)
    tq.kv_batch_put(keys=names, partition_id="a", fields=data)
    tq.save_checkpoint(tmp_path / "here", include_storage=False)  # samples are saved all the same
    stop()
    manager = queue()
    tq.kv_batch_put(keys=keys(100), partition_id="a", fields=images(100, group=10, seed=1))
    tq.load_checkpoint(tmp_path / "here")
    assert_images(tq.kv_batch_get(keys=names, partition_id="a"), data)
    assert figures(manager)["large_tensors"] == 3  # samples of the second are in both units
    listed = next((tmp_path / "here").rglob("maskpack.json"))
    written = listed.read_text()
    for text, message in (
        (written.replace('"storage_units": 2', '"storage_units": 3'), "as many storage units as were saved"),
        (written[:-1], r"maskpack\.json has .* not what save_checkpoint wrote"),
        ("[]", r"maskpack\.json has .* not what save_checkpoint wrote"),
        (written[:30] + "\xff", r"maskpack\.json has .* not what save_checkpoint wrote"),
    ):
        listed.write_text(text, "latin-1")
        with pytest.raises(ValueError, match=message):
            tq.load_checkpoint(tmp_path / "here")
    listed.unlink()
    with pytest.raises(FileNotFoundError, match=r"maskpack\.json does not exist"):
        tq.load_checkpoint(tmp_path / "here")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def swap(file):
    first, second = file.read_bytes(), file.with_name("0.pickle").read_bytes()
    file.write_bytes(second)
    file.with_name("0.pickle").write_bytes(first)


DAMAGE = {
    "flipped byte": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "missing": Path.unlink,
    "swapped": swap,
    "of another step": lambda file: shutil.copy(file.parents[2] / "second" / file.parent.name / file.name, file),
    "flipped byte of the controller": lambda file: flip(file.parents[1] / "controller_state.pkl"),
}


def test_a_file_that_is_replaced_after_its_check_is_not_read(tmp_path, monkeypatch):
    """A pickle runs code: what was checked is what is read."""
    step, other = unit.Samples(), unit.Samples()
    step.put([5], packed(numbers(1, 5), 1, "put")[0])
    digest = step.save(str(tmp_path / "file"))
    other.save(str(tmp_path / "other"))
    check = unit.check_digest

    def replaced(*given):
        check(*given)
        (tmp_path / "other").replace(tmp_path / "file")

    monkeypatch.setattr(unit, "check_digest", replaced)
    read = unit.Samples()
    read.load(str(tmp_path / "file"), digest)
    read.switch(True)
    assert [*read.rows] == [5]


def test_a_damaged_checkpoint_is_refused_and_the_queue_stays_as_it_was(queue, tmp_path):
    queue()
    names, wrong = keys(128), []
    for version, folder in ((1, "first"), (2, "second")):
        tq.kv_batch_put(keys=names, partition_id="a", fields=numbers(128, version))
        tq.save_checkpoint(tmp_path / folder)
    for damage in DAMAGE:
        shutil.copytree(tmp_path / "first", tmp_path / "damaged", dirs_exist_ok=True)
        DAMAGE[damage](tmp_path / "damaged" / "maskpack" / "1.pickle")
        seen = error_of(tq.load_checkpoint, tmp_path / "damaged")
        got = error_of(lambda: tq.kv_batch_get(names, "a")["x"].values())
        if str(tmp_path / "damaged") not in seen or got != f"{numbers(128, 2)['x'].flatten()}":
            wrong.append((damage, seen, got))
            tq.load_checkpoint(tmp_path / "second")
    assert not wrong
    tq.load_checkpoint(tmp_path / "first")
    assert torch.equal(tq.kv_batch_get(names, "a")["x"].values(), numbers(128, 1)["x"].flatten())


def error_of(call, *given):
    """What it says, or what its error says."""
    try:
        return str(call(*given))
    except (RuntimeError, ValueError, tq.StorageKeyNotFoundError) as error:
        return str(error)


# -------------------------------------------------------------------- strangers


class Does:
    """Whoever unpickles it calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def test_an_object_that_ends_the_thread_which_unpickles_it_is_an_error(queue, monkeypatch):
    queue()
    monkeypatch.setattr(manager_module, "_PATIENCE", 1)
    monkeypatch.setattr(manager_module, "_TIMEOUT", 2)
    name, again = keys(2)
    with pytest.raises(StorageError, match="SystemExit"):
        tq.kv_batch_put([name], "a", TensorDict({"x": NonTensorStack(Does(sys.exit, 1))}, batch_size=[1]))
    tq.kv_batch_put([name, again], "a", numbers(2, 0))
    assert tq.kv_batch_get([again], "a")["x"].values().tolist() == [1]


def test_nothing_of_a_stranger_is_unpickled(queue, tmp_path):
    manager = queue()
    names, mark = keys(70), tmp_path / "ran"
    tq.kv_batch_put(names, "a", numbers(70, 0))
    code = pickle.dumps(Does(Path.touch, mark))
    messages = [[code], [b""], [b"", b""], [b"\x80\x05garbage"], [b"", code], [b"x" * 5, code], [code, code, code]]
    messages += [[bytes(size), code] for size in (16, 32, 48, 64)] + [[os.urandom(48), code]]
    for info in manager._units.infos:
        for identity in (b"stranger", manager.storage_manager_id.encode()):
            with zmq.Context.instance().socket(zmq.DEALER) as stranger:
                stranger.linger, stranger.rcvtimeo, stranger.identity = 0, 5000, identity
                stranger.connect(info.to_addr("put_get_socket"))
                for message in messages:
                    stranger.send_multipart(message)
                    assert stranger.recv_multipart() == [b""], message
    assert not mark.exists()
    assert tq.kv_batch_get(names, "a")["x"].values().tolist() == list(range(70))


def test_nothing_of_an_impostor_is_unpickled(queue, tmp_path, monkeypatch):
    """Another process has the port of a storage unit that is gone."""
    manager, mark = queue(), tmp_path / "ran"
    code = pickle.dumps(Does(Path.touch, mark))
    with zmq.Context.instance().socket(zmq.ROUTER) as impostor:
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        info = ZMQServerInfo(manager._units.infos[0].role, "impostor", "127.0.0.1", {"put_get_socket": port})
        monkeypatch.setattr(manager._units, "infos", [info])
        for answer in ([code], [b"", code], [None, code], [None, None]):  # None: what it was sent

            def answered(answer=answer):
                who, *asked = impostor.recv_multipart()
                impostor.send_multipart([who, *(frame or asked[at] for at, frame in enumerate(answer))])

            thread = threading.Thread(target=answered)
            thread.start()
            with pytest.raises(StorageError, match=r"figures: storage unit impostor .* did not prove"):
                tq.get_client()._run_coroutine(manager.figures())
            thread.join()
    assert not mark.exists()


def test_the_secret_is_not_told_with_the_configuration(queue):
    manager = queue()
    conf = ray.get(ray.get_actor("TransferQueueController", namespace="transfer_queue").get_config.remote())
    told = f"{conf}{conf.backend.Maskpack.units!r}{vars(manager)}"
    assert "infos" not in told
    assert repr(manager._units.secret) not in told


# -------------------------------------------------------------------- errors


def test_options_that_do_not_exist():
    wrong = {"codecs": "zstd"}, {"num_data_storage_units": 0}, {"num_data_storage_units": True}, {"log": 3}
    for options in (*wrong, {"fsync": "never"}, {"codec": "lz4"}):
        message = "codec is 'lz4'" if "codec" in options else r"backend\.Maskpack has .*; expected .* Correct"
        with pytest.raises(MaskpackError, match=message):
            manager_module.start(OmegaConf.create({"backend": {"Maskpack": options}}))


def test_samples_and_fields_that_are_not_stored_are_named(queue):
    queue()
    names = keys(2)
    tq.kv_batch_put(keys=names, partition_id="a", fields=TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2]))
    tq.kv_batch_put(keys=names[:1], partition_id="a", fields=TensorDict({"z": torch.zeros(1)}, batch_size=[1]))
    client = tq.get_client()
    meta = client.kv_retrieve_meta(keys=names, partition_id="a", create=False)
    first, second = meta.global_indexes
    for fields, text in (
        (["x", "nope"], rf"sample {first} has no \['nope'\], but \['x', 'z'\]"),
        (["z"], rf"sample {second} has no \['z'\], but \['x'\]"),
    ):
        meta._field_names = fields
        with pytest.raises(tq.StorageKeyNotFoundError, match=text):
            client.get_data(meta)
    meta._field_names, meta.global_indexes = ["x"], [first, 9**9]
    with pytest.raises(tq.StorageKeyNotFoundError, match=f"sample {9**9} is not stored"):
        client.get_data(meta)


def wait_for_its_end(info):
    for _ in range(200):
        try:
            socket.create_connection((info.ip, info.ports["put_get_socket"])).close()
        except OSError:
            return
        time.sleep(0.1)
    raise AssertionError("the storage unit goes on")


def test_a_storage_unit_that_was_killed_is_named(queue):
    manager = queue(num_data_storage_units=2)
    names = keys(128)  # 64 in each unit
    fields = TensorDict({"x": torch.arange(128)[:, None]}, batch_size=[128])
    tq.kv_batch_put(keys=names, partition_id="a", fields=fields)
    ray.kill(tq.interface._TQ_STORAGE["Maskpack"][1])
    wait_for_its_end(manager._units.infos[1])
    with pytest.raises(StorageError, match=r"storage unit .* is gone .*\. Restart the run from its last"):
        tq.kv_batch_get(keys=names, partition_id="a")
    with pytest.raises(StorageError, match="put: storage unit"):
        tq.kv_batch_put(keys=names, partition_id="a", fields=fields)
    got = tq.kv_batch_get(keys=names[:64], partition_id="a")["x"].unbind()
    assert [row.tolist() for row in got] == [[at] for at in range(64)]
    stop()
