"""maskpack moves and shapes the padded batches of RL post-training, without the padding and without losing a bit.

compress, decompress              between a batch and its packed form, a PackedBatch
nest_batch_by_mask, unnest        between padded and jagged fields
select_and_pad_to_response, extract_response   the response axis, for losses
report                            where the bytes of a packed batch went

maskpack.dispatch                 WorkerGroup and endpoint: batches to Ray actors and back
maskpack.views                    BatchView: rows of packed batches that lie elsewhere
maskpack.planning                 which rows run together, and on which rank
maskpack.replay                   packed rows through a model (maskpack.adapters.transformers)
maskpack.ops                      pack and unpack single tensors; log-probs without the logits
maskpack.adapters                 verl, TransferQueue, transformers and TRL, TorchRL
maskpack.errors                   what is raised

`dispatch` and `adapters` load Ray and the frameworks, and are imported by their names.
"""

from maskpack import errors as errors
from maskpack import ops as ops
from maskpack import planning as planning
from maskpack import replay as replay
from maskpack import views as views
from maskpack.core.pads import EDGE, PAD_TOKEN_ID, PER_ROW, SIGNED_ZERO
from maskpack.errors import MaskpackError
from maskpack.fields.options import VerifyFirst
from maskpack.fields.registry import DENSE, MaskAxis, MaskNestingRegistry, MaskNestingSpec
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.coverage import DenseField
from maskpack.nesting.nest import nest_batch_by_mask, unnest, unnest_batch_by_mask
from maskpack.nesting.response import extract_response, select_and_pad_to_response
from maskpack.nesting.schema import LAYOUTS
from maskpack.nesting.survey import dense_fields
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.sizes import report

__version__ = "0.1.0"

__all__ = [
    "DENSE",
    "EDGE",
    "LAYOUTS",
    "PAD_TOKEN_ID",
    "PER_ROW",
    "RL_FIELDS",
    "SIGNED_ZERO",
    "DenseField",
    "MaskAxis",
    "MaskNestingRegistry",
    "MaskNestingSpec",
    "MaskpackError",
    "PackedBatch",
    "RowLayout",
    "VerifyFirst",
    "compress",
    "decompress",
    "dense_fields",
    "extract_response",
    "nest_batch_by_mask",
    "report",
    "select_and_pad_to_response",
    "unnest",
    "unnest_batch_by_mask",
]
