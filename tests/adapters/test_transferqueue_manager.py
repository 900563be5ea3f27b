"""The manager of the storage backend over storage units in this process, where messages can be held up and fail."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from needs import needs
from tensordict import NonTensorStack, TensorDict, TensorDictBase

needs("transfer_queue")

import zmq

from maskpack.adapters.transferqueue.chunk import packed
from maskpack.adapters.transferqueue.large import LARGE, Large
from maskpack.adapters.transferqueue.manager import MaskpackStorageManager, StorageUnits
from maskpack.adapters.transferqueue.server import ANSWER, REQUEST, SOCKET, Seal, StorageUnit, message
from maskpack.adapters.transferqueue.unit import Samples
from maskpack.errors import LayoutError, StorageError

_nonces = itertools.count(1)


def asked(unit, request, *given):
    """The answer of a storage unit to a request, as from another process."""
    return pickle.loads(pickle.dumps(getattr(unit, request)(*pickle.loads(pickle.dumps(given)))))


class Direct(MaskpackStorageManager):
    """Asks units of this process; `before` runs before each request."""

    def __init__(self, units, before=None):
        self.units, self.before = units, before
        self._units, self._codec = StorageUnits(self.units, b""), None

    async def _ask(self, unit, request, *given):
        if self.before is not None:
            await self.before(unit, request, given)
        return asked(self.units[unit], request, *given)

    async def notify_data_update(self, *_):
        pass

    def held(self):
        return sum(unit.figures()["large_tensors"] for unit in self.units)


def units(count=2):
    return [Samples() for _ in range(count)]


@pytest.mark.parametrize("name", ["__init__", "_loaded", "rows", "__class__", "_put", ["put"], None])
def test_a_member_of_the_run_calls_what_is_a_request_and_nothing_else(name):
    unit, secret = StorageUnit(b"secret", "alone"), b"secret"
    unit._samples.put([3], packed(TensorDict({"x": torch.tensor([5])}, [1]), 1, "put")[0])
    before = dict(vars(unit._samples))
    with zmq.Context.instance().socket(zmq.DEALER) as member:
        member.linger, member.rcvtimeo = 0, 20_000
        member.connect(unit.address().to_addr(SOCKET))

        def said(request):
            nonce = next(_nonces).to_bytes(16, "little")
            member.send_multipart(Seal(secret).frames(REQUEST, (request, (), unit.address().id), nonce))
            received = member.recv_multipart(copy=False)
            assert Seal(secret).nonce(ANSWER, received) == nonce
            return message(received)

        kind, error = said(name)
        assert kind is StorageError
        assert "expected one of ['clear', 'figures', 'get', 'load'," in error
        assert vars(unit._samples) == before
        assert said("figures")[1]["samples"] == 1


def put(manager, samples, fields):
    data = fields if isinstance(fields, TensorDictBase) else TensorDict(fields, batch_size=[len(samples)])
    return manager.put_data(data, SimpleNamespace(global_indexes=samples, partition_ids=["a"]))


def get(manager, samples, *fields):
    return manager.get_data(SimpleNamespace(global_indexes=samples, field_names=list(fields)))


def clear(manager, samples):
    return manager.clear_data(SimpleNamespace(global_indexes=samples))


def picture(seed):
    torch.manual_seed(seed)
    return torch.rand(LARGE // 4)


def pictures(*seeds):
    return {"o": NonTensorStack(*[{"p": picture(seed)} for seed in seeds])}


def test_of_a_sample_that_is_named_twice_the_last_row_stays():
    for samples in ([0, 64, 0], [0, 1, 0], [0, 0], [5, 6, 7, 6], [0, 1, 70, 0]):
        manager = Direct(units())
        asyncio.run(put(manager, samples, {"x": torch.arange(len(samples))}))
        last = {sample: row for row, sample in enumerate(samples)}
        got = asyncio.run(get(manager, list(last), "x"))["x"]
        assert got.tolist() == list(last.values())


def test_fields_that_are_not_one_value_a_sample_are_refused():
    manager, for_all = Direct(units()), TensorDict(batch_size=[2])
    for_all.set_non_tensor("x", "one for all")
    for data, seen in (
        (TensorDict({"x": torch.zeros(1)}, [1]), "1 rows"),
        (TensorDict({"x": torch.zeros(1)}), "1 rows"),
        (TensorDict({"x": NonTensorStack(1, 2, 3)}, [3]), "3 rows"),
        (for_all, "a NonTensorData"),
    ):
        with pytest.raises(LayoutError, match=f'put_data: field "x" has {seen}; expected 2, one for each sample'):
            asyncio.run(put(manager, [0, 1], data))
    with pytest.raises(NotImplementedError, match="to which it cannot apply a data_parser"):
        asyncio.run(manager.put_data(for_all, None, lambda rows: rows))
    assert not any(unit.rows for unit in manager.units)


def test_a_picture_that_goes_between_two_messages_of_a_put_is_sent_again():
    manager, asks = Direct(units(1)), Counter()

    async def clear_once(unit, request, given):
        asks[request] += 1
        if request == "put" and asks["put"] == 4:
            await clear(manager, [0])
            assert manager.held() == 1

    asyncio.run(put(manager, [0], pictures(0)))
    manager.before = clear_once
    asyncio.run(put(manager, [1], pictures(1)))
    assert asks["put"] == 2  # without the picture, and with it
    asyncio.run(put(manager, [2], {"o": NonTensorStack({"p": picture(0), "q": picture(2)})}))
    assert asks["put"] == 5  # 0 was there at first
    assert manager.held() == 3
    row = asyncio.run(get(manager, [2], "o"))["o"][0]
    assert torch.equal(row["p"], picture(0))
    assert torch.equal(row["q"], picture(2))
    asyncio.run(clear(manager, [1, 2]))
    assert manager.held() == 0


def test_what_a_put_that_fails_has_put_stays_whole():
    manager = Direct(units())
    asyncio.run(put(manager, [0, 64], pictures(0, 0)))

    async def fail(unit, request, given):
        if request == "put" and unit == 1:
            raise StorageError("put: storage unit is gone")

    manager.before = fail
    with pytest.raises(StorageError, match="is gone"):
        asyncio.run(put(manager, [0, 64], {"o": NonTensorStack("a", "b")}))
    assert asyncio.run(get(manager, [0], "o"))["o"][0] == "a"
    assert torch.equal(asyncio.run(get(manager, [64], "o"))["o"][0]["p"], picture(0))
    assert manager.held() == 1
    manager.before = None
    asyncio.run(clear(manager, [0, 64]))
    assert manager.held() == 0


def test_a_picture_is_sent_to_each_unit_of_its_samples_once():
    sent = Counter()

    async def count(unit, request, given):
        if request == "put":
            sent[unit] += len({row["p"] for row in given[1].objects["o",].data if isinstance(row["p"], Large)})

    manager = Direct(units(4), count)
    samples = [0, 1, 64, 65, 128, 300]
    for _ in range(2):
        asyncio.run(put(manager, samples, pictures(0, 1, 0, 1, 0, 1)))
        assert sent == {0: 2, 1: 2, 2: 1}  # sample 300 is in unit 0
    assert [len(unit.large) for unit in manager.units] == [2, 2, 1, 0]
    got = asyncio.run(get(manager, samples[::-1], "o"))["o"]
    assert all(torch.equal(row["p"], picture(seed)) for row, seed in zip(got, (1, 0, 1, 0, 1, 0), strict=True))
