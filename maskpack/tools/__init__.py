"""The command line: python -m maskpack inspect | doctor | demo.

cli.py      the commands                          inspector.py  the table of inspect
doctor.py   the registry that fits, tried         suggest.py    axes, and specs for fields that stay padded
files.py    saved batches and registries          formats.py    torch.save, pickle, npz, JSON
"""
