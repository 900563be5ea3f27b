"""Benchmarks of maskpack, `python -m bench CASE`: the baseline and ours in one process, interleaved; medians, ratios.

workloads   batches made from a seed        baselines   what trainers do today
payload     bytes on the wire               nest        time to nest and restore
floors      what memory alone costs, in C   payload_*   compressors, fresh pages, small batches
measure     time, bytes, exactness          report      the table and the JSON
"""
