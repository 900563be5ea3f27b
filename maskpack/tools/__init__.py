"""The command line: python -m maskpack inspect | doctor | demo.

cli.py      the commands                   inspector.py  the table of inspect
doctor.py   what a registry lacks          suggest.py    specs for fields that stay padded
files.py    saved batches and registries   pickles.py    torch.save, pickle, a DataProto without verl
demo.py     a step of a tiny trainer in two workers, padded, packed and with replay
"""
