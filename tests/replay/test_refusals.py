"""The table of refusals: its callers, and what may be one."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest
import torch
from needs import needs

needs("transformers")

from maskpack.adapters.transformers import refusals

ROOT = Path(__file__).parents[2]


def test_each_refusal_is_raised_with_what_it_names() -> None:
    raised = set[str]()
    for file in (ROOT / "maskpack/adapters").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.startswith("Refusal."):
                one = refusals.Refusal[name.removeprefix("Refusal.")]
                texts = f"{one.refused} {one.expected} {one.instead}"
                named = {field for _, field, _, _ in string.Formatter().parse(texts) if field}
                assert {keyword.arg for keyword in node.keywords} == named, f"{file.name}: {name}"
                raised.add(one.name)
    assert raised == {one.name for one in refusals.Refusal}


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (TypeError("'NoneType' object is not callable"), True),
        (NotImplementedError("seq_idx"), True),
        (ImportError("kernels"), True),
        (AttributeError("cache"), False),
        (KeyError("rows"), False),
        (OSError("disk"), False),
        (MemoryError(), False),
        (torch.OutOfMemoryError("all of it"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=repr,
)
def test_what_may_be_a_refusal(error: Exception, may: bool) -> None:
    assert refusals.may_refuse(error) is may
    assert refusals.may_refuse(KeyError("states"), LookupError)
