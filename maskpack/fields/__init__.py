"""The mask and pad of each field, and the options of a call.

registry.py    MaskNestingSpec, MaskAxis, MaskNestingRegistry
rl_fields.py   RL_FIELDS, the registry of PPO, GRPO and DAPO batches
options.py     the options that compress, nest_batch_by_mask and WorkerGroup share
"""
