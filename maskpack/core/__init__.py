"""What every package stands on: bits of tensors, paths of fields, index arithmetic, trees of tensors, Python objects.

arguments.py   checks of what callers pass           keys.py      names and paths of fields
tensors.py     checks of tensors                     bits.py      tensors as integers of their size, and pads as bits
index.py       index arithmetic on NumPy arrays      tree.py      TensorDicts as paths and values, and back
objects.py     Python objects as JSON or pickles     memory.py    buffers that are used again
threads.py     work for several threads              backends.py  Triton or torch
"""
