"""What maskpack knows of fields by their names: the mask and the pad of each, and the options of a call.

registry.py    MaskNestingSpec, MaskAxis, MaskNestingRegistry, RL_FIELDS
options.py     the options that compress, nest_batch_by_mask and WorkerGroup share
"""
