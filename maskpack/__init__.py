"""maskpack moves and shapes the padded batches of RL post-training, without the padding and without losing a bit.

compress / decompress        between a batch and its wire form, a PackedBatch
nest_batch_by_mask / unnest  between padded and jagged fields
select_and_pad_to_response, extract_response   the response axis for losses
report                       where the bytes of a packed batch went
BatchView                    rows of packed batches that lie elsewhere
maskpack.ops                 pack and unpack single tensors
maskpack.dispatch            WorkerGroup and endpoint, over Ray
"""

from maskpack import ops
from maskpack.coverage import DenseField
from maskpack.errors import (
    CoverageError,
    LayoutError,
    LossyPadError,
    MaskpackError,
    MaskpackWarning,
    RegistryError,
    WireFormatError,
    WorkerError,
)
from maskpack.layout import RowLayout
from maskpack.nesting import nest_batch_by_mask, unnest, unnest_batch_by_mask
from maskpack.packed import PackedBatch, compress, decompress
from maskpack.registry import (
    DENSE,
    EDGE,
    PAD_TOKEN_ID,
    PER_ROW,
    RL_FIELDS,
    SIGNED_ZERO,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
)
from maskpack.report import report
from maskpack.response import extract_response, select_and_pad_to_response
from maskpack.schema import LAYOUTS
from maskpack.strands import Outline
from maskpack.survey import dense_fields
from maskpack.views import BatchView

__version__ = "0.1.0"

__all__ = [
    "DENSE",
    "EDGE",
    "LAYOUTS",
    "PAD_TOKEN_ID",
    "PER_ROW",
    "RL_FIELDS",
    "SIGNED_ZERO",
    "BatchView",
    "CoverageError",
    "DenseField",
    "LayoutError",
    "LossyPadError",
    "MaskAxis",
    "MaskNestingRegistry",
    "MaskNestingSpec",
    "MaskpackError",
    "MaskpackWarning",
    "Outline",
    "PackedBatch",
    "RegistryError",
    "RowLayout",
    "WireFormatError",
    "WorkerError",
    "compress",
    "decompress",
    "dense_fields",
    "extract_response",
    "nest_batch_by_mask",
    "ops",
    "report",
    "select_and_pad_to_response",
    "unnest",
    "unnest_batch_by_mask",
]
