"""Time to check a batch, beside the one read of it that nesting does, too: `check` reads it and looks at valid tokens.

Padded as trainers have it, and jagged, where the read copies no token: it makes layouts alone.
Everything runs in one thread.
"""

from __future__ import annotations

from functools import partial

import maskpack
from bench.harness.measure import interleaved, progress, torch_threads
from bench.harness.registry import case
from bench.harness.report import RowGroups, times
from bench.workloads import PAD_ID, make_batch
from maskpack.fields.options import Options
from maskpack.nesting.read import Opened, read

_READ, _CHECK = "read of the batch", "check"


@case("check", help="time to find what in a batch will go wrong", on="cpu", rows=256, tiny={"rows": 4, "scale": 0.016})
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises AssertionError if a batch has findings."""
    prompt, width = int(1024 * scale), int(4096 * scale)
    batch = make_batch(rows, prompt_width=prompt, response_width=width - prompt)
    packed = maskpack.compress(batch, pad_token_id=PAD_ID)
    nested = maskpack.decompress(packed, format="nested")
    options = Options.of("check", maskpack.RL_FIELDS, PAD_ID)
    for name, form in (("padded", batch), ("jagged", nested)):
        progress(f"check: {rows} rows, {name}")
        assert maskpack.check(form, pad_token_id=PAD_ID) == []
        works = {
            _READ: partial(lambda form: read(Opened.of(form, options)), form),
            _CHECK: partial(maskpack.check, form, pad_token_id=PAD_ID),
        }
        with torch_threads(1):
            ms = interleaved(works, rounds)
        yield times(f"check, {name}", ms, ((_CHECK, _READ, "<= 1.5"),))
