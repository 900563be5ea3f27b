"""The packed form of a batch: PackedBatch, the table of its encoded fields, its file, and decoding on the GPU.

batch.py       compress, decompress, PackedBatch    decode.py      tensors from a table
table.py       encoded fields in one body           join.py        cat, and fields of several batches
sizes.py       report                               pickling.py    pickles of one buffer
file/          the file format                      cuda/          decoding on the GPU
"""
