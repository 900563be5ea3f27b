"""The mask and pad of each field, and the options of a call.

registry.py    MaskNestingSpec, MaskAxis, MaskNestingRegistry
rl_fields.py   RL_FIELDS, the registry of PPO, GRPO and DAPO batches
presets.py     the registries of other trainers: maskpack.fields.skyrl, ...
options.py     the options that compress, nest_batch_by_mask and WorkerGroup share
"""

from maskpack.fields.presets import areal, areal_advantages, nemo_rl, openrlhf, prime_rl, skyrl, slime, trl, verl

__all__ = ["areal", "areal_advantages", "nemo_rl", "openrlhf", "prime_rl", "skyrl", "slime", "trl", "verl"]
