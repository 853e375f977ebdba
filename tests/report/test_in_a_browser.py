"""The pages in a real browser: at the width of a telephone, with a dark colour scheme, and printed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser
from run_records import RECORDS, full, rendered

WIDER = """
[...document.querySelectorAll('body *')].filter(element => {
  if (element.closest('.scroll, .canvas, svg, .skip')) return false;
  const box = element.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map(element => element.outerHTML.slice(0, 160))
"""
"""The elements that leave the window, except those that are scrolled inside their own container."""
BROKEN = r"""
(() => {
  const broken = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const token = /[+\u2212-]?\d[\d.,]*(?:[\u00a0 ](?:ms|s|bytes|KiB|MiB|dB|M|G|MHz)\b)?/g;
  for (let node; node = walker.nextNode();) {
    if (node.parentElement.closest('pre, .long, dd, svg, code, caption, figcaption, .more')) continue;
    for (const match of node.data.matchAll(token)) {
      if (match[0].length < 2 || /[A-Za-z_\/]/.test(node.data[match.index - 1] || '')) continue;
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].replace(/[.,]$/, '').length);
      const lines = new Set([...range.getClientRects()].filter(r => r.width).map(r => Math.round(r.bottom / 4)));
      if (lines.size > 1) broken.push(match[0] + ' in ' + node.data.slice(0, 80));
    }
  }
  return broken;
})()
"""
"""The numbers, with their units, that are broken into two lines."""
UNREACHABLE = """
[...document.querySelectorAll('.scroll:not([tabindex]), pre')]
    .filter(element => element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1)
    .map(element => element.outerHTML.slice(0, 160))
"""
"""The scrolled elements without a tab stop, which the keyboard does not reach."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def load(tab: Browser, page: Path, *, width: int, dark: bool = False) -> None:
    """Open a page in a window of a given width."""
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tab.call("Emulation.setEmulatedMedia", media="", features=[scheme])
    tab.open(page.resolve().as_uri())


PAGES: dict[str, Any] = {
    **{name: (lambda make=make: rendered(make())["report.html"].decode()) for name, make in RECORDS.items()},
}


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(PAGES[request.param](), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_leaves_the_window_and_no_number_is_broken(tab: Browser, page: Path, width: int) -> None:
    load(tab, page, width=width, dark=True)
    for details in (False, True):
        tab.value(f"document.querySelectorAll('details').forEach(each => each.open = {str(details).lower()})")
        assert tab.value(WIDER) == []
        assert tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert tab.value(BROKEN) == []
        if "W" * 80 not in page.read_text(encoding="utf-8"):  # the hostile record has words of 300 characters
            assert tab.value(UNREACHABLE) == []


def test_the_page_follows_the_colour_scheme(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(rendered(full())["report.html"])
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    load(tab, path, width=800)
    assert tab.value(colour) == "rgb(255, 255, 255)"
    load(tab, path, width=800, dark=True)
    assert tab.value(colour) == "rgb(20, 24, 28)"


def test_links_of_the_contents_lead_to_their_sections(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(rendered(full())["report.html"])
    load(tab, path, width=800)
    tab.value("[...document.querySelectorAll('nav a')].at(-3).click()")
    assert tab.value("Math.abs(document.querySelector(':target').getBoundingClientRect().top) < 30")


def test_printed_details_are_open(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(rendered(full())["report.html"])
    load(tab, path, width=800)
    hidden = """document.body.offsetHeight && [...document.querySelectorAll('details')]
        .filter(each => !each.lastElementChild.offsetHeight || !each.lastElementChild.checkVisibility()).length"""
    assert tab.value(hidden) > 3
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.value(hidden) == 0
    assert tab.value("[...document.querySelectorAll('.up')].every(each => !each.checkVisibility())")
    printed = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert printed.startswith(b"%PDF")
