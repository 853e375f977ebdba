"""The colours of the pages: contrast as WCAG 2.2 asks for at level AA, in light and dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compress.report import charts

STYLE = (Path(charts.__file__).parent / "page.css").read_text(encoding="utf-8")
SCHEMES = {"light": 0, "dark": 1}
TEXT = 4.5
GRAPHICS = 3.0

Colour = tuple[float, float, float]


def variables(scheme: str) -> dict[str, Colour]:
    """The colours of a scheme by name."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    assert len(blocks) == len(SCHEMES)
    declarations = re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[SCHEMES[scheme]])
    return {name: (int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)) for name, code in declarations}


def luminance(colour: Colour) -> float:
    """The relative luminance, as WCAG defines it."""
    parts = [part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: Colour, two: Colour) -> float:
    lighter, darker = sorted((luminance(one), luminance(two)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def mixed(top: Colour, bottom: Colour, opacity: float) -> Colour:
    red, green, blue = (opacity * a + (1 - opacity) * b for a, b in zip(top, bottom, strict=True))
    return (red, green, blue)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_marks_are_visible(scheme: str) -> None:
    colours = variables(scheme)
    for text in ("ink", "soft-ink", "accent", "after", "good", "bad", "unsure"):
        for background in ("paper", "tint"):
            assert contrast(colours[text], colours[background]) >= TEXT, (text, background)
    for mark in ("before", "after", "tpu", "cpu", "unknown", "good", "bad", "soft-ink"):
        assert contrast(colours[mark], colours["paper"]) >= GRAPHICS, mark
    for shade in ("after", "bad"):  # counts on the darkest shade
        darkest = mixed(colours[shade], colours["paper"], charts.DARKEST)
        assert contrast(colours["ink"], darkest) >= TEXT, shade


def test_every_colour_of_the_style_is_a_variable() -> None:
    rules = re.sub(r":root \{.*?\}", "", STYLE, flags=re.DOTALL)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b", rules)
    used = set(re.findall(r"var\(--([\w-]+)\)", rules))
    assert used <= variables("light").keys() == variables("dark").keys()
