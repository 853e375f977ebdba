"""The report of every kind of run: complete, failed, hostile, with many classes, with one latency."""

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from run_records import (
    HOSTILE,
    RECORDS,
    Record,
    every_measurement,
    failed,
    full,
    hostile,
    html_of,
    m,
    markdown_of,
    regression,
    rendered,
)

from compress.core.measurement import Measurement
from compress.report.wording import show

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """A parsed page: the text, every tag, and the table cells with their small print."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: list[tuple[str, str, str]] = []  # class, number, small print
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        kind = dict(attrs).get("class") or ""
        if tag == "span" and kind.startswith("value ") and "td" in self.open:
            self.cells.append((kind.removeprefix("value "), "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.cells and self.open[-1] in ("span", "small"):
            kind, number, small = self.cells[-1]
            self.cells[-1] = (kind, number or data, small or data if self.open[-1] == "small" else small)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(params=RECORDS, scope="module")
def record(request: pytest.FixtureRequest) -> Record:
    return RECORDS[request.param]()


def test_the_same_record_gives_the_same_bytes(record: Record) -> None:
    untouched = copy.deepcopy(record)
    first = rendered(record)
    assert list(first) == ["report.html", "report.json", "report.md"]
    assert repr(record) == repr(untouched)
    assert rendered(untouched) == first


def test_json_is_the_record_and_strict() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(rendered(full())["report.json"]) == full()
    loaded = json.loads(rendered(hostile())["report.json"], parse_constant=refuse)
    assert loaded["name"] == f"{HOSTILE}digits"
    assert loaded["models"]["result"]["measurements"]["macs"]["value"] is None


def test_html_is_balanced_and_reaches_for_nothing(record: Record) -> None:
    html = html_of(record)
    page = Page(html)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "link", "form", "base"}
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(identities)) == len(identities)
    for tag, attributes in page.tags:
        assert set((attributes.get("aria-labelledby") or "").split()) <= {*identities}
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "action")]
        assert tag == "a" or "href" not in attributes
        href = attributes.get("href") or "model_explorer.json"
        assert href == "model_explorer.json" or href.removeprefix("#") in identities
    html = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"url\((?!#)|@import|<script", html)
    assert "https://" in json.dumps(record) or not re.search("https?://", html)
    assert "default-src 'none'" in html


def test_every_table_has_headers_and_no_empty_cell(record: Record) -> None:
    html = html_of(record)
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        assert 'scope="col"' in table
        for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", table, re.DOTALL):
            assert re.sub(r"<[^>]*>|\s", "", cell), table[:300]
    assert not re.search(r"<(dd|dt|p|pre|li|h1|h2|h3|figcaption|caption|strong)( [^>]*)?>\s*</\1>", html)


@pytest.mark.parametrize("kind", ["html", "markdown"])
def test_nothing_of_python_or_json_shows_through(record: Record, kind: str) -> None:
    text = Page(html_of(record)).text if kind == "html" else markdown_of(record)
    assert not re.search(r"\b(None|nan|NaN|inf|null|undefined|Undefined)\b", text)


@pytest.mark.parametrize("name", ["full", "failed", "crowded", "thirty", "single"])
def test_every_measurement_is_shown_with_its_origin(name: str) -> None:
    record = RECORDS[name]()
    page = Page(html_of(record))
    assert page.cells
    for kind, number, small in page.cells:
        assert kind in ("measured", "predicted", "missing")
        assert (number == "missing") == (kind == "missing")
        assert small
        assert kind == "missing" or small.split(" · ")[-1] == kind
    shown = {(number.removeprefix("drop "), small.replace("\xa0", " ")) for _, number, small in page.cells}
    for what, measurement in every_measurement(record):
        cell = show(Measurement(**measurement), what)
        assert (cell.text, cell.remark) in shown, what


def test_hostile_strings_stay_text() -> None:
    html, harmless = html_of(hostile()), Page(html_of(full()))
    page = Page(html)
    assert '<script>alert("1")</script>' in page.text
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in harmless.tags}
    assert not set("\x1b\u202e") & set(html)
    assert "\ufffd" in html


def test_long_names_are_cut_in_the_page() -> None:
    text = Page(html_of(full() | {"name": "n" * 5000})).text
    assert "n" * 99 + "…" in text
    assert "n" * 100 not in text


def test_a_failed_run_says_what_is_still_valid() -> None:
    text = Page(html_of(failed())).text
    assert "Failed in stage “prune”" in text
    assert "every channel of conv_1 is needed" in text
    assert "Still valid: the 1 stage that was completed (“load”)" in text
    assert "Exit code 5" in text
    assert text.count("The run failed in stage “prune” before this step.") >= 5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("crowded", "The budget is not kept"),
        ("crowded", "everything below is valid"),
        ("crowded", "compiler failed: internal error"),
        ("full", "Runs on (predicted)"),
        ("single", "Runs on (measured)"),
        ("single", "With fewer than 100 runs, p99 is the slowest run"),
    ],
)
def test_what_a_record_makes_the_page_say(name: str, sentence: str) -> None:
    assert sentence in Page(html_of(RECORDS[name]())).text


def test_next_steps_name_limits_gains_and_commands() -> None:
    record = full()
    record["outputs"]["digits.coralline"] = record["outputs"]["model.tflite"]
    record["outputs"].pop("model_edgetpu.tflite", None)
    for page in (Page(html_of(record)).text, markdown_of(record)):
        assert "Limits of the latency on usb3" in page
        assert "CONV_2D 3: 4 fewer save time" in page.replace("\\_", "_")
        assert "edgetpu_compiler -s model.tflite" in page
        assert "python -m compress deploy digits.coralline --to" in page


def test_a_limit_inside_the_interval_asks_for_a_measurement() -> None:
    record = full()
    measured = {"value": 1.9, "unit": "ms", "how": "predicted", "low": 1.47, "high": 2.45, "note": "usb3"}
    record["budget"] = [{"name": "latency_ms", "limit": 2.0, "unit": "ms", "measured": measured, "holds": True}]
    sentence = "the limit is within the interval 1.47 ms to 2.45 ms: measure on the device"
    assert sentence in Page(html_of(record)).text
    record["budget"][0]["limit"] = 2.5
    assert sentence not in Page(html_of(record)).text


def test_a_regression_has_rows_of_its_metrics() -> None:
    text, page = markdown_of(regression()), Page(html_of(regression())).text
    assert "| R² | **−1.300** measured | **−1.600** measured | **drop +0.300** measured |" in text  # noqa: RUF001
    assert "| Mean absolute error | **8.50** measured | **9.50** measured | **increase +0.100** measured |" in text
    assert "R² −1.300 → −1.600 (drop +0.300)" in text  # noqa: RUF001
    assert "R² −1.300 → −1.600 drop +0.300" in page  # noqa: RUF001
    assert "R², validation" in page
    assert "R² on validation against size." in page


def test_importing_is_light() -> None:
    code = "import sys, compress.report; print([m for m in ('jinja2', 'numpy', 'pydantic') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def detection() -> Record:
    """A run of a detector: objects are counted, and each class has a second metric."""
    record = full()
    record["metrics"] = [
        {"name": "ap", "label": "Average precision", "unit": "fraction", "change": "ap_drop", "limited": True},
        {"name": "ap50", "label": "At half", "unit": "fraction", "change": "ap50_drop", "limited": False},
    ]
    for row in record["comparison"]["per_class"]:
        row["ap50"] = {"original": 0.75, "result": 0.5}
    record["comparison"]["per_class"][3] |= {"samples": 1, "ap50": {"original": None, "result": None}}
    record["comparison"]["confusion"] = None
    return record


def test_classes_of_detectors_show_objects_and_both_precisions() -> None:
    record = detection()
    html, text = html_of(record), markdown_of(record)
    assert "Average precision of the class" in html
    assert "62 objects" in html
    assert "1 object<" in html
    assert "samples, " not in html.partition("Classes")[2].partition("<section")[0]
    assert "| Class | Original | Result | Change | At IoU 0.5 |" in text
    assert "0.750 → 0.500" in text
    assert "Accuracy of the class" in html_of(full())
    assert "62 samples" in html_of(full())
    assert "At IoU 0.5" not in html_of(full())


def test_both_metrics_of_a_detector_are_shown_for_devices() -> None:
    record = detection()
    device = {
        "device": "coral-1",
        "board": "Dev Board",
        "python": "3.9",
        "runtime": "tflite-runtime 2.5",
        "model": "compiled on edgetpu",
        "measurements": {"latency_ms": m(2.5, "ms"), "ap": m(0.31, "fraction"), "ap50": m(0.62, "fraction")},
        "golden": {"int8": "identical"},
        "doubts": [],
    }
    text = markdown_of(record | {"devices": [device]})
    section = text.partition("## On the device")[2].partition("## ")[0]
    assert "Average precision | At half |" in section
    assert "**0.620**" in section


def test_what_the_cpu_does_before_the_first_operator() -> None:
    record = full()
    assert "looks up the input" not in markdown_of(record)
    record["placement"] |= {"lookup_table": [16_385, 64]}
    assert "the CPU looks up the input in a table of 16,385 rows of 64 values" in markdown_of(record)
