"""transformers and TRL: models that replay packed rows, and a collator that makes them.

model.py       replayable, packed attention           limits.py    what a model has that packed rows cannot follow
passes.py      hidden states of a forward pass        shards.py    heads and weights that lie on several ranks
collator.py    PackedCollator
"""

from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.adapters.transformers.model import Replayable, replayable

__all__ = ["PackedCollator", "Replayable", "replayable"]
