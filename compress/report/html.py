"""report.html: the sections of the report as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from compress.report.blocks import Section
from compress.report.verdict import Overview
from compress.report.wording import clean

if TYPE_CHECKING:
    import jinja2


def page(overview: Overview, sections: Sequence[Section]) -> str:
    """Return the page."""
    return _template().render(overview=overview, sections=sections)


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )
    return environment.get_template("report.html.j2")


def _cleaned(value: object) -> object:
    """Return a value for the page; strings, other than markup, without characters that a page cannot contain."""
    return clean(value) if type(value) is str else value
