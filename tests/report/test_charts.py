"""Charts, alone and in the page: well-formed for all data, and correct; and the wording of values."""

import math
import re
from xml.etree import ElementTree

import pytest
from run_records import RECORDS, Record, crowded, every_measurement, full, hostile, html_of, markdown_of

from compress.core.measurement import Measurement
from compress.report import charts, markdown, wording
from compress.report import svg as draw
from compress.report.charts import LatencyCurve, Point
from compress.report.svg import Box, placed_labels
from compress.report.verdict import verdict
from compress.results.evaluation import ClassRecord
from compress.results.placement import OperatorPlacement
from compress.results.run import RunRecord

NAMES = ["plain", "", "x" * 300, "<script>&\"'", "line\nbreak", "\x00\x1b\u202e\ud800\uffff", "日本語" * 30, "1"]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    """Check that a drawing is well-formed, has a title, and stays within its frame; return its root."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = (float(x) for x in root.attrib["viewBox"].split())
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert not re.search(r"\b(nan|inf|None)\b", svg)
    for element in root.iter():
        for name in ("x", "cx", "x1", "x2"):
            assert -0.01 <= float(element.get(name, 0)) <= width + 0.01, ElementTree.tostring(element)
        for name in ("y", "cy", "y1", "y2"):
            assert -0.01 <= float(element.get(name, 0)) <= height + 0.01, ElementTree.tostring(element)
    return root


def operator(name: str, on_tpu: bool, macs: int) -> OperatorPlacement:
    return OperatorPlacement(0, name, "tpu" if on_tpu else "cpu", macs)


def changed(
    name: str, samples: int, before: float, after: float, low: float | None = None, high: float | None = None
) -> ClassRecord:
    result = Measurement(after, "fraction", "measured", low, high)
    return ClassRecord(name, samples, Measurement(before, "fraction", "measured"), result)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def circles(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    elements = [c for c in root.iter(f"{SVG}circle") if kind in c.attrib["class"].split()]
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in elements]


def test_trade_off_places_points_by_their_values() -> None:
    points = [
        Point("train", 400_000, 0.98, 0.96, 0.99),
        Point("prune", 200_000, 0.96, 0.94, 0.97),
        Point("q", 50_000, 0.97, measured=False),
    ]
    root = parsed(charts.trade_off(points, quality="Accuracy", cost="size", unit="bytes"))
    (x1, y1), (x2, y2), (x3, y3) = circles(root, "dot")
    assert x1 > x2 > x3
    assert y1 < y3 < y2
    assert circles(root, "unsure") == [(x3, y3)]
    assert {"train", "prune", "q", "100 KiB", "200 KiB"} <= set(texts(root))  # ticks are round in binary units
    assert len([p for p in root.iter(f"{SVG}path") if p.attrib["class"] == "whisker"]) == 2


def test_trade_off_draws_the_same_point_once_and_moves_none() -> None:
    points = [Point("a", 100, 0.9), Point("b", 100, 0.95), Point("c", 100, 0.95), Point("d", 100, 0.93)]
    root = parsed(charts.trade_off(points, quality="Accuracy", cost="MACs", unit="MACs"))
    places = circles(root, "dot")
    assert len(places) == 3
    assert len({x for x, _ in places}) == 1
    heights = [y for _, y in places]
    assert (heights[0] - heights[2]) / (heights[0] - heights[1]) == pytest.approx(0.03 / 0.05, abs=0.01)
    assert "b, c" in texts(root)


def test_points_at_the_edge_of_the_plot_stay_there() -> None:
    root = parsed(charts.trade_off([Point("a", 0, 0.5), Point("b", 1e6, 0.6)], quality="Q", cost="MACs", unit="MACs"))
    assert circles(root, "dot")[0][0] == charts.LEFT


def test_intervals_on_one_line_have_ends_of_different_widths() -> None:
    points = [Point("a", 100, 0.9, 0.8, 0.95), Point("b", 100, 0.91, 0.82, 0.96), Point("c", 50, 0.7, 0.6, 0.8)]
    root = parsed(charts.trade_off(points, quality="Accuracy", cost="MACs", unit="MACs"))
    whiskers = [p.attrib["d"] for p in root.iter(f"{SVG}path") if p.attrib["class"] == "whisker"]
    ends = [re.match(r"M([\d.]+) [\d.]+H([\d.]+)", path) for path in whiskers]
    widths = [float(end[2]) - float(end[1]) for end in ends if end]
    assert widths == [8, 14, 8]
    assert any("same line" in note for note in charts.trade_off_notes(points))
    assert not any("same line" in note for note in charts.trade_off_notes(points[1:]))


def test_a_label_without_space_has_a_line_to_its_point() -> None:
    points = [Point(f"a long name {i}", 1000 + i, 0.9 + 0.0004 * i) for i in range(9)]
    root = parsed(charts.trade_off(points, quality="Accuracy", cost="MACs", unit="MACs"))
    leaders = [line for line in root.iter(f"{SVG}line") if line.get("class") == "leader"]
    assert leaders
    starts = {(line.attrib["x1"], line.attrib["y1"]) for line in leaders}
    assert starts <= {(draw.n(x), draw.n(y)) for x, y in circles(root, "dot")}


@pytest.mark.parametrize(
    ("points", "notes"),
    [
        ([Point("a", 10, 0.0), Point("b", 20, 1.0)], []),
        ([Point("a", 10, 0.9), Point("b", 20, 0.95)], ["The vertical axis begins at 0.894, not at 0."]),
        ([Point("a", 10, 0.0), Point("b", 200, 1.0)], ["The horizontal axis is logarithmic."]),
    ],
)
def test_the_axes_of_a_trade_off_are_explained(points: list[Point], notes: list[str]) -> None:
    assert charts.trade_off_notes(points) == notes
    svg = charts.trade_off(points, quality="Accuracy", cost="size", unit="bytes")
    assert ("logarithmic" in svg) == any("logarithmic" in note for note in notes)
    assert ('class="cut"' in svg) == any("begins" in note for note in notes)


def test_runs_that_are_not_drawn_are_counted() -> None:
    curves = [LatencyCurve("Original", "original", [1.0] * 199 + [500.0], [])]
    assert "1" in texts(parsed(charts.latency_curves(curves)))  # the outlier does not flatten the curve
    assert charts.latency_notes(curves) == [
        "The axis ends at 1.10 ms: 1 slower run of the original, up to 500 ms, is not drawn."
    ]
    assert charts.latency_notes([LatencyCurve("Result", "result", [1.0, 1.1], [])]) == []


def test_the_axis_of_classes_has_every_value() -> None:
    rows = [changed("a", 60, 0.9, 0.8, 0.34, 0.97)]
    assert charts.class_notes(rows) == ["The axis begins at 0.2, not at 0."]
    root = parsed(charts.class_changes(rows))
    (reach,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "reach"]
    ticks = {t.text: float(t.attrib["x"]) for t in root.iter(f"{SVG}text") if t.get("class") == "tick" and t.text}
    assert ticks["0.2"] < float(reach.attrib["x1"]) < ticks["0.4"]


def test_trade_off_shows_a_negative_quality() -> None:
    root = parsed(
        charts.trade_off([Point("a", 100, -2.5), Point("b", 50, 0.5)], quality="R²", cost="size", unit="bytes")
    )
    (_, low), (_, high) = circles(root, "dot")
    assert high < low < 284
    assert "-2" in texts(root)


@pytest.mark.parametrize("costs", [(0, 0), (1, 1_000_000), (3e9, 1e9), (1023, 1025), (0.001, 0.002)])
@pytest.mark.parametrize("unit", ["bytes", "MACs"])
def test_trade_off_takes_any_range(costs: tuple[float, float], unit: str) -> None:
    for qualities in ((0, 0), (1, 1), (0.5, 0.5000001), (0, 1)):
        points = [Point("a", costs[0], qualities[0]), Point("b", costs[1], qualities[1])]
        root = parsed(charts.trade_off(points, quality="R²", cost="cost", unit=unit))
        ticks = [element for element in root.iter(f"{SVG}text") if element.get("class") == "tick"]
        assert 4 <= len(ticks) <= 30


def test_labels_of_neighbours_do_not_cover_each_other() -> None:
    points = [Point(f"stage {i}", 1000 - 90 * i, 0.9 + 0.002 * (i % 3)) for i in range(8)]
    root = parsed(charts.trade_off(points, quality="Accuracy", cost="MACs", unit="MACs"))
    labels = [e for e in root.iter(f"{SVG}text") if e.get("class") == "label"]
    boxes = []
    for element in labels:
        wide, x = draw.wide(element.text or ""), float(element.attrib["x"])
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[element.attrib["text-anchor"]]
        boxes.append(Box(left, float(element.attrib["y"]) - 10, left + wide, float(element.attrib["y"])))
    assert not [1 for i, one in enumerate(boxes) for two in boxes[:i] if one.overlap(two) > 20]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_fits(name: str) -> None:
    drawings = [
        charts.trade_off([Point(name, 1, 0.5), Point(name, 2, 0.6)], quality="Accuracy", cost="size", unit="bytes"),
        charts.class_changes([changed(name, 3, 0.5, 0.6)]),
        charts.confusion_matrix([name, name], [[1, 2], [3, 4]]),
        charts.latency_curves([LatencyCurve(name, "original", [1.0, 2.0], [("median", 0.5, 1.5)])]),
        charts.operator_strip([operator(name, True, 3), operator(name, False, 0)]),
    ]
    for drawing in drawings:
        root = parsed(drawing)
        assert not list(root.iter(f"{SVG}script"))
        assert max(map(len, texts(root))) <= 80


def test_class_changes_say_loss_and_gain_without_colour() -> None:
    rows = [changed("a", 60, 0.9, 0.8, 0.7, 0.9), changed("b", 60, 0.9, 0.95), changed("c", 60, 0.9, 0.9)]
    root = parsed(charts.class_changes(rows))
    assert {"▼ −0.100", "▲ +0.050", "= 0"} <= set(texts(root))  # noqa: RUF001
    (ring, _), (dot, _) = circles(root, "ring")[0], circles(root, "result")[0]
    assert ring > dot


def test_class_changes_at_the_ends_of_the_scale() -> None:
    for before, after in ((0, 0), (1, 1), (0, 1), (1, 0)):
        parsed(charts.class_changes([changed("a", 0, before, after, 0.0, 1.0)]))


@pytest.mark.parametrize("count", [1, 2, 12, 13, 30])
def test_confusion_matrix_has_every_count(count: int) -> None:
    counts = [[i * count + j for j in range(count)] for i in range(count)]
    root = parsed(charts.confusion_matrix([f"class {i}" for i in range(count)], counts))
    shown = texts(root)
    assert "·" in shown
    assert all(str(n) in shown for row in counts for n in row if n)
    assert len([r for r in root.iter(f"{SVG}rect") if r.get("class") == "hit"]) == count


def test_confusion_matrix_of_nothing_and_of_very_many() -> None:
    root = parsed(charts.confusion_matrix(["a"], [[0]]))
    assert "No confusions" in (root[1].text or "")
    assert "123k" in texts(parsed(charts.confusion_matrix(["a"], [[123_456]])))


@pytest.mark.parametrize("values", [[0.0], [1.0], [1.0] * 300, [0.1, 1000.0], [float(i) for i in range(5000)]])
def test_latency_curves_take_any_number_of_runs(values: list[float]) -> None:
    original = LatencyCurve("Original", "original", values, [("median", 0.5, values[0])])
    for curves in ([original], [original, LatencyCurve("Result", "result", [0.5], [])]):
        svg = charts.latency_curves(curves)
        parsed(svg)
        assert len(svg) < 30_000


def test_latency_curves_are_told_apart_without_colour() -> None:
    marks = [("median", 0.5, 1.5), ("p99", 0.99, 2.0)]
    svg = charts.latency_curves(
        [LatencyCurve("Original", "original", [1.0, 2.0], marks), LatencyCurve("Result", "result", [0.5, 0.7], marks)]
    )
    root = parsed(svg)
    assert {"Original", "Result"} <= set(texts(root))
    assert len(circles(root, "original")) == 2
    assert "Original: median 1.50 ms, p99 2.00 ms" in (root[1].text or "")


@pytest.mark.parametrize(("count", "macs"), [(1, 7), (65, 0), (65, 7), (400, 7)])
def test_operator_strip_fills_its_width(count: int, macs: int) -> None:
    operators = [operator("CONV_2D", i % 7 != 6, macs) for i in range(count)]
    root = parsed(charts.operator_strip(operators))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("height") == "36"]
    rows = {bar.attrib["y"] for bar in bars}
    assert len(rows) == (2 if macs else 1)
    for row in rows:
        wide = sum(float(bar.attrib["width"]) for bar in bars if bar.attrib["y"] == row)
        assert wide == pytest.approx(charts.WIDTH, rel=0.15)
    hatched = [bar for bar in bars if bar.get("fill") == "url(#hatch)"]
    assert bool(hatched) == (count > 6)


@pytest.mark.parametrize("name", RECORDS)
def test_every_drawing_in_a_page_is_well_formed(name: str) -> None:
    record = RECORDS[name]()
    drawings = re.findall(r"<svg.*?</svg>", html_of(record), re.DOTALL)
    titles = [parsed(drawing)[0].text or "" for drawing in drawings]
    assert len(drawings) == {"bare": 0, "failed": 2, "crowded": 5}.get(name, 6)
    assert all(titles)
    assert len(set(titles)) == len(titles)


def test_many_classes_are_drawn_worst_first() -> None:
    record = crowded()
    html = html_of(record)
    drawing = re.search(r'<svg[^>]*aria-labelledby="classes-title.*?</svg>', html, re.DOTALL)
    assert drawing
    drawn = [float(x.replace("\N{MINUS SIGN}", "-")) for x in re.findall(r"[▼▲] (\S+)</text>", drawing[0])]
    assert drawing[0].count("<g>") == 40
    assert drawn == sorted(drawn)
    assert "The 40 worst of 81 classes are drawn" in html
    assert all(row["name"] in html for row in record["comparison"]["per_class"])
    assert "confusion-title" not in html
    assert "Most frequent confusions" in html
    assert ">12 grocery" in drawing[0]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.98412, "fraction", "0.984"),
        (0.99996, "fraction", "0.99996"),
        (0.00004, "fraction", "0.00004"),
        (1.0, "fraction", "1.000"),
        (0, "fraction", "0.000"),
        (106_824, "bytes", "104.3 KiB"),
        (12, "bytes", "12 bytes"),
        (0.2605, "ratio", "0.26×"),  # noqa: RUF001
        (12.345, "ratio", "12.3×"),  # noqa: RUF001
        (1, "ratio", "1.0×"),  # noqa: RUF001
        (6_600_000, "bytes", "6.3 MiB"),
        (1_132_800, "MACs", "1.13 M"),
        (61_706, "parameters", "61,706"),
        (0.25167, "ms", "0.252 ms"),
        (1234.5, "ms", "1,234 ms"),
        (3, "operators", "3 operators"),
    ],
)
def test_numbers(value: float, unit: str, text: str) -> None:
    assert wording.number(value, unit) == text


def test_one_sided_intervals_and_origins() -> None:
    show = wording.show
    assert show(Measurement(0.5, "fraction", "measured", low=0.4)).small == "≥ 0.400 · measured"
    assert show(Measurement(0.5, "fraction", "predicted", high=0.6)).small == "≤ 0.600 · predicted"
    assert show(None, absent="not asked for").remark == "not asked for"
    assert show(Measurement(None, "ms", "missing", note="no device")).remark == "no device"
    assert show(Measurement(math.nan, "ms", "measured")).remark == "no finite value was recorded"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "not timed"), (0.44, "0.4 s"), (125, "2 min 05 s"), (7300, "2 h 01 min")]
)
def test_durations(value: float | None, text: str) -> None:
    assert wording.seconds(value) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not compiled", "Not compiled."),
        ("Why?", "Why?"),
        ("", "."),
        ("edgetpu_compiler is missing", "edgetpu_compiler is missing."),
        ("model.tflite is small", "model.tflite is small."),
    ],
)
def test_sentences(text: str, sentence: str) -> None:
    assert wording.sentence(text) == sentence


RUN = {"comparison": None, "models": None}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {},
            "Usable with warnings. "
            "0.26× the size, 0.48× the MACs, "  # noqa: RUF001
            "latency 1.90 ms on usb3 (predicted, 1.47 ms to 2.45 ms), accuracy 0.992 → 0.990 "
            "(drop +0.002 [−0.006, +0.006]); fits the budget.",  # noqa: RUF001
        ),
        (RUN | {"budget": [], "verdict": None}, "No result was measured; no budget was set."),
        (RUN | {"status": "failed"}, "Failed after 43.1 s; no result was measured."),
        (
            RUN | {"status": "interrupted", "error": {"stage": "prune", "message": "", "exit_code": 130}},
            "Interrupted in stage “prune” after 43.1 s; no result was measured.",
        ),
    ],
)
def test_verdict(change: Record, sentence: str) -> None:
    assert verdict(RunRecord.from_json(full() | change)) == sentence


def test_verdict_names_what_breaks_the_budget() -> None:
    record = full()
    record["budget"][2]["holds"] = None
    assert verdict(RunRecord.from_json(record)).endswith("; budget undecided for “Latency on usb3”.")
    record["budget"][1]["holds"] = False
    assert verdict(RunRecord.from_json(record)).endswith("; over budget in “Size”.")


@pytest.mark.parametrize(
    "text",
    ["", "`", "``", "a`b``c", "|", "_x_", "www.x.org", "a@b.c", "GH-12", "<b>", "*", "\\|", "[x](y)", ":x:", "~~x~~"],
)
def test_quoted_text_is_a_code_span_or_harmless(text: str) -> None:
    quoted = markdown.quote(text)
    if not text:
        assert quoted == "(empty)"
        return
    fence = re.match("`+", quoted)
    assert fence, quoted
    inside = quoted.removeprefix(fence[0]).removesuffix(fence[0])
    assert fence[0] not in re.findall("`+", inside)
    assert not re.search(r"(?<!\\)\|", inside)


@pytest.mark.parametrize("name", ["full", "failed", "crowded", "thirty", "single"])
def test_markdown_has_the_numbers_of_the_models_with_their_origin(name: str) -> None:
    record = RECORDS[name]()
    text = markdown_of(record)
    for what, measurement in every_measurement(record | {"comparison": None}):
        cell = wording.show(Measurement(**measurement), what)
        assert (f"missing: {cell.note}" if cell.style == "missing" else f"**{cell.text}** {cell.small}") in text


def test_markdown_keeps_hostile_strings_in_code_spans() -> None:
    text = markdown_of(hostile())
    outside = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    for nasty in ("WWW", "<script", "<img", "@everyone", "#12", "https:", "*_"):
        assert nasty in text
        assert nasty not in outside


@pytest.mark.parametrize("name", RECORDS)
def test_markdown_tables_are_even(name: str) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", markdown_of(RECORDS[name]()), re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_outlines_of_huge_values_are_cut_short() -> None:
    deep: Record = {"x": 1}
    for _ in range(40):
        deep = {"deeper": deep}
    wide = {f"key{i}": {"value": [i, None, True, "a: b"]} for i in range(5_000)}
    lines = wording.outline({"deep": deep, "long": list(range(10_000)), "wide": wide}).splitlines()
    assert len(lines) == wording.MAX_OUTLINE_LINES + 1
    assert lines[-1] == "… the rest is in report.json"
    assert lines[13].strip() == "… deeper values are in report.json"
    assert lines[14].endswith("23, … 9976 more]")
    assert lines[16:18] == ["  key0:", '    value: [0, not set, true, "a: b"]']


def test_outline_of_lists_and_empty_values() -> None:
    steps = [{"resize": {"size": [32, 32]}}, {"flip": {}}, [[1, 2], []]]
    assert wording.outline(steps) == "- resize:\n    size: [32, 32]\n- flip: {}\n- - [1, 2]\n  - []"
    assert wording.outline({}) == wording.outline([]) == ""
    assert wording.outline([{}, None]) == "- {}\n- not set"


def test_the_title_of_a_small_confusion_matrix_is_not_cut_off() -> None:
    svg = charts.confusion_matrix(["a", "b"], [[3, 1], [0, 2]])
    view_box = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    start = re.search(r'<text x="([\d.]+)"[^>]*>predicted class', svg)
    assert view_box is not None
    assert start is not None
    assert float(start[1]) + draw.wide("predicted class →") <= float(view_box[1])


def test_long_words_of_a_label_are_broken_after_an_underscore() -> None:
    text = "".join(placed_labels(["search_architecture"], [(300.0, 200.0)], []))
    assert ">search_<" in text
    assert ">architecture<" in text
    assert ">quantize_again<" in "".join(placed_labels(["quantize_again"], [(300.0, 200.0)], []))
