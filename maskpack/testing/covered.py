"""assert_covered: no field of a batch stays padded under a registry."""

from __future__ import annotations

from tensordict import TensorDictBase

from maskpack.fields.options import Registry, registry_of
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.check import COVERAGE, check
from maskpack.tools.suggest import Suggester


def assert_covered(batch: TensorDictBase, registry: Registry = RL_FIELDS, *, pad_token_id: int | None = None) -> None:
    """Asserts that strict mode takes a batch: every padded field is covered by a mask of the registry, and holds its
    pad under that mask; jagged fields and fields [T] have the rows of theirs.

    Args:
        batch: padded or nested. It is not changed.
        registry, pad_token_id: as for `compress`.

    Raises:
        AssertionError: a field would stay padded, or has other rows than its mask. The message names each such field
            and the reason; of one that would stay padded, the values under the mask that fits, and the line to
            register.
        LayoutError, RegistryError: as `compress`.
    """
    found = [one for one in check(batch, registry, pad_token_id=pad_token_id) if one.kind in COVERAGE]
    if not found:
        return
    suggester = Suggester(batch, registry_of(registry, "assert_covered"), pad_token_id)
    out = [f"assert_covered: {len(found)} of the fields are not covered by their mask; expected none:"]
    for one in found:
        out.append(f"  {one.line}")
        if one.kind != "axis":
            suggestion = suggester.suggest(one)
            out += [f"    {suggestion.seen}", f"    {suggestion.line}"]
    if any(one.kind == "axis" for one in found):
        out.append("Fix the producer of a field that has other rows, or give it another mask in the registry.")
    if not all(one.kind == "axis" for one in found):
        out.append("Add the lines to the registry: registry | {...}.")
    raise AssertionError("\n".join(out))
