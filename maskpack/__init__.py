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

from maskpack import micro_batches as micro_batches  # registers what a plan does to batches
from maskpack import ops
from maskpack.agreement import agree_on_count
from maskpack.balance import balance_rows
from maskpack.costs import FlopsModel
from maskpack.coverage import DenseField
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
from maskpack.layout import RowLayout
from maskpack.nesting import nest_batch_by_mask, unnest, unnest_batch_by_mask
from maskpack.options import VerifyFirst
from maskpack.packed import PackedBatch, compress, decompress
from maskpack.plan import MicroBatchPlan, plan_micro_batches
from maskpack.rank_plans import RankPlans, plan_ranks
from maskpack.recorder import LoopRecorder
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
from maskpack.replay import PackedInputs, response_log_probs, response_values
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
