"""Between padded and jagged: which field lies under which mask, and whether its masked-out elements are its pad.

axes.py        the masks of a batch, and their RowLayouts       survey.py    the form, layout, values of each field
checks.py      are the masked-out elements of a field its pad?  verify.py    the checks of all fields of a batch
coverage.py    strict mode, and why a field stayed padded       schema.py    what a nested batch carries of its forms
nest.py        nest_batch_by_mask, unnest                       response.py  the response axis, for losses
"""
