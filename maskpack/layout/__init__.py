"""Masks in computed form: RowLayout, the scan of masks that makes it, and jagged tensors on its offsets.

row_layout.py  RowLayout                             scan.py, scan_triton.py  masks to spans, on the CPU and the GPU
span_index.py   spans as places in a padded tensor    span_table.py            spans as bytes beside the rows
jagged.py      jagged tensors of torch
"""
