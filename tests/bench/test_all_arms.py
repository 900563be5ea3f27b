"""The arms of others train on the rows that the exact arm recorded, as those of the example do."""

from __future__ import annotations

import json
from pathlib import Path

from needs import needs

needs("ray")
needs("transformers")

from tensordict import TensorDict

from bench import all_arms
from bench.harness.local_ray import local_ray


def test_arms_of_others_train_alike(tmp_path: Path) -> None:
    options = ["--tiny", "--steps", "1", "--folder", str(tmp_path), "--runs", "record", "replay"]
    with local_ray(TensorDict({}, batch_size=[]), num_cpus=2):
        all_arms.main([*options, "--arms", "padded", "trimmed", "by hand", "--json", str(tmp_path / "runs.json")])
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert list(runs["replay"]) == ["padded", "trimmed", "by hand"]
    (sampled,) = runs["record"].values()
    for name, curve in runs["replay"].items():
        assert curve["tokens"] == sampled["tokens"]
        assert max(curve["off"]) <= 1e-5, name
        assert runs["weights off"][name]["of the weights"] <= 1e-6
