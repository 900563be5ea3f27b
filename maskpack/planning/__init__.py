"""Plans of micro-batches within a token budget, of DP ranks and of optimizer updates, from row lengths alone.

costs.py         PlanOptions, lengths, costs of rows   packing.py      bin packing: best fit, splitting
plan.py          plan_micro_batches, MicroBatchPlan    balance.py      balance_rows: rows to DP ranks
ranks.py         plan_ranks, RankPlans                 agreement.py    agree_on_count, over torch.distributed
loss_weights.py  denominators of losses                apply.py        plan.apply, plan.restore for each kind of batch
prefixes.py      tokens and units of a PrefixTree
"""

from maskpack.layout.prefix_tree import PrefixTree
from maskpack.planning.agreement import agree_on_count
from maskpack.planning.balance import balance_rows
from maskpack.planning.costs import PlanOptions
from maskpack.planning.plan import MicroBatchPlan, plan_micro_batches
from maskpack.planning.ranks import plan_ranks

__all__ = [
    "MicroBatchPlan",
    "PlanOptions",
    "PrefixTree",
    "agree_on_count",
    "balance_rows",
    "plan_micro_batches",
    "plan_ranks",
]
