"""The manuals as a site: it is built without warnings, and can be read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e '.[docs]'")
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements for which a browser loads a resource, and their attribute with the address."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    (line,) = re.findall(r"^SITE := \$\(BIN\)/sphinx-build (.*) build/site$", (ROOT / "Makefile").read_text(), re.M)
    command = [sys.executable, "-m", "sphinx", *line.split(), folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


class Resources(HTMLParser):
    """The addresses of the resources that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, ""))
        if address:
            self.addresses.append(address)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 40
    for page in pages:
        resources = Resources()
        resources.feed(page.read_text())
        for address in resources.addresses:
            assert not re.match(r"(?:\w+:)?//", address), f"{page}: {address}"
            path = address.partition("?")[0].partition("#")[0]
            assert not path or (page.parent / path).exists(), f"{page}: {address}"
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", style.read_text()) == [], style


def test_every_page_is_in_the_site_and_in_the_navigation(site: Path) -> None:
    """Sphinx refuses a page that is in no table of contents. This test checks the links that are shown."""
    front = (site / "docs" / "index.html").read_text()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        assert (site / path.relative_to(ROOT).with_suffix(".html")).exists()
        if path.parent == ROOT / "docs" and path.name != "index.md":
            assert f'href="{path.stem}.html"' in front, path
    assert "url=docs/index.html" in (site / "index.html").read_text()


def test_generated_pages_replace_their_stubs(site: Path) -> None:
    assert "early_stopping" in (site / "docs" / "reference" / "stages" / "train.html").read_text()
    assert "This page is generated" not in (site / "docs" / "operators.html").read_text()


def test_the_search_works_without_a_server(site: Path) -> None:
    """The index is a script: a browser does not let a page from a file fetch JSON."""
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert "zero" in index
    assert "searchindex.js" in (site / "search.html").read_text()
