"""TRL: trainers of packed rows.

packed_trainer.py    packed: trainers whose log-probs come from packed rows
tree_row.py          TreeRow: the rows of AsyncGRPOTrainer, whose samples share prefixes
"""

from maskpack.adapters.trl.packed_trainer import packed

__all__ = ["packed"]
