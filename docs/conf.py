"""The site: `pip install -e '.[docs]' && sphinx-build -W -b html docs build/docs`.

pages of docs/*.md, docstrings, bench/results  ->  build/docs; nothing is fetched from elsewhere

The page of errors ends with their texts, so that the search finds them (list_messages.py, _static/search.js).

Figures (docs/*.svg) become part of their pages, so that they follow the switch of the theme.

Frameworks that are not installed are stood in for by mocks, so that the reference of the adapters is whole everywhere.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.formatters import HtmlFormatter
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docstrings import prepare_docstring

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import list_messages

import maskpack
from bench.harness.curves import write_figures
from bench.harness.page import write_page
from maskpack.core.backends import is_installed

project = "maskpack"
copyright = "the maskpack authors"
version = release = maskpack.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"maskpack {release}"
html_show_sphinx = False
html_static_path, html_css_files, html_js_files = ["_static"], ["site.css"], ["search.js"]
pygments_style, pygments_dark_style = "friendly", "monokai"
highlight_language = "none"  # of fences without a name: diagrams and what commands print
copybutton_selector = ", ".join(f"div.highlight-{kind} pre" for kind in ("python", "bash", "yaml"))

myst_heading_anchors = 3

FRAMEWORKS = ("ray", "transformers", "verl", "transfer_queue", "zmq", "omegaconf", "torchrl", "skyrl", "openrlhf")
autodoc_mock_imports = [name for name in FRAMEWORKS if not is_installed(name)]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_class_signature = "separated"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"
ARRAY = re.compile(r"[~\w.]*ndarray\[tuple\[[~\w.]*Any, \.\.\.\], [~\w.]*dtype\[[~\w.]*?(\w+)\]\]")
SHAPE = re.compile(r"(?<![\w`])\[[A-Z1n][\w ,.*+]*\]")


def _constants() -> dict[int, list[str]]:
    """The strings below the constants of all modules, by the identity of the constant."""
    found: dict[int, list[str]] = {}
    for info in pkgutil.walk_packages(maskpack.__path__, "maskpack."):
        if info.name in sys.modules:
            module = sys.modules[info.name]
            for (owner, name), lines in ModuleAnalyzer.for_module(info.name).find_attr_docs().items():
                if not owner and hasattr(module, name):
                    found[id(getattr(module, name))] = lines
    return found


def _readable(lines: list[str]) -> list[str]:
    """Drawings, which stand indented between blank lines, as literal blocks; and shapes as code, because the star of
    [B, S, *F] is no emphasis."""
    out: list[str] = []
    drawn = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not drawn and out and not out[-1]:
            out += ["::", ""]
            drawn = True
        drawn = drawn and (indented or not line)
        out.append(line if drawn else SHAPE.sub(r"``\g<0>``", line))
    return out


def _document(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Constants are documented where they are made, and listed where they are public."""
    lines[:] = _readable(_constants().get(id(value), lines) if what == "data" else lines)


def _restore(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """napoleon takes "The rows: their schema" of a property for the name of a type and its description."""
    if what == "property":
        lines[:] = _readable(prepare_docstring(value.__doc__ or ""))


def _sign(
    app: Sphinx, what: str, name: str, value: Any, options: Any, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Arrays by their dtype: numpy spells an array of integers in three types."""
    short = [None if text is None else ARRAY.sub(r"NDArray[\1]", text) for text in (arguments, returned)]
    return short[0], short[1]


def _write_figures(app: Sphinx) -> None:
    """The page of all figures is no source: it is made from the results, and the search leaves it out. So are the
    figures of whole runs."""
    results, pages = Path(app.srcdir).parent / "bench/results", Path(app.srcdir)
    write_page(results, pages / "figures.md")
    write_figures(results / "runs/grpo-h200.json", results / "run-h200.json", pages)


def _put_figures_in(app: Sphinx, tree: nodes.document, page: str) -> None:
    """An image that is linked to sees no style of the page."""
    if app.builder.format == "html":
        for image in list(tree.findall(nodes.image)):
            if image["uri"].endswith(".svg"):
                drawing = (Path(app.srcdir) / image["uri"]).read_text()
                label = f'<svg role="img" aria-label="{escape(image.get("alt", ""))}" '
                image.replace_self(nodes.raw("", drawing.replace("<svg ", label, 1), format="html"))


def _list_messages(app: Sphinx, page: str, source: list[str]) -> None:
    """The page of errors ends with their texts, and is made anew after a change of a source."""
    if page == "api/errors":
        package = Path(maskpack.__file__).parent
        source[0] += list_messages.messages(package)
        for file in package.rglob("*.py"):
            app.env.note_dependency(str(file), docname=page)


class _Lines(HtmlFormatter):
    """Lines that know their indentation, and the columns of the longest: site.css wraps or shrinks what is too long."""

    def _format_lines(self, tokensource: Any) -> Iterator[tuple[int, str]]:
        lines = list(super()._format_lines(tokensource))
        texts = [unescape(re.sub(r"<[^>]*>", "", line)).rstrip() for _, line in lines]
        columns = max(map(len, texts), default=0)
        for (number, line), text in zip(lines, texts, strict=True):
            style = f"--indent: {len(text) - len(text.lstrip(' '))}ch; --columns: {columns}"
            yield number, f'<span class="code-line" style="{style}">{line}</span>'


def setup(app: Sphinx) -> None:
    PygmentsBridge.html_formatter = _Lines
    app.connect("source-read", _list_messages)
    app.connect("builder-inited", _write_figures)
    app.connect("doctree-resolved", _put_figures_in)
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-process-docstring", _document, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)  # napoleon has 500
