"""transformers and TRL: models that run packed rows, and a collator that packs samples.

model.py       replayable: checks, packed attention, sharded models
refusals.py    what replay does not run, why, and what to do instead: a table
forwards.py    parts whose forward is replaced         gradients.py    the self-check of gradients
layers.py      what a decoder layer was called with, for the parts within it
passes.py      which attention the layers use in a forward pass
output.py      output layers, and what is done to logits
mixers.py      layers that carry state               experts.py     routers that take given experts
vision.py      images and videos                     collator.py    PackedCollator
"""

import transformers

if not hasattr(transformers, "AttentionInterface"):
    raise ImportError(
        "maskpack.adapters.transformers needs the AttentionInterface of transformers 4.51 or later; got transformers "
        f"{transformers.__version__}: pip install 'maskpack[transformers]'"
    )

from maskpack.adapters.transformers.collator import PackedCollator
from maskpack.adapters.transformers.model import Replayable, replayable

__all__ = ["PackedCollator", "Replayable", "replayable"]
