"""Decoding on the GPU: the body of a table is copied once, and one kernel writes every field. Encoding: two launches,
and the host lays out the arrays in between.

decode.py      the copy, and what is handed out       jobs.py       fields to jobs of the kernel
kernel.py      the kernel, in Triton                  job_table.py  what is in a job
encode.py      packed values on a device to a table   encode_kernel.py  its kernels, told what Unit in core/abi.h says
device_plan.py padded batches of one signature
"""
