"""Over Ray: a WorkerGroup divides the rows of a batch among actors, and puts together what they return.

group.py       WorkerGroup                            endpoints.py @endpoint: what runs on a rank
call.py        Call: waiting, failures, retry         messages.py  what is sent to a rank, and what comes back
division.py    rows to ranks                          placement.py the object store: what is put, and where
"""

from maskpack.dispatch.call import Call
from maskpack.dispatch.endpoints import endpoint
from maskpack.dispatch.group import Broadcast, WorkerGroup

__all__ = ["Broadcast", "Call", "WorkerGroup", "endpoint"]
