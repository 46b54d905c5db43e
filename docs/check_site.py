"""Check the built site: links, search words, and in a browser also that no code is cut off.

    python docs/check_site.py docs/_build/html               # links and search; part of `make docs`
    python docs/check_site.py docs/_build/html --browser     # also layout, in Chromium: `make site-check`

The browser visits every page at two widths, light and dark, and writes a screenshot of some pages to build/site.
"""

import json
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

WIDTHS = (1400, 390)
SHOWN = ("index", "tutorial", "performance", "api", "generated/cuflash.attention", "gallery/index")
# Search words of readers who know other libraries.
WORDS = (
    "GQA", "MQA", "varlen", "cu_seqlens", "ragged", "BSHD", "paged", "top-k", "RoPE", "sliding window", "score_mod",
    "is_causal", "softcap", "ALiBi", "FP8", "split-KV",
)  # fmt: skip


class Page(HTMLParser):
    """The anchors, the addresses and the unresolved references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[str] = []
        self.unresolved = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.addresses += [values[name] for name in ("href", "src") if values.get(name)]
        self.unresolved += "xref myst" in values.get("class", "")


def broken_links(site: Path) -> Iterator[str]:
    """Yield a line for each address within the site that leads nowhere, and for each reference without an address."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if page.unresolved:
            yield f"{name}: {page.unresolved} references are plain text"
        for address in dict.fromkeys(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            # sphinx.ext.viewcode guesses the anchors of names that a module and its package export.
            anchor = "" if name.parts[0] == "_modules" else unquote(parts.fragment)
            if not target.is_file() or anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {address} leads nowhere"


def unanswered(site: Path, words: Iterable[str] = WORDS) -> Iterator[str]:
    """Yield each search of which the index of the site has no page."""
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    language = SearchEnglish({})
    for query in words:
        pages: set[int] | None = None
        for word in language.split(query):
            stem = language.stem(word.lower())
            hits = [index[kind].get(term, []) for kind in ("terms", "titleterms") for term in {stem, word.lower()}]
            of_word = {page for hit in hits for page in ([hit] if isinstance(hit, int) else hit)}
            pages = of_word if pages is None else pages & of_word
        if not pages:
            yield f"search: no page has {query!r}"


def ill_fitting(site: Path, pictures: Path) -> Iterator[str]:
    """Yield what does not fit in a browser: code that is cut off, a page wider than the window, an empty sidebar."""
    from playwright.sync_api import sync_playwright

    measure = """() => ({
        cut: [...document.querySelectorAll('article pre')].filter(pre => pre.scrollWidth > pre.clientWidth + 1)
            .map(pre => pre.innerText.split('\\n').reduce((a, b) => a.length > b.length ? a : b).trim()),
        over: document.documentElement.scrollWidth - window.innerWidth,
        links: document.querySelectorAll('.sidebar-tree a').length,
    })"""
    pictures.mkdir(parents=True, exist_ok=True)
    names = [str(path.relative_to(site).with_suffix("")) for path in sorted(site.rglob("*.html"))]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                for name in names if scheme == "light" else SHOWN:
                    page.goto((site / f"{name}.html").resolve().as_uri(), wait_until="domcontentloaded")
                    layout = page.evaluate(measure)
                    where = f"{name} at {width} pixels"
                    yield from (f"{where}: code is cut off: {line[:100]}" for line in layout["cut"])
                    if layout["over"] > 0:
                        yield f"{where}: the page is {layout['over']} pixels wider than the window"
                    if not layout["links"]:
                        yield f"{where}: the sidebar is empty"
                    if name in SHOWN:
                        page.wait_for_load_state("load")
                        page.screenshot(path=pictures / f"{name.replace('/', '-')}-{width}-{scheme}.png")
                page.close()
        page = browser.new_page()
        for query in WORDS:
            page.goto(f"{(site / 'search.html').resolve().as_uri()}?q={query}")
            try:
                page.wait_for_selector("ul.search li", timeout=20_000)
            except Exception:
                yield f"search: the page of results is empty for {query!r}"
        browser.close()


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true", help="also look at every page in Chromium")
    arguments = parser.parse_args()
    faults = [*broken_links(arguments.site), *unanswered(arguments.site)]
    if arguments.browser:
        faults += ill_fitting(arguments.site, Path("build/site"))
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    sys.exit(bool(faults))
