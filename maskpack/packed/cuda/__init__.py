"""Decoding on the GPU: the body of a table is copied once, and one kernel writes every field.

decode.py      the copy, and what is handed out       jobs.py       fields to jobs of the kernel
kernel.py      the kernel, in Triton                  job_table.py  the columns of the table of jobs
"""
