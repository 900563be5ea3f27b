"""Ray dispatch: a WorkerGroup divides the rows of a batch among actors and joins their results.

group.py       WorkerGroup                            endpoints.py @endpoint: the call on a rank
ranks.py       the actors of each rank, sending       messages.py  RankCall and RankReply
call.py        Call: waiting, joining, retry          failures.py  what a rank raised, with its traceback
division.py    rows to ranks                          placement.py rows in the object store
timeline.py    where the time of calls goes
"""

from maskpack.dispatch.call import Call
from maskpack.dispatch.endpoints import endpoint
from maskpack.dispatch.group import WorkerGroup
from maskpack.dispatch.ranks import Broadcast

__all__ = ["Broadcast", "Call", "WorkerGroup", "endpoint"]
