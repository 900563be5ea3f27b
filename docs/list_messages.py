"""The texts of errors, from the sources, as Markdown for the page of errors. The search of the site finds them there.

    raise LayoutError(f"pack: x is {shape}; expected a mask.")   ->   - `LayoutError`: pack: x is …; expected a mask.

A text in parts that one expression joins is one item; other parts are items of their own, without a class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

GUIDES = {
    "adapters.transformers": "replay",
    "core": "format",
    "layout": "api/batches",
    "ops": "api/ops",
    "packed": "nesting",
    "testing": "api/testing",
    "tools": "tour",
    "views": "nesting",
    **{f"adapters.{name}": "trainers" for name in ("openrlhf", "skyrl", "torchrl")},
}
"""The page for a part of maskpack, where it does not have the name of the part. Without either, the page of errors."""
LISTED = "adapters/transformers/refusals.py"  # in docs/models.md
FEWEST_WORDS = 3
FIELD = re.compile(r"{\w+[^}]*}")  # of str.format


def messages(package: Path) -> str:
    """The texts by part of the package, each part with a link to its guide."""
    parts: dict[str, dict[str, None]] = {}  # a dict, as a set that keeps its order
    for file in sorted(set(package.rglob("*.py")) - {package / LISTED}):
        names = file.relative_to(package).with_suffix("").parts
        part = ".".join(names[: 2 if names[0] == "adapters" else 1])
        parts.setdefault(part, {}).update(dict.fromkeys(_items(ast.parse(file.read_text()), "")))
    lines: list[str] = []
    for part, items in parts.items():
        if items:
            name = part.rpartition(".")[2]
            guide = GUIDES.get(part, name if Path(__file__).with_name(f"{name}.md").exists() else "api/errors")
            lines += [f"### maskpack.{part}", "", f"[](../{guide}.md) tells more.", "", *items, ""]
    return "\n".join(lines)


def _items(node: ast.AST, error: str) -> Iterator[str]:
    """The texts below a node. `error` is the class of the error that they are given to."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "split":
            return  # a list of names
        error = name if name.endswith(("Error", "Warning")) else error
    text = FIELD.sub("…", _text(node))
    if len(re.findall(r"(?<!\S)[A-Za-z]+(?!\S)", text)) >= FEWEST_WORDS:
        escaped = re.sub(r"([^\w\s…])", r"\\\1", " ".join(text.split()))
        yield f"- `{error}`: {escaped}" if error else f"- {escaped}"
    elif not text:
        for child in ast.iter_child_nodes(node):
            yield from _items(child, error)


def _text(node: ast.AST) -> str:
    """The text of an expression, with an ellipsis for each value in it; empty if it has no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(node.left), _text(node.right)]
        return "".join(part or "…" for part in parts) if any(parts) else ""
    return ""
