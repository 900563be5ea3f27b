"""The packed form of a batch: PackedBatch, the table of its encoded fields, its file, and its kernels.

batch.py       compress, decompress, PackedBatch    decode.py      tensors from rows of bodies
table.py       encoded fields in one body           join.py        cat, and fields of several batches
rows.py        which rows of which table            report.py      report
encode.py      a batch to a table                   values.py      batches from values and lengths
pickling.py    pickles of one buffer                engine.py      outputs of vLLM and SGLang as rows
file/          the file format                      cuda/          encoding and decoding on the GPU
"""
