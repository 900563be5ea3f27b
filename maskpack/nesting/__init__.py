"""Padded to jagged and back: the mask of each field, and the check that its masked-out elements equal its pad.

plan.py        the form of each field, from its signature       axes.py      the masks of a batch, and its layouts
read.py        layouts, packed values and pads of a batch       jobs.py      what the core is told of a batch
check.py       what in a batch will go wrong; strict mode       schema.py    the schema stored in a nested batch
documents.py   rows that hold several documents
nest.py        nest_batch_by_mask and back                      nested.py    what a nested batch has beside its fields
response.py    the response axis, for losses                    rows.py      take, cat: rows of padded, nested batches
write.py       values and pads as padded fields                 device_read.py padded fields on a device, read once
"""

from maskpack.nesting.rows import cat, take

__all__ = ["cat", "take"]
