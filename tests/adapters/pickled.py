"""What pickles of a trainer's own class must be, whichever adapter packs them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from samples import PAD

from maskpack.errors import RegistryError


def check_pickles(switch: Callable[..., Callable[[], None]], value: Any, told: Callable[[Any], Any]) -> None:
    """`switch(**options)` packs the pickles of such values, and gives what undoes it; `told` gives plain data."""
    usual, buffers = len(pickle.dumps(value)), list[Any]()
    outer, inner = switch(pad_token_id=PAD), switch(pad_token_id=PAD, codec=None)
    small = [pickle.dumps({"value": value})]
    inner()
    small.append(pickle.dumps({"value": value}))
    stream = pickle.dumps(value, 5, buffer_callback=buffers.append)
    outer()
    assert len(pickle.dumps(value)) == usual
    assert max(map(len, small)) < usual / 4
    assert len(stream) < sum(buffer.raw().nbytes for buffer in buffers)
    for content in small:  # the reader needs no call
        assert told(pickle.load(io.BytesIO(content))["value"]) == told(value)
    assert told(pickle.loads(stream, buffers=buffers)) == told(value)
    with pytest.raises(RegistryError, match="verify"):
        switch(verify="maybe")
