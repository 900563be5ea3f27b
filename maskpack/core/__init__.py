"""Shared by all packages: raw bits, pads, field paths, index arithmetic, TensorDict trees, Python objects.

arguments.py   checks of arguments                   keys.py      names and paths of fields
tensors.py     checks of tensors and devices         bits.py      tensors as integers of their item size
index.py       index arithmetic on NumPy arrays      pads.py      pads and their raw bits
objects.py     Python objects as arrays and JSON     tree.py      TensorDicts as lists of paths and values
core.c         the compiled core; encodings/         native.py    its binding; abi.py: what both sides share
memory.py      reusable buffers                      backends.py  Triton or torch
ranks.py       what ranks compare                    latest.py     a bounded memory
difference.py  the first element that differs
"""
