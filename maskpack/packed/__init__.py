"""The packed form of a batch: PackedBatch, the table of its encoded fields, its file, and its kernels.

batch.py       compress, decompress, PackedBatch    decode.py      tensors from rows of bodies
table.py       encoded fields in one body           join.py        cat, and fields of several batches
columns.py     rows as numbers                      tokens.py      spans of tokens as rows
segments.py    which rows of which body
encode.py      a batch to a table                   report.py      report
pickling.py    pickles of one buffer                rows.py        batches from values and lengths
file/          the file format                      cuda/          encoding and decoding on the GPU
"""
