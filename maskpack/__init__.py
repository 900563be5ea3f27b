"""maskpack stores, sends and computes on RL post-training batches without their padding.

compress, decompress              encode a batch as a PackedBatch, and restore it bit for bit
nest_batch_by_mask, unnest_batch_by_mask
                                  convert padded fields to nested (jagged) tensors, and back
select_and_pad_to_response, extract_response   fields and model outputs at the response width, for losses
from_engine                       pack what vLLM or SGLang generated
check                             what in a batch will go wrong: masks, lengths, documents, values
report                            the bytes of each field of a packed batch, as a table, metrics or JSON

maskpack.dispatch                 WorkerGroup and endpoint: batches to Ray actors and back
maskpack.nesting                  take and cat: rows of padded and nested batches, with every tensordict
maskpack.views                    BatchView: rows of packed batches in the object store or on other nodes
maskpack.planning                 micro-batches within a token budget, on all ranks
maskpack.replay                   log-probs and values from packed rows (models: maskpack.adapters.transformers)
maskpack.store                    RolloutLog: packed rows on a disk, which survive kill -9
maskpack.ops                      pack and unpack tensors; log-probs without storing all logits
maskpack.adapters                 verl, TransferQueue, transformers and TRL, TorchRL
maskpack.testing                  exact comparison and coverage for tests
maskpack.errors                   the errors

`import maskpack` does not import `dispatch` and `adapters`, which load Ray and the frameworks, `store` and `testing`.
"""

import logging

from maskpack import errors as errors
from maskpack import nesting as nesting
from maskpack import ops as ops
from maskpack import planning as planning
from maskpack import replay as replay
from maskpack import views as views
from maskpack.core.pads import EDGE, PAD_TOKEN_ID, PER_ROW, ZERO
from maskpack.errors import MaskpackError
from maskpack.fields.registry import MaskAxis, MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.check import Finding, check
from maskpack.nesting.nest import nest_batch_by_mask, unnest_batch_by_mask
from maskpack.nesting.response import extract_response, select_and_pad_to_response
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.engine import from_engine
from maskpack.packed.report import report

logging.getLogger(__name__).addHandler(logging.NullHandler())  # records go where the program sends them

__version__ = "0.2.0"

__all__ = [
    "EDGE",
    "PAD_TOKEN_ID",
    "PER_ROW",
    "RL_FIELDS",
    "ZERO",
    "Finding",
    "MaskAxis",
    "MaskNestingRegistry",
    "MaskNestingSpec",
    "MaskpackError",
    "PackedBatch",
    "RowLayout",
    "check",
    "compress",
    "decompress",
    "extract_response",
    "from_engine",
    "nest_batch_by_mask",
    "report",
    "select_and_pad_to_response",
    "unnest_batch_by_mask",
]
