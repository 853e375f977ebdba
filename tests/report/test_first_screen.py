"""The first screen of the report: verdict, headline of the target, next steps, contents; and the texts of charts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from run_records import RECORDS, Record, failed, full, html_of, m, markdown_of

from compress.report import sections, verdict
from compress.report.blocks import Block, Columns, Details, Figure
from compress.report.html import prose, unbroken
from compress.report.verdict import headline, key_figures
from compress.results.run import RunRecord


def record(**changes: Any) -> RunRecord:
    return RunRecord.from_json(full() | changes)


def placement(**changes: Any) -> Record:
    placement_record: Record = full()["placement"] | changes
    return placement_record


def on_tpu(count: int) -> list[Record]:
    return [{"index": i, "op": "CONV_2D", "placement": "tpu", "macs": 10} for i in range(count)]


MEASURED = {"host": "this machine's CPU, Xeon", "measurement": m(0.171, "ms")}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"placement": placement(ops=on_tpu(37))},
            "All 37 operators run on the Edge TPU (predicted). 1.90 ms for each inference, predicted on usb3 (1.47 ms "
            "to 2.45 ms). 88.0 KiB of parameters fit into the memory of the chip (predicted).",
        ),
        (
            {"placement": placement(compiled=True, streamed_bytes=2_000_000), "latency": None},
            "12 of 13 operators run on the Edge TPU with 0.996 of the MACs, 1 on the CPU (read from the compiled file)."
            " 88.0 KiB of parameters stay in the memory of the chip, and 1.9 MiB are sent at every inference "
            "(predicted).",
        ),
        (
            {"placement": placement(failure="the input has a dynamic shape", compiles=False), "latency": None},
            "The compiler rejects the model: the input has a dynamic shape.",
        ),
        (
            {"placement": None, "latency": full()["latency"] | MEASURED},
            "0.171 ms for each inference, measured on this machine's CPU, Xeon, 0.41× the latency of the original.",  # noqa: RUF001
        ),
        (
            {
                "placement": None,
                "latency": full()["latency"] | {"measurement": m(None, "ms", "missing", note="the model is refused")},
            },
            "The latency on usb3 is unknown: the model is refused.",
        ),
    ],
)
def test_headline(changes: Record, text: str) -> None:
    assert headline(record(**changes)) == text
    assert text in markdown_of(full() | changes)


def test_devices_are_in_the_headline() -> None:
    device = {
        "device": "coral-1", "board": "Dev Board", "python": "3.9", "runtime": "r", "model": "compiled", "golden": {},
        "measurements": {"latency_ms": m(2.5, "ms")}, "doubts": [],
    }  # fmt: skip
    assert headline(record(devices=[device])).endswith("2.50 ms measured on the device coral-1.")


def test_key_figures_have_the_change() -> None:
    quality, macs, size = key_figures(record())
    assert (quality.label, quality.value) == ("Accuracy", "0.992 → 0.990")
    assert quality.more == "drop +0.002 [−0.006, +0.006]"  # noqa: RUF001
    assert (macs.value, size.value) == ("2.36 M → 1.13 M", "400.4 KiB → 104.3 KiB")
    assert size.more == "0.26× of the original"  # noqa: RUF001
    assert key_figures(RunRecord.from_json(failed())) == ()


@pytest.mark.parametrize(
    ("changes", "commands"),
    [
        ({}, ["edgetpu_compiler -s model.tflite", "python -m compress deploy digits.coralline", verdict.COMPARE]),
        ({"placement": None}, ["python -m compress deploy digits.coralline", verdict.COMPARE]),
        ({"outputs": {"model.tflite": full()["outputs"]["model.tflite"]}, "placement": None}, [verdict.COMPARE]),
        (
            {"status": "not usable", "stages": [full()["stages"][1] | {"facts": {"layers": []}}]},
            ["python -m compress debug ."],
        ),
        ({"status": "failed"}, []),
        ({"status": "interrupted"}, []),
    ],
)
def test_next_steps(changes: Record, commands: list[str]) -> None:
    steps = verdict.steps(record(**changes))
    actual_commands = [step.command for step in steps if step.command]
    assert len(actual_commands) == len(commands)
    assert all(command.startswith(expected) for command, expected in zip(actual_commands, commands, strict=True))
    assert all(step.text.endswith(".") for step in steps)
    page = html_of(full() | changes)
    assert page.index("Next steps</h2>") < page.index("Contents</h2>") < page.index("<section")


def test_a_model_that_is_faster_on_the_cpu_is_advised_against() -> None:
    expected = {"summary": "USB 3", "latency_ms": 1.9, "low_ms": 1.5, "high_ms": 2.5, "cpu_alone_ms": 0.07}
    first = verdict.steps(record())[0].text
    assert "the CPU of usb3 alone is predicted to take 0.0700 ms, and the Edge TPU 1.90 ms" in first
    slower = placement(expected_latency={"usb3": expected | {"cpu_alone_ms": 9.0}})
    assert "Compile the model" in verdict.steps(record(placement=slower))[0].text


def test_a_model_that_the_compiler_rejects_is_not_compiled() -> None:
    steps = verdict.steps(record(placement=placement(failure="CONV_2D is too new", compiles=False)))
    assert [step.command for step in steps] == ["python -m compress check model.tflite", verdict.COMPARE]


IDENTITIES = [
    *("budget", "before-and-after", "outputs-compared", "quality-and-cost", "stages", "classes", "latency"),
    *("latency-limits", "where-operators-run", "data", "outputs", "environment-and-settings"),
    "settings-and-facts-of-the-stages",
]
"""The identifiers of the sections of a complete run. Links lead to them from outside: they do not change."""


def test_sections_keep_their_order_and_identifiers() -> None:
    assert [section.ident for section in sections(record(), {})] == IDENTITIES
    changed = record(metrics=[full()["metrics"][0] | {"label": "Something else"}])
    assert [section.ident for section in sections(changed, {})] == IDENTITIES
    assert [section.ident for section in sections(RunRecord.from_json(failed()), {})] == [
        ident for ident in IDENTITIES if ident not in ("outputs-compared", "latency-limits")
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_the_contents_are_the_sections(name: str) -> None:
    page = html_of(RECORDS[name]())
    links = re.findall(r'<li><a href="#([^"]*)">', page)
    assert links == re.findall(r'<section aria-labelledby="([^"]*)"', page)
    assert page.count("<nav ") == page.count("<main ") == page.count("<footer>") == page.count("<h1>") == 1
    assert '<html lang="en">' in page


def figures(blocks: Any) -> list[Figure]:
    figure_list: list[Figure] = []
    block: Block
    for block in blocks:
        if isinstance(block, Figure):
            figure_list.append(block)
        elif isinstance(block, Details):
            figure_list += figures(block.blocks)
        elif isinstance(block, Columns):
            figure_list += [figure for column in block.columns for figure in figures(column)]
    return figure_list


@pytest.mark.parametrize("name", RECORDS)
def test_every_chart_has_its_values_in_a_table(name: str) -> None:
    page = html_of(RECORDS[name]())
    for section in sections(RunRecord.from_json(RECORDS[name]()), {}):
        for figure in figures(section.blocks):
            assert (figure.data is None) != (figure.see == "")
            assert figure.data is None or figure.data.rows
            if figure.see:
                assert f"<summary>{figure.see}</summary>" in page


def test_text_in_backticks_is_code_and_everything_is_escaped() -> None:
    assert prose("run `a <b>` in 5 ms") == "run <code>a &lt;b&gt;</code> in 5\xa0ms"
    assert prose("`a` and ` b") == "`a` and ` b"
    assert prose("<i>") == "&lt;i&gt;"


def test_numbers_stay_with_their_units() -> None:
    texts = ("1.90_ms to 2.45_ms", "12,345_bytes", "718.90_M_MACs", "the Edge_TPU", "3 monkeys")
    for text in texts:
        assert unbroken(text.replace("_", " ")) == text.replace("_", "\xa0")


def test_the_file_for_model_explorer_is_linked_if_the_run_wrote_it() -> None:
    assert '<a href="model_explorer.json">' in html_of(full())
    without = full()
    del without["outputs"]["model_explorer.json"]
    assert "model_explorer.json" not in html_of(without)
