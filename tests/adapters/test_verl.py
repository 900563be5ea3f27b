"""verl: batches of its trainers packed and as they were, its losses on nested batches, and its own worker groups on a
local Ray with packed batches beside plain ones."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import pickle
import random
import re
from pathlib import Path

import pytest
from needs import needs

needs("verl")

import numpy as np
import ray
import torch
import verl_workers
from omegaconf import OmegaConf
from own_ray import own_ray
from pickled import check_pickles
from samples import PAD, freeze, rollout
from samples import assert_same as same_bits
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, is_tensor_collection
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking
from verl.workers.config import CriticConfig
from verl.workers.utils.padding import left_right_2_no_padding

import maskpack as mp
from maskpack.adapters import verl
from maskpack.adapters.verl.dispatch import RankRows
from maskpack.errors import ReplayError
from maskpack.replay import MismatchLimit
from maskpack.testing import assert_exact

P, R = 5, 6


# -------------------------------------------------------------------- batches


TOKENS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages", "token_level_rewards")


def rollouts(rows=4, seed=0, prompt_width=P, response_width=R, critic=False, m_rope=False):
    """A padded DataProto with everything that a trainer puts into one."""
    rng = random.Random(seed)
    shapes = [(rng.randint(1, prompt_width), rng.randint(1, response_width)) for _ in range(rows)]
    batch = rollout(shapes, prompt_width, response_width, values=critic, objects=False)
    tensors = batch.select(*TOKENS, *FLOATS, *(["values", "returns"] if critic else []))
    if m_rope:
        text = tensors["position_ids"]
        tensors["position_ids"] = torch.stack([text, text * 2, text * 3, text + (text > 0)], dim=1)
    images = [{"pixel_values": torch.randn(3, 2), "n": i} if i % 2 else {} for i in range(rows)]
    objects = {
        "uid": [f"u{i // 2}" for i in range(rows)],
        "raw_prompt": [[{"role": "user", "content": "x" * i}] for i in range(rows)],
        "multi_modal_inputs": images,
    }
    arrays = {name: np.empty(rows, dtype=object) for name in objects}
    for name, items in objects.items():
        for row, item in enumerate(items):
            arrays[name][row] = item
    arrays["index"] = np.arange(rows, dtype=np.int32)
    arrays["source"] = np.array(["gsm8k"] * rows)
    meta = {"temperature": 0.7, "global_token_num": list(range(rows)), "metrics": {"a": [1.0]}}
    return DataProto(tensors, arrays, meta)


def no_padding(proto):
    """What the padded trainer of verl sends: some fields jagged, some padded."""
    return left_right_2_no_padding(copy.deepcopy(proto).to_tensordict())


def all_jagged(proto, rope=None):
    """What the newer trainer of verl holds: every field jagged, each on offsets of its own."""
    batch, fields = proto.batch, {}
    for name, value in batch.items():
        mask = batch["attention_mask"].bool()
        if name == "prompts":
            mask = mask[:, :P]
        elif value.shape[-1] == R:
            mask = mask[:, P:]
        rows = [row[..., kept] for row, kept in zip(value, mask, strict=True)]
        jagged = torch.nested.as_nested_tensor
        fields[name] = rope(rows) if value.dim() == 3 else jagged(rows, layout=torch.jagged)
    objects = {name: list(proto.non_tensor_batch[name]) for name in ("uid", "raw_prompt")}
    return tu.get_tensordict(fields | objects, {"temperature": 1.0, "global_token_num": [5, 6]})


def by_hand(rows):
    return tu.nested_tensor_from_tensor_list(rows, ragged_idx=2)


def by_torch(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def bits(x):
    return x.reshape(-1).contiguous().view(torch.uint8)


def assert_same(a, b):
    """The same types, key orders, shapes, dtypes and bits, all the way down, and the same dims ragged. What comes back
    of jagged tensors has int64 offsets, and a shape that says which dim is ragged."""
    if all(map(is_true, nested_of(a))):
        b = with_true(b)
    same_bits(a, b)
    stated = [[isinstance(size, int) for size in x.shape] for part in (a, b) for x in nested_of(part)]
    half = len(stated) // 2
    assert stated[:half] == stated[half:]


def is_true(x):
    return x.offsets().dtype == torch.int64 and not isinstance(x.shape[x._ragged_idx], int)


def with_true(value):
    """The batch with such tensors; verl makes int32 offsets, and sets the ragged dim of another shape by hand."""
    if isinstance(value, DataProto):
        return DataProto(with_true(value.batch), value.non_tensor_batch, value.meta_info)
    if is_tensor_collection(value) and not is_non_tensor(value):
        out = value.copy()
        for name, own in value.items():
            out.set(name, with_true(own))
        return out
    if not isinstance(value, torch.Tensor) or not value.is_nested or is_true(value):
        return value
    offsets = value.offsets().long()
    return torch.nested.nested_tensor_from_jagged(value.values(), offsets, jagged_dim=value._ragged_idx)


def nested_of(value):
    batch = value.batch if isinstance(value, DataProto) else value
    return (
        [x for x in batch.values() if isinstance(x, torch.Tensor) and x.is_nested]
        if is_tensor_collection(batch)
        else []
    )


def odd_arrays():
    """A DataProto whose arrays are of more dims and kinds than verl's."""
    wide = np.empty((2, 2), dtype=object)
    wide[:] = [[1, [2]], [None, {"x": np.arange(2)}]]
    arrays = {"wide": wide, "numbers": np.array([[1.5], [-0.0]]), "flags": np.array([True, False])}
    return DataProto(TensorDict({"x": torch.ones(2, 3, dtype=torch.bfloat16)}, batch_size=[2]), arrays, {})


def equal_m_rope():
    """Two equal rows, with which the tensor is a regular one."""
    rows = [torch.arange(8).reshape(4, 2), torch.arange(8, 16).reshape(4, 2)]
    return TensorDict({"position_ids": by_torch(rows)}, batch_size=[2])


def inside():
    """A TensorDict inside a TensorDict, with a batch-wide line of integers in it."""
    batch = no_padding(rollouts())
    lower = TensorDict({"mine": torch.ones(4, 2)}, batch_size=[4])
    lower["indices"] = NonTensorData(torch.arange(9))
    return batch.set("lower", lower)


BATCHES = {
    "proto": rollouts,
    "proto of one row": lambda: rollouts(1),
    "proto, wide": lambda: rollouts(9, 1, critic=True),
    "proto, m-rope": lambda: rollouts(m_rope=True),
    "proto without rows": lambda: rollouts(0),
    "proto without batch": lambda: DataProto(non_tensor_batch={"uid": np.array(["a", [1]], dtype=object)}),
    "proto of metrics": lambda: DataProto(meta_info={"metrics": [{"loss": 1.0}], "tensor": torch.ones(2)}),
    "proto of odd arrays": odd_arrays,
    "proto with jagged fields": lambda: DataProto(all_jagged(rollouts()).select("input_ids", "old_log_probs")),
    "tensordict": lambda: rollouts().to_tensordict(),
    "tensordict, some jagged": lambda: no_padding(rollouts()),
    "tensordict, some jagged, m-rope": lambda: no_padding(rollouts(m_rope=True)),
    "tensordict, jagged": lambda: all_jagged(rollouts(m_rope=False)),
    "tensordict, jagged m-rope as verl makes it": lambda: all_jagged(rollouts(m_rope=True), by_hand),
    "tensordict, jagged m-rope as torch makes it": lambda: all_jagged(rollouts(m_rope=True), by_torch),
    "tensordict, m-rope of two equal rows": equal_m_rope,
    "tensordict in tensordict": inside,
    "tensordict of metrics": lambda: tu.get_tensordict({}, {"metrics": {"loss": 1.0}}),
}


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_comes_back_as_it_was(name):
    torch.manual_seed(0)
    data = BATCHES[name]()
    torch.manual_seed(0)
    before = BATCHES[name]()
    packed = verl.compress(data, pad_token_id=PAD)
    assert_same(data, before)
    assert_same(verl.decompress(packed), before)
    assert_same(verl.decompress(pickle.loads(pickle.dumps(packed, protocol=5))), before)
    assert len(packed) == (len(data) if isinstance(data, DataProto) or data.batch_dims else 0)


@pytest.mark.parametrize("rows", [[2, 0, 2], slice(1, 3), torch.tensor([True, False, False, True])])
def test_rows_are_those_that_verl_selects(rows):
    data = rollouts()
    index = list(range(4))[rows] if isinstance(rows, slice) else rows
    index = index.nonzero().flatten().tolist() if isinstance(index, torch.Tensor) else index
    assert_same(verl.decompress(verl.compress(data, pad_token_id=PAD).take(rows)), data.select_idxs(index))
    mixed = no_padding(data)
    chosen = tu.index_select_tensor_dict(mixed, index)
    back = verl.decompress(verl.compress(mixed, pad_token_id=PAD).take(rows))
    for name in mixed.keys():  # noqa: SIM118
        if isinstance(mixed[name], torch.Tensor):
            seen, wanted = back[name], chosen[name]
            for left, right in zip(seen.unbind(), wanted.unbind(), strict=True):
                assert torch.equal(bits(left), bits(right))
        elif isinstance(mixed.get(name), NonTensorStack):
            assert_same(back.get(name).tolist(), chosen.get(name).tolist())
        else:
            assert_same(back.get(name).data, mixed.get(name).data)


def test_what_is_packed_does_not_change_with_the_batch():
    data, before = rollouts(), rollouts()
    packed = verl.compress(data, pad_token_id=PAD)
    before.non_tensor_batch["multi_modal_inputs"] = copy.deepcopy(data.non_tensor_batch["multi_modal_inputs"])
    data.batch["responses"].zero_()
    data.non_tensor_batch["index"][:] = 9
    data.non_tensor_batch["raw_prompt"][0].append(1)
    data.non_tensor_batch["multi_modal_inputs"][1]["pixel_values"].zero_()
    data.meta_info["metrics"]["a"].append(2.0)
    assert_same(verl.decompress(packed), before)


def test_fields_that_share_their_lengths_are_sent_once():
    batch = all_jagged(rollouts(64))
    batch["returns"] = batch["advantages"].clone()
    packed = verl.compress(batch)
    with_one_more = packed.nbytes
    assert len(packed.rows.layouts) == 3
    assert with_one_more == verl.compress(batch.exclude("returns")).nbytes


def test_indices_of_the_whole_batch_stay_small():
    packed = verl.compress(no_padding(rollouts(200)), pad_token_id=PAD)
    assert packed.take([0]).wide["indices",].nbytes < 8 * 200
    assert_same(verl.decompress(packed.take([0]))["indices"], no_padding(rollouts(200))["indices"])


def test_every_field_of_the_trainers_is_known():
    batch = rollouts(critic=True).batch
    for name in ("entropy", "log_probs", "entropys", "sum_pi_squared", "rm_scores", "token_level_scores", "returns"):
        batch[name] = batch["advantages"].clone()
    for name in ("rollout_is_weights", "loss_mask", "student_mass", "teacher_mass", "distillation_losses"):
        batch[name] = batch["response_mask"].clone()
    mask = batch["attention_mask"]
    batch["routed_experts"] = mask[..., None, None].expand(-1, -1, 2, 3).contiguous().to(torch.int16)
    batch["teacher_ids"] = torch.where(mask[..., None].expand(-1, -1, 2) == 1, 3, PAD).to(torch.int32)
    batch["teacher_logprobs"] = -0.5 * mask[..., None].expand(-1, -1, 2)
    batch["prompt_embeds_mask"] = (torch.arange(3) < torch.tensor([[1], [2], [3], [0]])).long()
    batch["prompt_embeds"] = torch.rand(4, 3, 2) * batch["prompt_embeds_mask"][..., None]
    packed = verl.compress(DataProto(batch), pad_token_id=PAD, strict_mask_nesting=True)
    assert_same(verl.decompress(packed), DataProto(batch))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_what_estimators_write_is_packed_without_its_padding(name, holes):
    rows, width = 12, 40
    noise = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, width - 2, (rows, 1), generator=noise)
    valid = (torch.arange(width) < lengths).long()
    mask = valid * (torch.rand(rows, width, generator=noise) < 0.8) if holes else valid
    mask[:, 0] = 1

    def floats():
        return torch.randn(rows, width, generator=noise)

    def keep(x, mask):
        return x.masked_fill(mask == 0, 0)

    rewards = torch.zeros(rows, width).scatter(1, lengths - 1, floats()[:, :1])
    rewards -= 0.01 * keep(floats(), valid)
    given = {
        "token_level_rewards": keep(rewards, valid),
        "values": keep(floats(), valid),
        "old_log_probs": keep(-floats().abs(), valid),
        "sum_pi_squared": keep(floats().abs(), valid),
        "rollout_is_weights": keep(floats().exp(), valid),
        "response_mask": mask,
        "reward_baselines": floats()[:, 0],
    }
    others = {"index": np.arange(rows) // 3, "gamma": 1.0, "lam": 0.95, "config": AlgoConfig()}
    estimator = core_algos.ADV_ESTIMATOR_REGISTRY[name]
    wanted = inspect.signature(estimator).parameters
    advantages, returns = estimator(**{key: value for key, value in (given | others).items() if key in wanted})
    fields = {
        "prompts": torch.ones(rows, 2).long(),
        "attention_mask": torch.cat([torch.ones(rows, 2).long(), valid], 1),
    }
    fields |= {"advantages": advantages, "returns": returns} | given
    batch = TensorDict(fields, [rows])
    options = {"registry": verl.VERL_FIELDS, "strict_mask_nesting": True}
    packed = mp.compress(batch, pad_token_id=0, **options)
    assert_exact(mp.decompress(packed), batch)
    padded = sum(x.nbytes for x in batch.values())
    assert packed.nbytes < padded * (0.1 + valid.float().mean())


# -------------------------------------------------------------------- errors


def test_strict_mode_looks_into_arrays_and_meta_info():
    data = rollouts()
    verl.compress(data, pad_token_id=PAD, strict_mask_nesting=True)  # multi_modal_inputs are dense by design
    data.non_tensor_batch["mine"] = np.array([torch.ones(2)] + [None] * 3, dtype=object)
    with pytest.raises(mp.errors.CoverageError, match=r"mine/\[0\]"):
        verl.compress(data, pad_token_id=PAD, strict_mask_nesting=True)
    registry = verl.VERL_FIELDS | {"mine": verl.MaskNestingSpec(None)}
    verl.compress(data, pad_token_id=PAD, strict_mask_nesting=True, registry=registry)
    data.meta_info["kept"] = {"x": torch.ones(2)}
    with pytest.raises(mp.errors.CoverageError, match="meta_info/kept/x"):
        verl.compress(data, pad_token_id=PAD, strict_mask_nesting=True, registry=registry)


# -------------------------------------------------------------------- nesting


def test_old_names_take_both_kinds_of_batches():
    data = rollouts()
    for given, batch in ((data, data.batch), (data.batch, data.batch)):
        nested = verl.nest_batch_by_mask(given, pad_token_id=PAD, strict_mask_nesting=True)
        inner = nested.batch if given is data else nested
        assert inner["responses"].is_nested
        assert not batch["responses"].is_nested
        assert_same(verl.unnest_batch_by_mask(nested), given)
        packed = verl.compress(nested, pad_token_id=PAD)
        assert_same(verl.unnest_batch_by_mask(verl.decompress(packed)), given)
        assert_same(verl.decompress(packed, format="padded"), given)
        wide = verl.select_and_pad_to_response(nested, "old_log_probs", "input_ids")
        assert_same(wide["old_log_probs"], batch["old_log_probs"])
        assert_same(wide["input_ids"], batch["responses"])
    assert verl.MaskNestingSpec is mp.MaskNestingSpec


# -------------------------------------------------------------------- switches


@pytest.mark.parametrize("struct", [False, True])
def test_switches_are_read_from_a_configuration(struct):
    config = OmegaConf.create({"trainer": {"use_mask_nesting": True, "strict_mask_nesting": True}, "actor": {"a": 1}})
    OmegaConf.set_struct(config, struct)
    assert verl.MaskNestingConfig.of(config.trainer, pad_token_id=3) == verl.MaskNestingConfig(True, True, 3)
    assert verl.MaskNestingConfig.of(config.actor) == verl.MaskNestingConfig()
    assert not verl.MaskNestingConfig.of({"use_mask_nesting": None}).use_mask_nesting
    assert verl.MaskNestingConfig.of(CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1)).pad_token_id is None


def test_strict_is_another_name_for_strict_mask_nesting():
    data = rollouts()
    data.batch["mine"] = torch.ones(4, 9)
    for call in (verl.compress, verl.nest_batch_by_mask):
        for names in ({"strict": True}, {"strict": True, "strict_mask_nesting": True}):
            with pytest.raises(mp.errors.CoverageError, match="mine"):
                call(data, pad_token_id=PAD, **names)
            call(data, pad_token_id=PAD, registry=verl.VERL_FIELDS | {"mine": verl.MaskNestingSpec(None)}, **names)
        with pytest.warns(mp.errors.MaskpackWarning, match="mine"):
            call(data, pad_token_id=PAD, strict=False)
        with pytest.raises(mp.errors.RegistryError, match="strict_mask_nesting is False and strict is True"):
            call(data, pad_token_id=PAD, strict=True, strict_mask_nesting=False)
        with pytest.raises(mp.errors.RegistryError, match="is 'no'; expected True or False"):
            call(data, pad_token_id=PAD, strict="no")
    assert verl.MaskNestingConfig(True, strict=True) == verl.MaskNestingConfig(True, True)
    assert verl.MaskNestingConfig(True, strict=False).strict_mask_nesting is False
    with pytest.raises(mp.errors.RegistryError, match="strict_mask_nesting is True and strict is False"):
        verl.MaskNestingConfig.of({"use_mask_nesting": True, "strict_mask_nesting": True}, strict=False)


# -------------------------------------------------------------------- pickles


def test_pickles_of_data_protos_are_packed_until_it_is_undone():
    check_pickles(verl.pickle_data_protos, rollouts(64, prompt_width=40, response_width=120), freeze)


# -------------------------------------------------------------------- dispatch, without workers


class Group:
    """What a dispatch function asks of a worker group."""

    def __init__(self, dp_ranks):
        self.world_size = len(dp_ranks)
        self._dispatch_info = {"actor": dp_ranks}


def to_all(*args, ranks=2, config=None, **kwargs):
    config = config or verl.MaskNestingConfig(True, pad_token_id=PAD)
    return verl.mask_nesting_dispatch(None, config)["dispatch_fn"](Group([0] * ranks), *args, **kwargs)


def test_arguments_that_verl_would_not_cut_raise_by_name():
    with pytest.raises(mp.errors.LayoutError, match="an argument is a int; expected a DataProto or a DataProtoFuture"):
        to_all(rollouts(), 3)
    with pytest.raises(mp.errors.LayoutError, match="an argument is a TensorDict"):
        to_all(rollouts().batch)
    with pytest.raises(mp.errors.LayoutError, match="4 rows for 3 ranks; expected rows that verl divides"):
        to_all(rollouts(), ranks=3)
    first, second = rollouts(4), rollouts(5)
    first.meta_info["_verl_auto_padding"] = second.meta_info["_verl_auto_padding"] = True
    with pytest.raises(mp.errors.LayoutError, match="a padded batch of 5 rows beside one of 4"):
        to_all(first, second)
    with pytest.raises(mp.errors.LayoutError, match="mesh_name is 3"):
        verl.mask_nesting_dispatch(3)
    with pytest.raises(mp.errors.RegistryError, match="config is a dict"):
        verl.configure(Group([0]), {})


def test_a_parcel_refuses_to_be_taken_for_a_batch():
    call = to_all(rollouts())[0][0][0]
    assert isinstance(call, RankRows)
    uses = [
        lambda: call["input_ids"],
        lambda: call.batch,
        lambda: len(call),
        lambda: bool(call),
        lambda: list(call),
        lambda: "input_ids" in call,
        lambda: call.select("x"),
        lambda: call == call,
        lambda: call.__setitem__("x", 1),
    ]
    for use in uses:
        with pytest.raises(mp.MaskpackError, match="Put @packed_endpoint between @register and the method"):
            use()


def test_decorators_in_the_wrong_order_raise():
    def method(self, data):
        return data

    with pytest.raises(mp.MaskpackError, match="Put @register above @packed_endpoint"):
        verl.packed_endpoint(register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(method))
    with pytest.raises(mp.errors.LayoutError, match="format is 'flat'"):
        verl.packed_endpoint(format="flat")(method)


def test_async_methods_give_the_same():
    call = to_all(rollouts(8, critic=True))[0][0][0]
    now, later = map(verl.packed_endpoint, (verl_workers.score, verl_workers.later))
    assert inspect.iscoroutinefunction(later)  # by which verl and Ray know
    assert_same(verl.decompress(asyncio.run(later(None, call))), verl.decompress(now(None, call)))


# -------------------------------------------------------------------- verl's worker groups


def workers(kind, count, **options):
    """A group of workers, colocated and spawned as verl's trainers do."""
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    worker = create_colocated_worker_cls({"actor": RayClassWithInitArgs(ray.remote(kind), **options)})
    made = RayWorkerGroup(pool, worker, use_gpu=False, device_name="cpu").spawn(prefix_set={"actor"})["actor"]
    return verl.configure(made, verl.MaskNestingConfig(True, pad_token_id=PAD))


@pytest.fixture(scope="module")
def local_ray():
    with own_ray(Path(verl_workers.__file__).parent, num_cpus=4):
        yield


@contextlib.contextmanager
def configured(group, **options):
    """It has this configuration for a while."""
    usual = group._maskpack_config
    verl.configure(group, verl.MaskNestingConfig(True, pad_token_id=PAD, **options))
    try:
        yield
    finally:
        verl.configure(group, usual)


@pytest.fixture(scope="module")
def group(local_ray):
    """Two DP ranks of two peers, the second of which speaks."""
    return workers(verl_workers.Trainer, 4)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize(
    "name",
    [
        "proto",
        "proto, m-rope",
        "proto without batch",
        "tensordict",
        "tensordict, some jagged",
        "tensordict, jagged m-rope as verl makes it",
    ],
)
def test_workers_see_what_verl_gives_them(group, name):
    data = BATCHES[name]()
    plain, packed = group.plain_seen(data), group.packed_seen(data)
    assert_same(packed, plain)
    digests = packed.non_tensor_batch["digest"] if isinstance(packed, DataProto) else tu.get(packed, "digest")
    assert len(set(digests)) == 2  # one a DP rank


def test_a_batch_that_was_packed_before_can_be_sent_again(group):
    data = rollouts(8)
    packed = verl.compress(data, pad_token_id=PAD)
    assert_same(group.packed_seen(packed), group.plain_seen(data))
    assert_same(group.packed_score(data=packed), group.plain_score(data))


def test_results_are_those_of_verl(group):
    data = rollouts(8, critic=True)
    assert_same(group.packed_score(data), group.plain_score(data))
    assert_same(group.off_score(data), group.plain_score(data))  # where the switch says so, it is verl's own way
    assert not isinstance(group.off_score(data), verl.PackedProto)


def test_jagged_outputs_and_metrics_are_those_of_verl(group):
    data = no_padding(rollouts(8))
    before = no_padding(rollouts(8))
    before["multi_modal_inputs"] = data.get("multi_modal_inputs")
    assert_same(group.packed_infer(data), group.plain_infer(data))
    assert_same(data, before)
    assert_same(group.packed_update(data), group.plain_update(data))


def test_uneven_rows_are_padded_as_verl_pads_them(group):
    for rows in (3, 5, 8):
        data, again = rollouts(rows), rollouts(rows)
        again.non_tensor_batch["multi_modal_inputs"] = data.non_tensor_batch["multi_modal_inputs"]
        for batch in (data, again):
            batch.meta_info["_verl_auto_padding"] = True
        packed = group.packed_all_seen(data)
        assert len(data) == rows
        assert_same(packed, group.plain_all_seen(again))
        assert len(packed) == rows
        assert_same(group.packed_seen(data), group.plain_seen(data))  # those of a mesh, too


def test_futures_are_those_of_verl(group):
    data = rollouts(8)
    future = group.packed_score_later(data)
    assert isinstance(future, verl.PackedFuture)
    assert all(isinstance(result, verl.PackedProto) for result in ray.get(future.futures))
    assert_same(future.get(), group.plain_score_later(data).get())
    mixed = no_padding(data)
    assert_same(group.packed_infer_later(mixed).get(), group.plain_infer_later(mixed).get())


def test_a_future_is_an_argument(group):
    data = rollouts(8)
    plain = group.plain_seen(group.plain_score_later(data))
    assert_same(group.packed_seen(group.packed_score_later(data)), plain)
    assert_same(group.plain_seen(group.packed_score_later(data)), plain)
    with pytest.raises(mp.errors.LayoutError, match=r"PackedFuture\.get: a worker returned a dict"):
        group.wrong_kind(data).get()


def test_a_method_that_decodes_nothing_fails_by_name(group):
    with pytest.raises(mp.MaskpackError, match="Put @packed_endpoint between @register and the method"):
        group.bare_score(rollouts())


def test_strict_workers_raise_on_the_driver(group):
    data = rollouts()
    data.batch["mine"] = torch.ones(4, 9)
    with pytest.warns(mp.errors.MaskpackWarning, match="mine"):
        group.packed_seen(data)
    with configured(group, strict=True), pytest.raises(mp.errors.CoverageError, match="mine"):
        group.packed_seen(data)


def test_a_method_can_ask_for_nested_fields(group):
    kinds = group.nested_kinds(rollouts()).non_tensor_batch["kinds"][0].split()
    assert "input_ids:True" in kinds
    assert "old_log_probs:True" in kinds


def test_peers_share_one_object_and_only_those_who_speak_send_rows_back(group):
    data = rollouts(64, prompt_width=40, response_width=120)
    sent, _ = verl.mask_nesting_dispatch("actor")["dispatch_fn"](group, data)
    first, second, third, fourth = sent[0]
    assert first == second != third == fourth
    assert sum(len(pickle.dumps(ray.get(one), 5)) for one in (first, third)) < len(pickle.dumps(data)) / 4
    results = ray.get(group.execute_all("actor_packed_score", *sent))
    assert [type(result) for result in results] == [type(None), verl.PackedProto] * 2
    verl.take_metrics()
    group.packed_score(data)
    found = of_method(verl.take_metrics(), "actor_packed_score")
    assert found["bytes_returned"] == sum(result.nbytes for result in results if result is not None) > 0


# -------------------------------------------------------------------- metrics

STAGES = ("prepare", "put", "wait", "decompress", "gather")


def of_method(metrics, method):
    """The metrics of the one method that was called, without those of its log-probs."""
    prefix = f"maskpack/dispatch/{method}/"
    metrics = {name: value for name, value in metrics.items() if "/rollout_mismatch/" not in name}
    assert all(name.startswith(prefix) for name in metrics)
    assert {type(value) for value in metrics.values()} == {float}
    return {name.removeprefix(prefix): value for name, value in metrics.items()}


def raw_bytes(batch):
    """Of all tensors; of jagged ones the values."""
    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
    values = [x.values() if x.is_nested else x for x in tensors]
    return sum(part.numel() * part.element_size() for part in values)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("kind", ["proto, wide", "tensordict, jagged", "tensordict, some jagged"])
def test_metrics_of_calls_add_up(group, kind):
    data = BATCHES[kind]()
    data = data[:8] if kind == "proto, wide" else data
    rows = verl.compress(data, pad_token_id=PAD)
    own = len(rows) // 2
    sent = sum(rows.take(slice(start, start + own)).nbytes for start in (0, own))
    verl.take_metrics()
    for _ in range(2):
        group.packed_seen(data)
    found = of_method(verl.take_metrics(), "actor_packed_seen")
    assert verl.take_metrics() == {}
    assert found.pop("calls") == 2
    assert found.pop("bytes_raw") == 2 * raw_bytes(getattr(data, "batch", data))
    assert found.pop("bytes_sent") == 2 * sent
    assert found.pop("bytes_returned") == 0 if isinstance(data, DataProto) else found.pop("bytes_returned") > 0
    assert found.pop("seconds") == pytest.approx(sum(found.values()))
    assert found.keys() == {f"{stage}_seconds" for stage in STAGES}
    assert min(found.values()) > 0


def test_a_future_counts_when_it_is_got(group):
    verl.take_metrics()
    future = group.packed_score_later(rollouts(8))
    before = of_method(verl.take_metrics(), "actor_packed_score_later")
    assert before["calls"] == 1
    assert before["bytes_sent"] > before["bytes_returned"] == 0
    future.get()
    found = of_method(verl.take_metrics(), "actor_packed_score_later")
    assert "calls" not in found
    assert found["bytes_returned"] > 0
    assert min(found[f"{stage}_seconds"] for stage in STAGES[2:]) > 0


def test_calls_that_are_not_packed_have_no_metrics(group):
    verl.take_metrics()
    group.off_score(rollouts(8))
    group.plain_score(rollouts(8))
    assert verl.take_metrics() == {}


def test_verl_logs_the_metrics_of_a_step(group, tmp_path, monkeypatch):
    """Each is logged once, with the step whose calls it counts, beside what the trainer logs."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    verl.take_metrics()
    undo, steps = verl.log_metrics(), [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    try:
        tracking = Tracking("project", "run", ["file"])
        for step, calls in enumerate((1, 0)):
            for _ in range(calls):
                group.packed_score(rollouts(8))
            tracking.log(data=steps[step], step=step)
        group.packed_seen(rollouts(8))
    finally:
        undo()
    tracking.log(steps[2], 2)
    del tracking
    assert steps == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0, 1, 2]
    assert [line["data"].pop("loss") for line in logged] == [1.0, 2.0, 3.0]
    assert of_method(logged[0]["data"], "actor_packed_score")["calls"] == 1
    assert logged[1]["data"] == logged[2]["data"] == {}
    assert of_method(verl.take_metrics(), "actor_packed_seen")["calls"] == 1


def with_log_probs(rows, seed=0):
    """Rollouts with log-probs of the rollout and of the trainer."""
    data, source = rollouts(rows), torch.Generator().manual_seed(seed)
    on = data.batch["response_mask"] != 0
    for name in ("rollout_log_probs", "old_log_probs"):
        data.batch[name] = -torch.rand(on.shape, generator=source).where(on, 0)
    return data


def test_the_mismatch_of_rollout_and_trainer_is_a_metric(group):
    """Of the first batch since metrics were taken; with a limit, every batch is compared before it is sent."""
    data, other = with_log_probs(8), with_log_probs(8, 1)
    verl.take_metrics()
    group.packed_seen(data)
    group.packed_seen(other)
    found = {name: value for name, value in verl.take_metrics().items() if "mismatch" in name}
    on = data.batch["response_mask"] != 0
    d = (data.batch["old_log_probs"].double() - data.batch["rollout_log_probs"].double())[on]
    assert found["maskpack/rollout_mismatch/tokens"] == d.numel() > 0
    assert found["maskpack/rollout_mismatch/k3"] == pytest.approx(float((d.exp() - 1 - d).mean()))
    assert found["maskpack/rollout_mismatch/abs_max"] == pytest.approx(float(d.abs().max()))
    assert verl.take_metrics() == {}
    limit = MismatchLimit(abs_max=float(d.abs().max()) / 2)
    message = "compare: the log-probs of the trainer are not those of the rollout: abs"
    with configured(group, mismatch_limit=limit), pytest.raises(ReplayError, match=message):
        group.packed_seen(data)
    data.batch["old_log_probs"] = data.batch["old_log_probs"][:, :, None].clone()
    with pytest.warns(mp.errors.MaskpackWarning, match="rollout_mismatch is not measured: compare: "):
        group.packed_seen(data)
    assert not any("mismatch" in name for name in verl.take_metrics())


def test_the_first_call_of_a_method_is_reported(group, caplog, monkeypatch):
    data, before = rollouts(8, critic=True), rollouts(8, critic=True)
    before.non_tensor_batch["multi_modal_inputs"] = data.non_tensor_batch["multi_modal_inputs"]
    wanted = group.plain_score(data)
    verl.take_metrics()
    pack_result, packed_again = verl.MaskNestingConfig.pack_result, []

    def counted(config, result, like):
        packed_again.append(result)
        return pack_result(config, result, like)

    monkeypatch.setattr(verl.MaskNestingConfig, "pack_result", counted)
    with configured(group, report=True), caplog.at_level("INFO", logger="maskpack"):
        for _ in range(2):
            assert_same(group.packed_score(data), wanted)
    assert len(packed_again) == 1, "the driver packs a result for its report alone"
    assert_same(data, before)
    argument, result = (record.getMessage().splitlines() for record in caplog.records)
    assert argument[0] == "argument of actor_packed_score: 8 rows"
    assert result[0] == "result of actor_packed_score: 8 rows"
    for lines, given in ((argument, data), (result, wanted)):
        assert {*given.batch.keys(), "total"} <= {line.split()[0] for line in lines if line}
    found = {
        name.removeprefix("maskpack/payload/actor_packed_score/"): value
        for name, value in verl.take_metrics().items()
        if name.startswith("maskpack/payload/")
    }
    assert found["argument/rows"] == found["result/rows"] == 8
    for direction, given in (("argument", data), ("result", wanted)):
        assert found[f"{direction}/padded_bytes"] == sum(x.nbytes for x in given.batch.values())
    packed = verl.compress(data, pad_token_id=PAD)
    assert found["argument/wire_bytes"] == mp.report(packed.rows).wire_bytes


# -------------------------------------------------------------------- docs

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"


def test_blocks_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), {})


def test_a_result_of_another_width_goes_whole():
    """As with the switch off: a method may return the longest response of its rows, or one value a row."""
    config = verl.MaskNestingConfig(use_mask_nesting=True, pad_token_id=0)
    like = config.pack(rollouts())
    for shape in ((4, R + 2), (4, 1)):
        result = TensorDict({"old_log_probs": torch.randn(shape), "values": torch.randn(4)}, [4])
        back = verl.decompress(config.pack_result(result, like))
        assert torch.equal(back["old_log_probs"], result["old_log_probs"])
        assert torch.equal(back["values"], result["values"])


def test_a_result_stays_padded_whatever_the_variable_of_strict_mode_says(monkeypatch):
    config = verl.MaskNestingConfig(use_mask_nesting=True, pad_token_id=0)
    like = config.pack(rollouts())
    result = TensorDict({"nobody_knows_it": torch.randn(4, 9), "old_log_probs": torch.full((4, R), 0.5)}, [4])
    monkeypatch.setenv("MASKPACK_STRICT", "1")
    with pytest.warns(mp.errors.MaskpackWarning, match="nobody_knows_it"):
        back = verl.decompress(config.pack_result(result, like))
    assert torch.equal(back["nobody_knows_it"], result["nobody_knows_it"])
    assert torch.equal(back["old_log_probs"], result["old_log_probs"])
    with pytest.raises(mp.errors.CoverageError, match="nobody_knows_it"):
        config.pack(result)


def test_arrays_that_are_more_than_arrays_raise():
    data = rollouts()
    data.non_tensor_batch["some"] = np.ma.masked_array([1, 2, 3, 4], mask=[0, 1, 0, 0])
    with pytest.raises(mp.errors.LayoutError, match=r"a MaskedArray; expected numpy.ndarray"):
        verl.compress(data, pad_token_id=0)
