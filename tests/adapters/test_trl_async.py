"""TreeRow against TRL's own, bit for bit; and AsyncGRPOTrainer with both, on a tiny model and samples that are made up.
A loop over segments stands in for the kernel of its attention."""

from __future__ import annotations

import queue
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from needs import needs

needs("trl")
needs("accelerate")

import trl_work as work
from accelerate import PartialState
from trl import GRPOTrainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo import async_grpo_trainer as upstream
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from maskpack.adapters.trl import packed
from maskpack.adapters.trl.tree_row import TreeRow
from maskpack.errors import MaskpackWarning, ReplayError

KINDS = ("chains", "groups", "turns", "duplicates", "prefixes of others", "few tokens")


def sample(source, ids, group, trained=0.5):
    return {
        "input_ids": np.array(ids, np.int64),
        "completion_mask": (source.random(len(ids)) < trained).astype(np.int64),
        "old_log_probs": source.standard_normal(len(ids)).astype(np.float32),
        "advantage": float(source.standard_normal()),
        "group_id": group,
        "metrics": {"reward": 1.0},
    }


def samples(kind, source):
    """Some samples of a kind, in random order."""

    def words(most, least=1, vocabulary=32):
        return source.integers(0, vocabulary, int(source.integers(least, most + 1))).tolist()

    made = []
    for group in range(int(source.integers(1, 4))):
        prompt, story = words(9), words(5)
        for _ in range(int(source.integers(1, 6))):
            if kind == "chains":
                made.append((words(12), group))
            elif kind == "groups":
                made.append((prompt + words(9), group))
            elif kind == "turns":
                made.append((prompt + story + words(4), group))
                story = story + words(4) if source.random() < 0.5 else story
            elif kind == "duplicates":
                made += [(prompt + story, group)] * int(source.integers(1, 3)) + [(words(5), group)]
            elif kind == "prefixes of others":
                made.append(((prompt + story)[: int(source.integers(1, 15))], group))
            else:
                made.append((words(4, vocabulary=2), group))
    source.shuffle(made)
    return [sample(source, ids, group, source.choice([0.0, 0.5, 1.0])) for ids, group in made]


def assert_same_tensors(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_trl(kind):
    source = np.random.default_rng(KINDS.index(kind))
    decisions = set()
    for _ in range(150):
        theirs, ours = packing.TreeRow(), TreeRow()
        assert len(ours.tokens) == 0
        for one in samples(kind, source):
            tokens = len(theirs.tokens)
            for budget in {*range(tokens, tokens + len(one["input_ids"]) + 2), theirs.trained}:
                fits = theirs.fits(one, budget)
                decisions.add(fits)
                assert ours.fits(one, budget) is fits
            theirs.add(one)
            ours.add(one)
            assert ours.samples == theirs.samples
            assert (ours.load, ours.trained, ours.groups) == (theirs.load, theirs.trained, theirs.groups)
            assert ours.tokens.tolist() == theirs.tokens
        assert_same_tensors(theirs.pack(), ours.pack())
    assert decisions == {True, False}


def test_long_rows_are_those_of_trl():
    source = np.random.default_rng(0)
    prompts = source.integers(0, 150_000, (2, 300)).tolist()
    theirs, ours = packing.TreeRow(), TreeRow()
    for number in range(16):
        one = sample(source, prompts[number % 2] + source.integers(0, 150_000, 200).tolist(), number % 2)
        theirs.add(one)
        ours.add(one)
    assert_same_tensors(theirs.pack(), ours.pack())


def test_types_of_samples():
    """Tensors, lists of bools and doubles go through TRL's lists; a row without tokens has no tensors in either."""
    ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    odd = {"input_ids": ids, "completion_mask": torch.tensor([True, False, True]), "advantage": 1 / 3, "group_id": "a"}
    odd["old_log_probs"] = torch.tensor([-0.1, -1e-300, -1 / 3], dtype=torch.float64)
    rows = packing.TreeRow(), TreeRow()
    for row in rows:
        row.add(odd)
    assert_same_tensors(*(row.pack() for row in rows))
    for row in (packing.TreeRow(), TreeRow()):
        with pytest.raises(ValueError, match=r"empty|need at least one|not enough"):
            row.pack()


@pytest.mark.parametrize(
    ("planner", "size"), [("TokenBudgetBatcher", 24), ("TokenBudgetBatcher", 60), ("FixedCountBatcher", 6)]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_planners_divide_alike(planner, size, ranks):
    """Among the same rows, whichever class they have; what they log is the same, too."""
    PartialState()  # for accelerate's logger, which says what is dropped
    source = np.random.default_rng(ranks)
    given = [one for kind in KINDS for _ in range(8) for one in samples(kind, source)]
    batches, logged = [], []
    for uses in (False, True):
        metrics = {"batch/dropped_oversize_total": []}
        made = getattr(upstream, planner)(given, ranks, size, *([metrics] if planner.startswith("Token") else []))
        if uses:
            made.__class__ = _planner_of(made)
        collator = upstream.DataCollatorForRollout(0, ranks, token_budget=size)
        rows = list(made)
        assert {type(row) for one in rows for row in one} == {TreeRow if uses else packing.TreeRow}
        batches.append([collator([one]) for one in rows])
        logged.append((dict(collator.metrics), metrics))
    assert len(batches[0]) == len(batches[1]) > 10
    for one, other in zip(*batches, strict=True):
        assert_same_tensors(one, other)
    assert logged[0] == logged[1]


def _planner_of(made):
    from maskpack.adapters.trl import tree_row

    return tree_row._planner(type(made))


# -------------------------------------------------------------------- the trainer


def attend(query, key, value, bounds, key_bounds, *_, softmax_scale, causal, window_size):
    """Each segment sees all keys before its first token, and those up to each of its tokens."""
    assert causal
    assert window_size == (-1, -1)
    groups = query.shape[1] // key.shape[1]
    out = []
    for i in range(len(bounds) - 1):
        q = query[bounds[i] : bounds[i + 1]].transpose(0, 1)
        k, v = (x[key_bounds[i] : key_bounds[i + 1]].transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


class Worker:
    """Samples that are there when training begins; two answers of a prompt of words, and one that goes on."""

    def __init__(self, count=240):
        source = np.random.default_rng(0)
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for group in range(count // 3):
            prompt = source.integers(3, 32, int(source.integers(2, 12))).tolist()
            answers = [source.integers(3, 32, int(source.integers(2, 10))).tolist() for _ in range(2)]
            for number, answer in enumerate([*answers, answers[1] + source.integers(3, 32, 5).tolist()]):
                ids = prompt + answer
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array(ids),
                        completion_mask=np.repeat([0, 1], [len(prompt), len(answer)]),
                        old_log_probs=-source.random(len(ids)).astype(np.float32) * 6,
                        advantage=float(number - 1),
                        model_version=0,
                        group_id=group,
                        metrics={"reward": float(number)},
                    )
                )

    def start(self):
        pass

    stop = start

    def update_model_version(self, version):
        pass

    def check_health(self, stale_after_s):
        raise AssertionError("no samples are left")


def run_of(kind, folder, model, steps=10, **options):
    nothing = SimpleNamespace(**dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), lambda: None))
    nothing.send_weights = lambda weights: None
    arguments = {
        "use_cpu": True, "bf16": False, "dtype": "float32", "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "learning_rate": 1e-3, "max_staleness": 100, "token_budget": 40, "max_steps": steps,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    made = kind(
        model,
        args=AsyncGRPOConfig(str(folder), **arguments | options),
        train_dataset=work.prompts(),
        processing_class=work.tokenizer(),
        rollout_worker=Worker(),
        weight_transfer=nothing,
    )
    made.train()
    return made


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(upstream, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))
    return work.saved(tmp_path / "model")


def numbers(run):
    """What it logged, without times."""
    return [
        {
            name: value
            for name, value in step.items()
            if not re.search("_s$|_fwd_bwd$|_wall_clock$|runtime|second", name)
        }
        for step in run.state.log_history
    ]


@pytest.mark.parametrize("budget", [40, -1], ids=["token budget", "fixed count"])
def test_ten_steps_are_those_of_trl(tmp_path, model, monkeypatch, budget):
    ran = []
    pack = TreeRow.pack
    monkeypatch.setattr(TreeRow, "pack", lambda row: ran.append(len(row.samples)) or pack(row))
    theirs = run_of(AsyncGRPOTrainer, tmp_path / "theirs", model, token_budget=budget)
    assert not ran
    ours = run_of(packed(AsyncGRPOTrainer), tmp_path / "ours", model, token_budget=budget)
    assert len(ran) >= 20
    steps = numbers(theirs)
    assert len([step for step in steps if "loss" in step]) == 10
    assert any(step["batch/packing_ratio"] > 1.1 for step in steps if "batch/packing_ratio" in step)
    assert steps == numbers(ours)
    for (name, one), (_, other) in zip(theirs.model.named_parameters(), ours.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_packing_can_be_switched_off(tmp_path, model, monkeypatch):
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "0")
    ours = packed(AsyncGRPOTrainer)
    monkeypatch.setattr(TreeRow, "pack", lambda row: pytest.fail("packed"))
    run_of(ours, tmp_path / "run", model, steps=1)


def test_another_planner_keeps_its_rows(tmp_path, model):
    class Own(AsyncGRPOTrainer):
        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            loader.dataset.__class__ = type("Mine", (type(loader.dataset),), {})
            return loader

    with pytest.warns(
        MaskpackWarning, match=re.escape("packed(Own): TRL's own rows are packed: the planner is a Mine")
    ):
        run_of(packed(Own), tmp_path / "run", model, steps=1)


# -------------------------------------------------------------------- packed


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: packed(packed(AsyncGRPOTrainer)), "packed: AsyncGRPOTrainer is packed already"),
        (lambda: packed(AsyncGRPOTrainer, min_shared=4), "AsyncGRPOTrainer with options of packed; expected none"),
        (lambda: packed(AsyncGRPOTrainer, share_prefixes=False), "expected none"),
    ],
)
def test_misuse(call, match):
    with pytest.raises(ReplayError, match=match):
        call()


def test_another_trl_is_refused_by_name(monkeypatch):
    class More(packing.TreeRow):
        def pack(self):
            return super().pack() | {"prompt_index": torch.zeros(1)}

    class Later(packing.TreeRow):
        def pack(self):
            out = super().pack()
            return out | {"position_ids": out["position_ids"] + 1}

    for kind in (More, Later, None):
        monkeypatch.setattr(upstream, "TreeRow", kind)
        with pytest.raises(ReplayError, match=r"packs other rows than in TRL 1\.16"):
            packed(AsyncGRPOTrainer)
    monkeypatch.undo()
    monkeypatch.delattr(upstream, "FixedCountBatcher")
    with pytest.raises(ReplayError, match="expected TokenBudgetBatcher, FixedCountBatcher"):
        packed(AsyncGRPOTrainer)
    assert packed(GRPOTrainer)
