"""Benchmarks of maskpack, `python -m bench CASE`: rivals, a floor and ours in one process, interleaved; medians and
ratios.

A package imports only those below it; tests/bench/test_bench_imports.py holds it.

    cases       what is measured, one module or folder each
    rivals      what trainers do without maskpack
    workloads   batches and models made from a seed
    harness     time, memory, exactness, processes; the table, the JSON and the page
"""
