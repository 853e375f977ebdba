"""Pages that need nothing else: no script, no other file, no network. The style is in `page.css`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.report.blocks import Section
from compress.report.verdict import Overview
from compress.report.wording import clean

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

UNITS = "ms|s|min|h|bytes|KiB|MiB|GiB|MACs|dB|MHz|GHz|k|M|G"
_NUMBER_AND_UNIT = re.compile(rf"(?<=\d) (?=(?:{UNITS})\b)|(?<=\d\W[kMG]) (?=MACs\b)|(?<=\bEdge) (?=TPU\b)")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_WHOLE = r'<span class="whole">\g<0></span>'
_NO_BREAK = "\N{NO-BREAK SPACE}"


def page(overview: Overview, sections: Sequence[Section]) -> str:
    """Return the report of a run."""
    return render("report.html.j2", overview=overview, sections=sections)


def render(template: str, **values: Any) -> str:
    """Return a page from a template of this folder. Strings among the values are not trusted."""
    return _environment().get_template(template).render(**values)


def unbroken(text: str) -> str:
    """Return a text in which no line ends between a number and its unit, or in the name of the accelerator."""
    return _NUMBER_AND_UNIT.sub(_NO_BREAK, text)


def prose(text: str) -> Markup:
    """Return a text for the page: `code` between backticks; numbers with their units, and dates, on one line."""
    from markupsafe import Markup, escape

    parts = clean(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        parts = [clean(text)]
    marked = [
        f"<code>{escape(part)}</code>" if index % 2 and part else _DATE.sub(_WHOLE, str(escape(unbroken(part))))
        for index, part in enumerate(parts)
    ]
    return Markup("".join(marked))  # noqa: S704 - every part is escaped


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,  # markup is clean
    )
    environment.filters["prose"] = prose
    environment.filters["unbroken"] = unbroken
    return environment
