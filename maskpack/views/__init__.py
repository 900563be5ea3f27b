"""Views of rows of packed batches, which may be in the object store or on other nodes.

view.py            BatchView
column_group.py    fields whose rows come from the same batches
origins.py         which rows of which batch the rows of a view stand for
"""

from maskpack.views.column_group import BatchMeta
from maskpack.views.view import BatchView

__all__ = ["BatchMeta", "BatchView"]
