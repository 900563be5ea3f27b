"""Masks in computed form: RowLayout, the scan that computes it from a mask, and jagged tensors on its offsets.

row_layout.py  RowLayout                             scan.py, scan_triton.py  masks to spans, on the CPU and the GPU
span_index.py  spans on a device, for kernels        launch_triton.py          launches of kernels, remembered
jagged.py      torch.jagged tensors
"""
