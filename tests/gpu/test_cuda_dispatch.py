"""Ranks on a GPU: what they return comes to the host, or where the call says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import samples
import torch
from needs import needs
from samples import PAD, assert_same, rollout
from tensordict import TensorDict

import maskpack as mp

ray = needs("ray")

from ray import cloudpickle

from maskpack.dispatch import WorkerGroup, endpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

for module in (sys.modules[__name__], samples):  # the ranks cannot import the tests
    cloudpickle.register_pickle_by_value(module)


class OnGpu:
    @endpoint(device="cuda")
    def echo(self, batch: Any) -> Any:
        return all_there(batch)

    @endpoint(device="cuda", format="nested")
    def echo_nested(self, batch: Any) -> Any:
        return all_there(batch)

    @endpoint(device="cuda", micro_batches=True)
    def echo_in_parts(self, batch: Any) -> Any:
        return all_there(batch), batch["old_log_probs"].sum()

    @endpoint(device="cuda")
    def tensors(self, batch: Any) -> Any:
        values = batch["old_log_probs"]
        apart = TensorDict({"x": values}, batch_size=batch.batch_size)
        return TensorDict({"values": values}, batch_size=batch.batch_size), {"sum": values.sum(), "all": [apart]}


class OnHost:
    @endpoint
    def echo(self, batch: Any) -> Any:
        assert not any(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))
        return batch

    @endpoint
    def has_cuda(self, batch: Any) -> bool:
        return torch.cuda.is_available()


def all_there(batch: Any) -> Any:
    assert all(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))
    return batch


def devices(batch: Any) -> set[str]:
    return {value.device.type for value in batch.values() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=200 * 2**20)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def group() -> WorkerGroup:
    return WorkerGroup.launch(OnGpu, 1, pad_token_id=PAD, actor_options={"num_gpus": 1, "num_cpus": 1})


@pytest.fixture
def batch() -> TensorDict:
    return rollout(holes=True)


@pytest.mark.parametrize("method", ["echo", "echo_nested"])
def test_results_come_to_the_host(group: WorkerGroup, batch: TensorDict, method: str) -> None:
    for driver in (batch, batch.to("cuda")):
        out = group.call(method, driver)
        assert devices(out) == {"cpu"}
        assert_same(out.clear_device_(), batch)
        nested = group.call(method, driver, format="nested")
        assert devices(nested) == {"cpu"}
        assert_same(mp.unnest_batch_by_mask(nested).clear_device_(), batch)

        async def waited(driver: Any = driver) -> Any:
            return await group.submit(method, driver)

        assert_same(asyncio.run(waited()).clear_device_(), batch)


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_or_where_the_call_says(group: WorkerGroup, batch: TensorDict, layout: Any) -> None:
    out = group.call("echo", batch, format=layout, device="cuda")
    assert devices(out) == {"cuda"}
    assert out.device is not None
    assert out.device.type == "cuda"
    back = out if layout == "padded" else mp.unnest_batch_by_mask(out)
    assert_same(back.to("cpu").clear_device_(), batch)


def test_micro_batches_and_tensors_beside_the_rows(group: WorkerGroup, batch: TensorDict) -> None:
    plan = group.plan(group.pack(batch), 20)
    out, sums = group.call("echo_in_parts", batch, plan=plan)
    assert_same(out.clear_device_(), batch)
    assert {value.device.type for own in sums for value in own} == {"cpu"}
    out, (told,) = group.call("tensors", batch)
    assert_same(out["values"], batch["old_log_probs"])
    assert told["sum"].device.type == "cpu"
    assert_same(told["all"][0]["x"], batch["old_log_probs"])


def test_rows_that_stay_where_they_are(group: WorkerGroup, batch: TensorDict) -> None:
    view = group.call("echo", batch, format="view")
    here = view.materialize(get=ray.get)
    assert devices(here) == {"cpu"}
    assert_same(here.clear_device_(), batch)
    assert devices(view.materialize(get=ray.get, device="cuda")) == {"cuda"}
    assert devices(view.materialize(get=ray.get, device="cuda", format="nested")) == {"cuda"}


def test_ranks_without_a_gpu_take_rows_of_ranks_with_one(group: WorkerGroup, batch: TensorDict) -> None:
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}
    hosts = WorkerGroup.launch(OnHost, 1, pad_token_id=PAD, actor_options=options)
    assert hosts.call("has_cuda", batch) == [False]
    out = hosts.call("echo", group.call("echo", batch, format="view"))
    assert_same(out.clear_device_(), batch)
