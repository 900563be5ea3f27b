"""Which rows run together: lengths to micro-batches to ranks, by numbers alone; and what a plan does to a batch.

plan.py        plan_micro_batches, MicroBatchPlan     ranks.py         plan_ranks, RankPlans
budget.py      the packing problem                    bins.py          rows into bins
balance.py     balance_rows                           costs.py         what rows cost, FlopsModel
loss_weights.py  weights of rows in a loss            agreement.py     agree_on_count, over torch.distributed
apply.py       plan.apply and restore, of any batch   recorder.py      LoopRecorder
"""

from maskpack.planning import apply as apply  # registers what a plan does to batches
from maskpack.planning.agreement import agree_on_count
from maskpack.planning.balance import balance_rows
from maskpack.planning.costs import FlopsModel
from maskpack.planning.plan import MicroBatchPlan, join_rows, plan_micro_batches, take_rows
from maskpack.planning.ranks import RankPlans, plan_ranks
from maskpack.planning.recorder import LoopRecorder

__all__ = [
    "FlopsModel",
    "LoopRecorder",
    "MicroBatchPlan",
    "RankPlans",
    "agree_on_count",
    "balance_rows",
    "join_rows",
    "plan_micro_batches",
    "plan_ranks",
    "take_rows",
]
