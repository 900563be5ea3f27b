"""Ray dispatch: a WorkerGroup divides the rows of a batch among actors and joins their results.

group.py       WorkerGroup                            endpoints.py @endpoint: the call on a rank
call.py        Call: waiting, failures, retry         messages.py  RankCall and RankReply
division.py    rows to ranks                          placement.py rows in the object store
timeline.py    Timeline: where the time of calls goes ray_metrics.py  the same for Prometheus
"""

from maskpack.dispatch.call import Call
from maskpack.dispatch.endpoints import endpoint
from maskpack.dispatch.group import Broadcast, WorkerGroup
from maskpack.dispatch.timeline import Timeline

__all__ = ["Broadcast", "Call", "Timeline", "WorkerGroup", "endpoint"]
