"""Ray dispatch: a WorkerGroup divides the rows of a batch among actors and joins their results.

group.py       WorkerGroup                            endpoints.py @endpoint: the call on a rank
call.py        Call: waiting, failures, retry         messages.py  RankCall and RankReply
division.py    rows to ranks                          placement.py rows in the object store
"""

from maskpack.dispatch.call import Call
from maskpack.dispatch.endpoints import endpoint
from maskpack.dispatch.group import Broadcast, WorkerGroup

__all__ = ["Broadcast", "Call", "WorkerGroup", "endpoint"]
