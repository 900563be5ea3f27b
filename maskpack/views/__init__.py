"""Rows of packed batches that lie elsewhere: in the object store, on other nodes.

view.py        BatchView                              strand.py    fields that share their rows, and where they lie
segments.py    which rows of which batch              origins.py   which rows a view stands for
"""

from maskpack.views.strand import Outline
from maskpack.views.view import BatchView

__all__ = ["BatchView", "Outline"]
