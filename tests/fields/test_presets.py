"""The registries of other trainers, on batches after the code that makes them there: all bits come back, strict mode
finds every field covered, and they take fewer bytes than with RL_FIELDS. Builders name the files that they follow."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
from samples import PAD, assert_same, freeze, padded
from tensordict import TensorDict
from test_fields import round_trips

import maskpack as mp
from maskpack import fields
from maskpack.errors import LayoutError, LossyPadError, MaskpackWarning
from maskpack.fields import presets
from maskpack.packed.table import forget
from maskpack.replay import PackedInputs, ReplayOptions

INT, FLOAT = torch.int64, torch.float32
LAYERS = (3, 2)
"""Layers of a mixture of experts, and experts of a token."""


@dataclass
class Row:
    """Token ids, how many of them are the prompt, which of the others the policy sampled, and the reward."""

    ids: list
    prompt: int
    scored: list
    reward: float

    @property
    def response(self):
        return len(self.ids) - self.prompt


class Maker:
    """Rows of a seed, some without a prompt, a response or both, and lists of values for them."""

    def __init__(self, seed, count=9, most=23, empty=True):
        self.rng = rng = random.Random(seed)
        self.rows = []
        for _ in range(count):
            p, r = rng.randint(not empty, most), rng.randint(not empty, most + seed % 2)
            turns = itertools.accumulate(rng.random() < 0.2 for _ in range(r))
            scored = [0] * p + [int(turn % 2 == 0) for turn in turns]
            self.rows.append(Row([rng.randint(1, 30_000) for _ in range(p + r)], p, scored, rng.choice([0.0, 1.0])))
        self.rows += [Row([], 0, [], 0.0)] if empty else []
        self.log_probs = [[-rng.gammavariate(0.35, 1.0) for _ in row.ids] for row in self.rows]

    def of_tokens(self):
        """Of each row, a number for each token but the first, which no token predicts; near those of another call."""
        near = [[x * self.rng.gauss(1, 0.02) for x in row] for row in self.log_probs]
        return [[0.0, *row[1:]][: len(row)] for row in near]

    def of_responses(self):
        return [numbers[row.prompt :] for numbers, row in zip(self.of_tokens(), self.rows, strict=True)]

    def experts(self):
        return [[[[self.rng.randrange(200)] * LAYERS[1]] * LAYERS[0] for _ in row.ids] for row in self.rows]


def jagged(rows, dtype, trailing=()):
    values = [torch.tensor(row, dtype=dtype).reshape(-1, *trailing) for row in rows]
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def batch_of(count, **fields):
    return TensorDict(fields, batch_size=[count])


def after(values, mask):
    """values * mask, which leaves -0.0 for numbers below 0."""
    return values * mask.to(values.dtype)


# -------------------------------------------------------------------- builders


def verl(make):
    """verl/trainer/ppo/ray_trainer.py and verl/experimental/agent_loop: prompts end where responses begin."""
    rows = make.rows
    prompts = padded([row.ids[: row.prompt] for row in rows], INT, PAD, left=True)
    responses = padded([row.ids[row.prompt :] for row in rows], INT, PAD)
    on = torch.cat([prompts, responses], 1) != PAD
    scored = padded([row.scored[row.prompt :] for row in rows], INT)
    width = {"width": responses.shape[1]}
    fields = {name: padded(make.of_responses(), FLOAT, **width) for name in ("log_probs", "old_log_probs", "entropy")}
    return batch_of(
        len(rows),
        prompts=prompts,
        responses=responses,
        input_ids=torch.cat([prompts, responses], 1),
        attention_mask=on.long(),
        position_ids=(on.cumsum(1) - 1).clamp(min=0),
        response_mask=scored,
        teacher_mass=padded(make.of_responses(), FLOAT, **width),
        rollout_is_weights=after(padded(make.of_responses(), FLOAT, **width), scored),
        **fields,
    )


def skyrl(make, gae=False):
    """skyrl/train/dataset/preprocess.py, convert_prompts_responses_to_batch_tensors, and skyrl/train/trainer.py. The
    log-probs of models are the last R columns of those of the block."""
    rows = make.rows
    ids = [row.ids for row in rows]
    width, response = max(map(len, ids)), max(row.response for row in rows)
    mask = padded([[1] * row.response for row in rows], INT, left=True)
    reward = padded([[0.0] * (row.response - 1) + [row.reward] * (row.response > 0) for row in rows], FLOAT, left=True)
    by_models = [padded(make.of_tokens(), FLOAT, left=True)[:, width - response :] for _ in range(3)]
    advantages = torch.tensor([[row.reward - 0.5] for row in rows]) * mask
    if gae:  # gamma and lambda are 1: the sum goes on before the first token
        delta = reward - by_models[2] + torch.nn.functional.pad(by_models[2][:, 1:], (0, 1))
        advantages = delta.flip(1).cumsum(1, dtype=torch.float64).flip(1).float()
        ahead = padded([[1] * len(row) for row in ids], INT, left=True)[:, width - response :].argmax(1)
        advantages = torch.where(torch.arange(response) < ahead[:, None], advantages[:, :1], advantages)
    return batch_of(
        len(rows),
        sequences=padded(ids, INT, PAD, left=True),
        attention_mask=padded([[1] * len(row) for row in ids], INT, left=True),
        response_mask=mask,
        rewards=reward,
        loss_mask=padded([row.scored[row.prompt :] for row in rows], FLOAT, left=True),
        rollout_logprobs=padded(make.of_responses(), FLOAT, left=True),
        rollout_expert_indices=padded(make.experts(), torch.uint8, 0, width, LAYERS, left=True),
        action_log_probs=by_models[0],
        base_action_log_probs=by_models[1],
        values=by_models[2],
        advantages=advantages,
        returns=advantages.clone(),
    )


def openrlhf(make, whitened=True, joined=True):
    """openrlhf/trainer/ppo_utils/samples_generator.py, experience_maker.py and experience.py: [B, S - 1] beside
    [B, S]. make_experience_batch pads all with 0 (`joined`); concat_experiences pads ids with the pad token."""
    rows = make.rows
    width = max(len(row.ids) for row in rows)
    scored = [row.scored[1:] for row in rows]
    mask = padded(scored, INT, width=width - 1)
    over = {"width": width - 1}

    def masked():
        return after(padded([row[1:] for row in make.of_tokens()], FLOAT, **over), mask)

    reward = torch.zeros(len(rows), width - 1)
    for line, row, on in zip(reward, rows, scored, strict=True):
        if any(on):
            line[len(on) - 1 - on[::-1].index(1)] = row.reward
    returns = (reward + masked() * mask).flip(1).cumsum(1).flip(1)
    returns = torch.where(torch.arange(width - 1) < torch.tensor([[len(on)] for on in scored]), returns, 0.0)
    advantages = (returns - 0.25) * 1.5 if whitened else returns.clone()
    if joined:  # each row is cut to its length, and padded again
        advantages = padded(
            [row[: len(on)] for row, on in zip(advantages.tolist(), scored, strict=True)], FLOAT, **over
        )
    return batch_of(
        len(rows),
        sequences=padded([row.ids for row in rows], INT, 0 if joined else PAD),
        attention_mask=padded([[1] * len(row.ids) for row in rows], INT),
        action_mask=mask if joined else mask.bool(),
        action_log_probs=masked(),
        base_action_log_probs=masked(),
        rollout_log_probs=padded([row[1:] for row in make.of_tokens()], FLOAT, **over) * mask,
        values=masked(),
        returns=returns,
        advantages=advantages,
        rewards=torch.tensor([row.reward for row in rows]),
        total_length=torch.tensor([float(len(row.ids)) for row in rows]),
    )


def areal(make, shifted=True):
    """areal/workflow/multi_turn.py, areal/utils/data.py, concat_padded_tensors, and areal/trainer/ppo/actor.py,
    compute_advantages, which moves masks and log-probs to the left (`shifted`)."""
    rows = make.rows
    on = padded([[1] * len(row.ids) for row in rows], torch.bool)
    mask = padded([row.scored for row in rows], torch.int32)
    logprobs = padded(make.of_tokens(), FLOAT) * mask
    batch = batch_of(
        len(rows),
        input_ids=padded([row.ids for row in rows], torch.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=padded([[3 * s - (s == 0) for s in row.scored] for row in rows], torch.int32),
        attention_mask=on,
        rewards=torch.tensor([row.reward for row in rows]),
        prox_logp=padded(make.of_tokens(), FLOAT),
    )
    if shifted:
        mask = mask.float().roll(-1, -1)
        batch["loss_mask"], batch["logprobs"] = mask, logprobs.roll(-1, -1) * mask
        batch["ref_logp"] = padded(make.of_tokens(), FLOAT) * mask
        batch["values"] = padded(make.of_tokens(), FLOAT)
        batch["returns"] = batch["values"] + torch.where(on, 0.5, 0.0)
        batch["advantages"] = (padded(make.of_tokens(), FLOAT) + 0.3) * mask
        batch["kl_rewards"] = -0.1 * (batch["logprobs"] - batch["ref_logp"])
        batch["tot_rewards"] = batch["kl_rewards"].clone()
    return batch


def nemo_rl(make):
    """nemo_rl/data/llm_message_utils.py, batched_message_log_to_flat_message, nemo_rl/algorithms/grpo.py and
    nemo_rl/data_plane/schema.py: widths are multiples of 8, log-probs are multiplied by the mask of the tokens,
    advantages are expanded to whole rows."""
    rows = make.rows
    width = {"width": -(-max(len(row.ids) for row in rows) // 8) * 8}
    on = padded([[1] * len(row.ids) for row in rows], torch.bool, **width)
    numbers = [-torch.rand(on.shape) for _ in range(2)]
    return batch_of(
        len(rows),
        input_ids=padded([row.ids for row in rows], INT, PAD, **width),
        input_lengths=torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        generation_logprobs=padded(make.of_tokens(), FLOAT, **width),
        token_mask=padded([row.scored for row in rows], INT, **width),
        sample_mask=torch.ones(len(rows)),
        prev_logprobs=numbers[0] * on,
        reference_policy_logprobs=numbers[1] * on,
        advantages=torch.tensor([[row.reward - 0.5] for row in rows]).expand(on.shape).clone(),
        routed_experts=padded(make.experts(), torch.int32, -1, trailing=LAYERS, **width),
        prompt_ids_for_adv=padded([row.ids[: row.prompt] for row in rows], INT, PAD),
    )


def trl(make, ratio="token", tools=True):
    """trl/trainer/grpo_trainer.py, _generate_and_score_completions: prompts are padded on the left, completions on the
    right, `tool_mask` with 1. The ratio is [B, R] or, in the modes of sequences, [B, 1]."""
    rows = make.rows
    mask = padded([[1] * row.response for row in rows], INT)
    tool_mask = padded([row.scored[row.prompt :] for row in rows], INT, 1)
    weight = torch.where((mask * tool_mask) != 0, 1.0 + torch.rand(mask.shape), 1.0)
    of_rows = torch.rand(len(rows), 1) * (torch.arange(len(rows)) % 3 > 0)[:, None]  # 0.0 drops a row
    batch = batch_of(
        len(rows),
        prompt_ids=padded([row.ids[: row.prompt] for row in rows], INT, PAD, left=True),
        prompt_mask=padded([[1] * row.prompt for row in rows], INT, left=True),
        completion_ids=padded([row.ids[row.prompt :] for row in rows], INT, PAD),
        completion_mask=mask,
        advantages=torch.tensor([row.reward - 0.5 for row in rows]),
        old_per_token_logps=padded(make.of_responses(), FLOAT),
        ref_per_token_logps=padded(make.of_responses(), FLOAT),
        sampling_per_token_logps=padded(make.of_responses(), FLOAT),
        importance_sampling_ratio=weight if ratio == "token" else of_rows,
    )
    if tools:
        batch["tool_mask"] = tool_mask
    return batch


def trl_async(make):
    """trl/experimental/async_grpo/async_rollout_worker.py: samples, whose `completion_mask` is the loss mask of a row
    of S tokens."""
    rows = make.rows
    return batch_of(
        len(rows),
        input_ids=padded([row.ids for row in rows], INT, PAD),
        attention_mask=padded([[1] * len(row.ids) for row in rows], INT),
        completion_mask=padded([row.scored for row in rows], INT),
        old_log_probs=padded(make.of_tokens(), FLOAT),
        advantage=torch.tensor([row.reward for row in rows]),
    )


def prime_rl(make):
    """src/prime_rl/trainer/batch.py, prepare_sample, and src/prime_rl/trainer/rl/data.py, TensorMicroBatch, whose
    fields are padded here."""
    rows = make.rows
    return batch_of(
        len(rows),
        input_ids=padded([row.ids for row in rows], INT, PAD),
        attention_mask=padded([[1] * len(row.ids) for row in rows], torch.bool),
        position_ids=padded([[*range(len(row.ids))] for row in rows], INT),
        loss_mask=padded([row.scored for row in rows], torch.bool),
        inference_logprobs=padded(make.of_tokens(), FLOAT),
        advantages=padded([[row.reward - 0.5] * len(row.ids) for row in rows], FLOAT),
        rewards=padded([[float("nan")] * len(row.ids) for row in rows], FLOAT),
        temperatures=padded([[0.7] * len(row.ids) for row in rows], FLOAT, 1),
        rl_weights=padded([[float(on) for on in row.scored] for row in rows], FLOAT),
        routed_experts=padded(make.experts(), torch.int32, 0, trailing=LAYERS),
        sampling_mask=padded([[[7, 9, -1]] * len(row.ids) for row in rows], INT, -1, trailing=(3,)),
    )


def prime_rl_packed(make):
    """The same, as one row of T tokens: `seq_lens` as `cu_seqlens`."""
    batch = prime_rl(make)
    on = batch.pop("attention_mask")
    ends = torch.cat([torch.zeros(1, dtype=INT), on.sum(1).cumsum(0)]).int()
    return TensorDict({name: value[on] for name, value in batch.items()} | {"cu_seqlens": ends}, batch_size=[])


def slime(make, form=padded):
    """slime/ray/rollout.py, _convert_samples_to_train_data, and slime/utils/data.py, process_rollout_data: lists of
    rows. A loss mask and log-probs have a number for each token of the response."""
    rows = make.rows
    pad = {"pad": PAD} if form is padded else {}
    return batch_of(
        len(rows),
        tokens=form([row.ids for row in rows], INT, **pad),
        loss_masks=form([row.scored[row.prompt :] for row in rows], torch.int32),
        rollout_log_probs=form(make.of_responses(), FLOAT),
        log_probs=form(make.of_responses(), FLOAT),
        ref_log_probs=form(make.of_responses(), FLOAT),
        advantages=form([[row.reward] * row.response for row in rows], FLOAT),
        rollout_routed_experts=form(make.experts(), torch.int32, trailing=LAYERS),
        response_lengths=torch.tensor([row.response for row in rows]),
        total_lengths=torch.tensor([len(row.ids) for row in rows]),
        rewards=torch.tensor([row.reward for row in rows]),
    )


CASES = {
    "verl": verl,
    "skyrl": skyrl,
    "skyrl gae": lambda make: skyrl(make, gae=True),
    "openrlhf": openrlhf,
    "openrlhf plain": lambda make: openrlhf(make, whitened=False),
    "openrlhf whole": lambda make: openrlhf(make, joined=False),
    "areal rollout": lambda make: areal(make, shifted=False),
    "areal_advantages": areal,
    "nemo_rl": nemo_rl,
    "trl": trl,
    "trl rows": lambda make: trl(make, ratio="row", tools=False),
    "trl async": trl_async,
    "prime_rl": prime_rl,
    "prime_rl packed": prime_rl_packed,
    "slime": slime,
    "slime jagged": lambda make: slime(make, form=jagged),
}
SAME = {"verl", "areal rollout", "trl async", "prime_rl", "prime_rl packed", "slime jagged"}
"""RL_FIELDS knows most of these names, or their fields have no padding."""


def registry_of(case):
    return presets.PRESETS[case.split()[0]]


def made(case, seed=0, **more):
    torch.manual_seed(seed)
    return CASES[case](Maker(seed, **more))


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_every_field_is_covered_and_every_bit_comes_back(case, seed):
    """round_trips is in strict mode."""
    batch = made(case, seed)
    nested = round_trips(batch, registry_of(case))
    rows = {name for name, value in batch.items() if value.dim() > 1 and name != "prompt_ids_for_adv"}
    assert {name for name, value in nested.items() if name in rows and not value.is_nested} == set()


@pytest.mark.parametrize("case", CASES)
def test_fewer_bytes_than_with_the_default_registry(case):
    batch = made(case, count=48, most=150, empty=False)
    forget()
    nbytes = mp.compress(batch, registry=registry_of(case), pad_token_id=PAD, strict_mask_nesting=True).nbytes
    forget()
    if case.startswith("openrlhf"):
        with pytest.raises(LayoutError, match='"rollout_log_probs" is'):
            mp.compress(batch, pad_token_id=PAD)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)
        default = mp.compress(batch, pad_token_id=PAD).nbytes
    assert nbytes < (1.05 if case in SAME else 0.96) * default


ROWS = ["verl", "skyrl", "openrlhf", "areal rollout", "areal_advantages", "nemo_rl", "trl async", "prime_rl", "slime"]
"""The cases with padded rows of tokens."""


@pytest.mark.parametrize("case", ROWS)
def test_a_packed_batch_replays_the_tokens_of_the_batch(case):
    batch, registry = made(case, empty=False), registry_of(case)
    ids = next(name for name in ("input_ids", "sequences", "tokens", "token_ids") if name in batch.keys())  # noqa: SIM118
    options = ReplayOptions(registry=registry, input_ids=ids)
    packed = mp.compress(batch, registry=registry, pad_token_id=PAD, strict_mask_nesting=True)
    plain, seen = (PackedInputs.of(each, options=options) for each in (batch, packed))
    for got, want in ((seen.input_ids, plain.input_ids), (seen.predict, plain.predict), (seen.targets, plain.targets)):
        assert torch.equal(got, want)
    rows = Maker(0, empty=False).rows
    assert seen.input_ids.tolist() == [[token for row in rows for token in row.ids]]
    assert seen.response.row_offsets.tolist() == plain.response.row_offsets.tolist()
    if case not in ("verl", "skyrl", "slime"):  # their axes go on over holes
        scored = [token for row in rows for token, of_policy in zip(row.ids, row.scored, strict=True) if of_policy]
        assert seen.targets.tolist() == scored


def test_each_preset_is_a_name_of_the_package():
    assert {name: getattr(fields, name) for name in fields.__all__} == presets.PRESETS
    assert {case.split()[0] for case in CASES} == set(presets.PRESETS)
    for registry in presets.PRESETS.values():
        again = mp.MaskNestingRegistry.from_dict(registry.to_dict())
        assert (again, again.axes) == (registry, registry.axes)


@pytest.mark.parametrize("case", ["skyrl", "openrlhf", "openrlhf whole", "areal_advantages", "nemo_rl", "trl", "slime"])
def test_batches_of_other_widths_join(case):
    """Rows grow on the side that the trainer pads: the response of SkyRL stays at the right end of its block."""
    parts = [made(case, seed, most=most).exclude("prompt_ids_for_adv") for seed, most in ((0, 30), (1, 17))]
    registry = registry_of(case)
    packed = [mp.compress(part, registry=registry, pad_token_id=PAD) for part in parts]
    whole = mp.decompress(mp.PackedBatch.cat(packed))
    for name in parts[0].keys():  # noqa: SIM118  (a TensorDict iterates over rows)
        left = case == "skyrl" or name.startswith("prompt")
        for piece, part in zip(whole[name].split([len(part) for part in parts]), parts, strict=True):
            width = part[name].shape[1] if part[name].dim() > 1 else None
            own = piece if width is None else piece[:, -width:] if left else piece[:, :width]
            assert freeze(own) == freeze(part[name])


def test_a_ratio_of_whole_sequences_and_one_of_tokens():
    """TRL has it as [B, 1] by default."""
    for case, shape in (("trl", None), ("trl rows", 1)):
        batch = made(case, 3)
        assert shape in (None, batch["importance_sampling_ratio"].shape[1])
        packed = mp.compress(batch, registry=fields.trl, pad_token_id=PAD, strict_mask_nesting=True)
        forms = {form.path[0]: form for form in packed.schema.forms}
        assert forms["importance_sampling_ratio"].layout == ("importance_sampling_ratio" if shape else "response")
        unchecked = mp.compress(batch, registry=fields.trl, pad_token_id=PAD, verify=False)
        assert_same(mp.decompress(unchecked)["importance_sampling_ratio"], batch["importance_sampling_ratio"])
        assert_same(mp.decompress(packed.take([5, 0])), batch[[5, 0]])


def test_values_under_the_mask_of_a_preset_are_named():
    """TRL keeps the ids of completions whose mask it clears (mask_truncated_completions): they are not padding."""
    batch = made("trl")
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][0] = 0
    with pytest.raises(LossyPadError, match="completion_ids"):
        mp.compress(batch, registry=fields.trl, pad_token_id=PAD, strict_mask_nesting=True)
    with pytest.warns(MaskpackWarning, match="completion_ids"):
        packed = mp.compress(batch, registry=fields.trl, pad_token_id=PAD)
    assert_same(mp.decompress(packed), batch)
