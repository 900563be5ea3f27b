"""The page of models, which a benchmark writes."""

from __future__ import annotations

from needs import needs

needs("transformers")

from bench.cases import models


def test_the_page_has_all_refusals() -> None:
    """After a change: `python -m bench.cases.models`."""
    page = models.PAGE.read_text()
    assert page == models.with_refusals(page)
