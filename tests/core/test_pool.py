"""A pool gives the same memory again, never while anything over it is alive, and not for ever."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
import torch
from samples import PAD, assert_same, rollout

import maskpack as mp
from maskpack.core import bits
from maskpack.core import memory as pools
from maskpack.core.memory import Pool, memory

MB = 1 << 20


def address(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_of_it_is_gone():
    pool = Pool()
    first = pool.take(2 * MB)
    place = address(first)
    assert (first.dtype, first.shape, first.flags.writeable) == (np.uint8, (2 * MB,), True)
    second = pool.take(2 * MB)
    assert address(second) != place
    del first
    assert address(pool.take(2 * MB)) == place


@pytest.mark.parametrize(
    "over",
    [
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x.view(np.int64).reshape(2, -1))[1, 5:],
        lambda x: torch.from_numpy(x).view(torch.bfloat16).untyped_storage(),
        lambda x: torch.from_numpy(x).view(torch.float32).numpy()[3:],
        lambda x: x[7:].view(np.int8),
        lambda x: memoryview(x),
        lambda x: np.frombuffer(x.data, np.uint8),
        lambda x: np.from_dlpack(torch.from_numpy(x)),
    ],
)
def test_anything_over_a_block_keeps_it(over):
    pool = Pool()
    block = pool.take(MB)
    place = address(block)
    held = over(block)
    del block
    gc.collect()
    others = [pool.take(MB) for _ in range(3)]
    assert place not in map(address, others)
    del held, others
    gc.collect()
    assert place in [address(block) for block in [pool.take(MB) for _ in range(4)]]


def test_a_block_serves_what_is_a_little_smaller():
    pool = Pool()
    place = address(pool.take(9 * MB))
    for nbytes, same in ((8 * MB, True), (8 * MB - 1, False), (9 * MB, True), (9 * MB + 1, False)):
        block = pool.take(nbytes)
        assert block.nbytes == nbytes
        assert (address(block) == place) == same
        del block
        pool._free[:] = [free for free in pool._free if address(free.data) == place]


def test_blocks_that_nobody_takes_go_back_to_the_system():
    pool = Pool()
    pool.take(MB)
    for _ in range(4):
        with pool.used():
            pass
        assert pool.nbytes == MB
    with pool.used():
        pass
    assert pool.nbytes == 0


def test_only_large_pieces_inside_use_the_pool():
    pool = Pool()
    memory(MB)
    with pool.used():
        memory(MB - 1)
        memory(0)
    assert pool.nbytes == 0
    with pool.used():
        memory(MB)
        with Pool().used():
            memory(3 * MB)
    assert pool.nbytes == MB
    memory(MB)
    assert pool.nbytes == MB


def test_decoding_into_what_was_used_before_is_exact(monkeypatch):
    for module in (pools, bits):
        monkeypatch.setattr(module, "LEAST", 1)
    pool, batch = Pool(), rollout(holes=True)
    packed = mp.compress(batch, pad_token_id=PAD)
    places = []
    for _ in range(3):
        with pool.used():
            out = mp.decompress(packed)
        assert_same(out, batch)
        places.append({address(x) for x in out.values() if isinstance(x, torch.Tensor)})
        for value in out.values():
            if isinstance(value, torch.Tensor):
                value.view(torch.uint8).fill_(0xA5)
        del out, value
    assert len(places[0] & places[1] & places[2]) >= 10


def test_threads_share_a_pool():
    pool, wrong = Pool(), []

    def work(number):
        for _ in range(300):
            block = pool.take(MB)
            block[::65536] = number
            if not (block[::65536] == number).all():
                wrong.append(number)
            with pool.used():
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert pool.nbytes <= 8 * MB
