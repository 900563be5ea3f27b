"""The packed form of a batch: PackedBatch, the table of its encoded fields, its file, and its kernels.

batch.py       compress, decompress, PackedBatch    decode.py      tensors from a table
table.py       encoded fields in one body           join.py        cat, and fields of several batches
batch_plan.py  what batches are made of             sizes.py       report
pickling.py    pickles of one buffer                rows.py        batches from values and lengths
file/          the file format                      cuda/          encoding and decoding on the GPU
"""
