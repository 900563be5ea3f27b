"""Packed rows through a model, without padding: log-probs and values of the response.

inputs.py      PackedInputs, response_log_probs, response_values
"""

from maskpack.replay.inputs import PackedInputs, ReplayModel, response_log_probs, response_values

__all__ = ["PackedInputs", "ReplayModel", "response_log_probs", "response_values"]
