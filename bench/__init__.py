"""Benchmarks of maskpack, `python -m bench CASE`: the baseline and ours in one process, interleaved; medians, ratios.

workloads   batches made from a seed        baselines   what trainers do today
payload     bytes on the wire               nest        time to nest and restore
measure     time, bytes, exactness          report      the table and the JSON
"""
