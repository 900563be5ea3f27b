"""Forward passes over packed rows, without padding: log-probs and values of response tokens.

inputs.py      PackedInputs: the inputs of a model         log_probs.py   response_log_probs, response_values
"""

from maskpack.replay.inputs import PackedInputs
from maskpack.replay.log_probs import ReplayModel, response_log_probs, response_values

__all__ = ["PackedInputs", "ReplayModel", "response_log_probs", "response_values"]
