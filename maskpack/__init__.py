"""maskpack moves and shapes the padded batches of RL post-training, without the padding and without losing a bit.

compress / decompress        between a batch and its wire form, a PackedBatch
nest_batch_by_mask / unnest  between padded and jagged fields
select_and_pad_to_response, extract_response   the response axis for losses
report                       where the bytes of a packed batch went
BatchView                    rows of packed batches that lie elsewhere
PackedInputs, response_log_probs, response_values   packed rows through a model (maskpack.adapters.transformers)
plan_micro_batches, balance_rows, plan_ranks   which rows run together, and where; agree_on_count, LoopRecorder
maskpack.ops                 pack and unpack single tensors
maskpack.dispatch            WorkerGroup and endpoint, over Ray
"""

from maskpack import ops
from maskpack.errors import (
    CoverageError,
    FieldError,
    LayoutError,
    LossyPadError,
    MaskpackError,
    MaskpackWarning,
    MethodError,
    PlanError,
    RegistryError,
    ReplayError,
    StoreFullError,
    WireFormatError,
    WorkerError,
)
from maskpack.fields.options import VerifyFirst
from maskpack.fields.registry import (
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
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.coverage import DenseField
from maskpack.nesting.nest import nest_batch_by_mask, unnest, unnest_batch_by_mask
from maskpack.nesting.response import extract_response, select_and_pad_to_response
from maskpack.nesting.schema import LAYOUTS
from maskpack.nesting.survey import dense_fields
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.sizes import report
from maskpack.planning.agreement import agree_on_count
from maskpack.planning.balance import balance_rows
from maskpack.planning.costs import FlopsModel
from maskpack.planning.plan import MicroBatchPlan, plan_micro_batches
from maskpack.planning.ranks import RankPlans, plan_ranks
from maskpack.planning.recorder import LoopRecorder
from maskpack.replay.inputs import PackedInputs, response_log_probs, response_values
from maskpack.views.strand import Outline
from maskpack.views.view import BatchView

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
    "FieldError",
    "FlopsModel",
    "LayoutError",
    "LoopRecorder",
    "LossyPadError",
    "MaskAxis",
    "MaskNestingRegistry",
    "MaskNestingSpec",
    "MaskpackError",
    "MaskpackWarning",
    "MethodError",
    "MicroBatchPlan",
    "Outline",
    "PackedBatch",
    "PackedInputs",
    "PlanError",
    "RankPlans",
    "RegistryError",
    "ReplayError",
    "RowLayout",
    "StoreFullError",
    "VerifyFirst",
    "WireFormatError",
    "WorkerError",
    "agree_on_count",
    "balance_rows",
    "compress",
    "decompress",
    "dense_fields",
    "extract_response",
    "nest_batch_by_mask",
    "ops",
    "plan_micro_batches",
    "plan_ranks",
    "report",
    "response_log_probs",
    "response_values",
    "select_and_pad_to_response",
    "unnest",
    "unnest_batch_by_mask",
]
