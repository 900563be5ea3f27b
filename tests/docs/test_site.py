"""The site builds without a warning, links lead somewhere, and every public name has its entry.

docs/*.md, docstrings -> sphinx-build -W -> pages; what is said of them is read from the HTML and the inventory
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from command_line import output_of
from needs import needs

import maskpack as mp
from maskpack import store, testing

needs("sphinx")
needs("furo")
needs("myst_parser")
needs("sphinx_copybutton")

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r'href="([^"#?]+\.html)')
PAGES = [page.relative_to(DOCS).with_suffix("") for page in sorted(DOCS.rglob("*.md"))]
RE_EXPORTED = {"maskpack.adapters.verl.MaskNestingSpec"}
"""Names of the core that an adapter hands on; their entries are the core's."""
DEFINED = re.compile(r"^(?:class|def) ([A-Za-z]\w*)", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    output_of(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, out)
    return out


@pytest.fixture(scope="module")
def entries(site: Path) -> set[str]:
    """The names that the reference describes."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind in inventory.data if kind.startswith("py:") for name in inventory.data[kind]}


def reachable(site: Path, start: str = "index.html") -> set[str]:
    """The pages that links lead to."""
    found, open_pages = set(), [start]
    while open_pages:
        page = open_pages.pop()
        if page in found:
            continue
        found.add(page)
        for link in LINK.findall((site / page).read_text()):
            if "://" not in link:
                target = (site / page).parent.joinpath(link).resolve()
                open_pages.append(target.relative_to(site.resolve()).as_posix())
    return found


def adapters() -> list[str]:
    """A file or a package for each."""
    places = (Path(mp.__file__).parent / "adapters").glob("[a-z]*")
    return sorted(path.stem for path in places if path.suffix == ".py" or path.is_dir())


def _is_ours(value: object) -> bool:
    return isinstance(value, type) and value.__module__ == "maskpack.errors"


def missing(names: set[str], entries: set[str]) -> set[str]:
    return names - entries


# -------------------------------------------------------------------- pages


def test_every_page_is_reachable(site: Path) -> None:
    assert {f"{page.as_posix()}.html" for page in PAGES} <= reachable(site)


def test_every_page_is_in_a_table_of_contents(site: Path) -> None:
    front = (site / "index.html").read_text()
    sidebar = front[front.index('class="sidebar-tree"') :].split("</aside>")[0]
    listed = {link.removesuffix(".html") for link in LINK.findall(sidebar)}
    assert {page.as_posix() for page in PAGES} - {"index"} <= listed


def test_the_picture_is_in_its_page_and_follows_the_switch_of_the_theme(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert re.search(r'<svg role="img" aria-label="[^"]+" [^>]*class="batch"', page)
    assert all(f"body[data-theme={theme}] .batch{{" in page for theme in ("light", "dark"))
    assert "batch.svg" not in page


def test_no_text_without_a_language_is_coloured(site: Path) -> None:
    assert not [page for page in reachable(site) if "highlight-default" in (site / page).read_text()]


def test_the_search_leaves_all_figures_out(site: Path) -> None:
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    number = index["docnames"].index("figures")
    assert not [
        term for term, pages in index["terms"].items() if number in ([pages] if isinstance(pages, int) else pages)
    ]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Neither scripts, nor styles, nor fonts."""
    for page in reachable(site):
        text = (site / page).read_text()
        assert not re.findall(r'<script[^>]* src="(?:https?:)?//', text)
        assert not re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="(?:https?:)?//', text)


# -------------------------------------------------------------------- names


def test_every_public_name_has_its_entry(entries: set[str]) -> None:
    names = {f"maskpack.{name}" for name in mp.__all__}
    for part in (mp.nesting, mp.ops, mp.planning, mp.replay, mp.views, store, testing):
        names |= {f"{part.__name__}.{name}" for name in part.__all__}
    names |= {f"maskpack.errors.{name}" for name, value in vars(mp.errors).items() if _is_ours(value)}
    assert missing(names, entries) == set()


def test_dispatch_has_its_entries(entries: set[str]) -> None:
    needs("ray")
    dispatch = importlib.import_module("maskpack.dispatch")
    assert missing({f"maskpack.dispatch.{name}" for name in dispatch.__all__}, entries) == set()


@pytest.mark.parametrize("name", adapters())
def test_adapters_have_their_entries(name: str, entries: set[str]) -> None:
    """What an adapter makes public, `__all__` or else every class and function without an underscore in front."""
    place = Path(mp.__file__).parent / "adapters" / name
    source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
    listed = re.search(r"^__all__ = \[(.*?)\]", source, re.MULTILINE | re.DOTALL)
    public = re.findall(r'"(\w+)"', listed[1]) if listed else DEFINED.findall(source)
    assert public
    assert missing({f"maskpack.adapters.{name}.{public_name}" for public_name in public}, entries) <= RE_EXPORTED


def test_a_missing_entry_would_be_seen(entries: set[str]) -> None:
    assert missing({"maskpack.compress", "maskpack.compres"}, entries) == {"maskpack.compres"}


def test_signatures_are_readable(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        signatures = re.findall(r"<dt class=.*?</dt>", page.read_text(), re.DOTALL)
        plain = [re.sub(r"<[^>]+>|\s", "", signature) for signature in signatures]
        assert not [text for text in plain if "TypeAlias" in text or "dtype[numpy" in text or "ForwardRef" in text]
