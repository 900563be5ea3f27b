"""Forward passes over packed rows, without padding: log-probs and values of response tokens.

inputs.py      PackedInputs, prefix_tree                   log_probs.py   response_outputs, and parts of it
context.py     shards of the tokens, one a rank             media.py      images and videos of the rows
routes.py      experts that the rollout recorded            options.py     ReplayOptions
meter.py       time and memory of each micro-batch          mismatch.py    compare: trainer against rollout
"""

from maskpack.replay.inputs import PackedInputs, prefix_tree
from maskpack.replay.log_probs import (
    ReplayModel,
    response_log_probs,
    response_outputs,
    response_values,
)
from maskpack.replay.meter import MicroBatchMeter
from maskpack.replay.mismatch import MismatchLimit, compare
from maskpack.replay.options import ReplayOptions

__all__ = [
    "MicroBatchMeter",
    "MismatchLimit",
    "PackedInputs",
    "ReplayModel",
    "ReplayOptions",
    "compare",
    "prefix_tree",
    "response_log_probs",
    "response_outputs",
    "response_values",
]
