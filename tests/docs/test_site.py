"""The site builds without a warning, links lead somewhere, and every public name has its entry.

docs/*.md, docstrings -> sphinx-build -W -> pages; what is said of them is read from the HTML and the inventory
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    """What the search knows."""
    return json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))


def pages_with(words: list[str], index: dict[str, Any]) -> set[str]:
    """The pages that the search finds: those with all words."""
    from sphinx.search.en import SearchEnglish

    english = SearchEnglish({})
    found = set(range(len(index["docnames"])))
    for word in map(str.lower, words):
        if word not in english.stopwords:
            pages = index["terms"].get(english.stem(word), [])
            found &= {pages} if isinstance(pages, int) else set(pages)
    return {index["docnames"][number] for number in found}


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


def test_five_pages_are_in_front(site: Path) -> None:
    front = (site / "index.html").read_text()
    five = ["trainers", "adopt", "fields", "dispatch", "replay"]
    for part in ('class="sidebar-tree"', "<p>you want to</p>"):
        links = LINK.findall(front[front.index(part) :])
        assert [link.removesuffix(".html") for link in links[:5]] == five


def test_lines_of_code_know_how_far_they_are_indented(site: Path) -> None:
    """Then what does not fit is wrapped (_static/site.css)."""
    block = (site / "tour.html").read_text().split("<pre>")[1].split("</pre>")[0]
    indents = re.findall(r'<span class="code-line" style="--indent: (\d+)ch; --columns: \d+">', block)
    assert len(indents) == block.count("\n")
    assert {"0", "4"} <= set(indents)


def test_the_picture_is_in_its_page_and_follows_the_switch_of_the_theme(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert re.search(r'<svg role="img" aria-label="[^"]+" [^>]*class="batch"', page)
    assert all(f"body[data-theme={theme}] .batch{{" in page for theme in ("light", "dark"))
    assert "batch.svg" not in page


def test_no_text_without_a_language_is_coloured(site: Path) -> None:
    assert not [page for page in reachable(site) if "highlight-default" in (site / page).read_text()]


def test_the_search_leaves_all_figures_out(index: dict[str, Any]) -> None:
    number = index["docnames"].index("figures")
    assert not [
        term for term, pages in index["terms"].items() if number in ([pages] if isinstance(pages, int) else pages)
    ]


ERRORS = {
    "nothing in the batch gives its mask": "api/errors",
    "packed attention received an attention_mask; expected bounds only": "models",
    "was opened by the process that this one is a fork of": "api/errors",
}
"""Texts of errors, and the page that explains them."""


@pytest.mark.parametrize(("text", "page"), ERRORS.items())
def test_the_search_finds_the_texts_of_errors(text: str, page: str, index: dict[str, Any]) -> None:
    words = re.findall(r"\w+", text)
    assert page in pages_with(words, index)
    assert pages_with([*words, "zebra"], index) == set()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_search_finds_a_message_with_values(site: Path, index: dict[str, Any]) -> None:
    """Values that no page has do not count (_static/search.js)."""
    text = "unpack: 31 pads for 17 zebras; expected one for each. Give one pad, or a list of 17."
    script = """
        const run = (file) => require("vm").runInThisContext(require("fs").readFileSync(file, "utf8"));
        const Search = { setIndex: (index) => (Search._index = index) };
        Object.assign(globalThis, { Search, Scorer: {}, location: { hash: "#" }, window: globalThis });
        const [text, ...files] = process.argv.slice(1);
        files.forEach(run);
        console.log(JSON.stringify(splitQuery(text)));
    """
    files = (site / "_static/language_data.js", site / "_static/search.js", site / "searchindex.js")
    words = json.loads(output_of("node", "-e", script, text, *files))
    assert {"unpack", "pads", "expected", "list"} <= set(words)
    assert "api/errors" in pages_with(words, index)


def test_the_texts_of_errors_are_read_from_the_sources(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("list_messages", DOCS / "list_messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "ops.py").write_text(
        '"""Not this text of the module."""\n'
        'def f(x):\n    raise LayoutError(f"f: x is {x!r}; " "expected a mask." + REMEDY)\n'
        'TEXT = "the window of {tokens} tokens"\nNAMES = "not these names either".split()\n'
    )
    assert module.messages(tmp_path).splitlines() == [
        "### maskpack.ops",
        "",
        "[](../api/ops.md) tells more.",
        "",
        r"- `LayoutError`: f\: x is …\; expected a mask\.…",
        r"- the window of … tokens",
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
