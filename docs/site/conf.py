"""Sphinx builds the manuals as a site from the Markdown files that are also read in the repository: `make docs`.

The source folder is the repository, so relative links between all pages are valid in both places. The lists of links in
docs/index.md are the navigation; so are the links of an index.md in another folder to the pages next to it. The text of
the reference pages comes from the code (write_reference.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from flowchart import Flowchart  # noqa: E402
from write_reference import pages  # noqa: E402

project = "Coralline"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

html_theme = "furo"
html_title = "Coralline"
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}

ITEM = re.compile(r"^- \[[^]]+\]\(([^)#]+)\.md\)", re.MULTILINE)
SIBLING = re.compile(r"\]\((\w+)\.md\)")
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


GENERATED = {f"docs/{name}": text for name, text in pages().items()}


def _generated(app: Any, docname: str, source: list[str]) -> None:
    """Replace the stub of a generated page with the page."""
    source[0] = GENERATED.get(docname, source[0])


def _navigation(app: Any, docname: str, source: list[str]) -> None:
    """Add a hidden table of contents for each section of the front page, and for the index of a folder."""
    if docname != root_doc and docname.endswith("/index"):
        source[0] += _contents("", [*dict.fromkeys(SIBLING.findall(source[0]))])
    elif docname == root_doc:
        for caption, text in SECTION.findall(source[0]):
            source[0] += _contents(f":caption: {caption}\n", ITEM.findall(text))


def _contents(options: str, pages: list[str]) -> str:
    """Return a hidden table of contents of some pages; "" for none."""
    return f"\n```{{toctree}}\n:hidden:\n{options}\n" + "\n".join(pages) + "\n```\n" if pages else ""


def setup(app: Any) -> None:
    """Connect the generated pages and the navigation, and register the directive of flowcharts."""
    app.add_directive("mermaid", Flowchart)
    app.connect("source-read", _generated)
    app.connect("source-read", _navigation)
    app.connect("env-get-outdated", lambda *_: list(GENERATED))  # the files of the stubs do not change with the code
