"""A log of packed rows on disk.

log.py          RolloutLog: append, take, where, delete, compact, back_up
contents.py     the segments of a log, opened; chunks as packed batches
writer.py       the process that writes: records, syncs, acknowledgements
compaction.py   segments without deleted rows
rows.py         which chunk has which row; rows by tag
segments.py     a file of records: its index, what of it is whole
records.py      a record: header, head, payload, and the header again
disk.py         writes, syncs and reads of files, on disks and elsewhere
"""

from maskpack.store.log import RolloutLog

__all__ = ["RolloutLog"]
