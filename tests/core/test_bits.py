"""Raw bits of tensors."""

from __future__ import annotations

import pytest
import torch

from maskpack.core.bits import bytes_of


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (1, 0), (0, 3), (1, 3), (3, 1), ()])
@pytest.mark.parametrize("step", [1, 2])
def test_bytes_of_contiguous_words(shape: tuple[int, ...], step: int) -> None:
    """torch calls a tensor of one element contiguous whatever its strides are."""
    whole = torch.arange(40).reshape(5, 8)
    x = whole[1:, 1:].as_strided(shape, whole.stride()[: len(shape)], 9) if shape else whole[1, 1]
    x = x[..., ::step].contiguous() if shape else x
    assert bytes(bytes_of(x).tolist()) == b"".join(int(each).to_bytes(8, "little") for each in x.flatten().tolist())
    if x.numel():
        assert bytes_of(x).data_ptr() == x.data_ptr()


def test_one_element_that_a_view_left_its_strides() -> None:
    x = torch.arange(8).reshape(2, 4)[1:, ::2][:, 1:]
    assert x.is_contiguous()
    assert x.stride(1) == 2
    assert bytes(bytes_of(x).tolist()) == (6).to_bytes(8, "little")
