"""Plans of micro-batches within a token budget, of DP ranks and of optimizer updates, from row lengths alone.

costs.py         lengths, costs of rows, FlopsModel    packing.py      bin packing: best fit, splitting
plan.py          plan_micro_batches, MicroBatchPlan    balance.py      balance_rows: rows to DP ranks
ranks.py         plan_ranks, RankPlans                 agreement.py    agree_on_count, over torch.distributed
loss_weights.py  denominators of losses                apply.py        plan.apply, plan.restore
prefixes.py      amounts and units of a PrefixTree
"""

from maskpack.layout.prefix_tree import PrefixTree
from maskpack.planning import apply as apply  # registers take_rows and join_rows for batches
from maskpack.planning.agreement import agree_on_count
from maskpack.planning.balance import balance_rows
from maskpack.planning.costs import FlopsModel
from maskpack.planning.plan import MicroBatchPlan, join_rows, plan_micro_batches, take_rows
from maskpack.planning.ranks import RankPlans, plan_ranks

__all__ = [
    "FlopsModel",
    "MicroBatchPlan",
    "PrefixTree",
    "RankPlans",
    "agree_on_count",
    "balance_rows",
    "join_rows",
    "plan_micro_batches",
    "plan_ranks",
    "take_rows",
]
