"""The packed form of a batch: PackedBatch, the encodings of its fields, its file, and decoding on the GPU.

batch.py       compress, decompress, PackedBatch    decode.py      the words of its fields, then the tensors
encodings.py   RLE, delta-RLE, arange, ...          references.py  fields that refer to other fields, or to other rows
choose.py      which encoding is smallest           arrays.py      integers in few bytes
join.py        cat                                  pickling.py    pickles of one buffer
sizes.py       report                               bools.py       bytes of bools
file/          the file format                      cuda/          decoding on the GPU
"""
