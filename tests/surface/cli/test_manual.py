"""The manual is generated from the code, and the JSON schema accepts the same files as the loader."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
from paths import ROOT
from pipeline_files import COMPLETE, KEYED, LINES, NO_NUMBERS, NUMBERS, SHIPPED, documented, stages

from compress.pipeline.stages import STAGES
from compress.pipeline.yaml_file import read
from compress.surface.cli import manual

SCHEMA = manual.schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture
def accepted(tmp_path: Path) -> Any:
    def accepted(text: str) -> bool:
        (tmp_path / "file.yaml").write_text(text)
        return VALIDATOR.is_valid(read(tmp_path / "file.yaml").value)

    return accepted


def test_the_committed_schema_is_the_one_that_the_code_gives() -> None:
    """After a change, run `python -m compress schema > docs/pipeline.schema.json`."""
    committed = ROOT / "docs" / "pipeline.schema.json"
    assert committed.read_text() == json.dumps(SCHEMA, indent=1) + "\n"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    (reference,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", (ROOT / "pipeline.yaml").read_text(), re.M)
    assert (ROOT / reference).samefile(committed)  # editors find it


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_accepted(path: Path) -> None:
    VALIDATOR.validate(read(path).value)


@pytest.mark.parametrize("block", [*documented()])
def test_every_documented_pipeline_is_accepted(accepted: Any, block: str) -> None:
    assert accepted(block)


@pytest.mark.parametrize(
    "text",
    [
        COMPLETE,
        COMPLETE.replace("    digits: {}", "    npz: {file: a.npz, classes: [a, b]}"),
        COMPLETE.replace("  source:\n    digits: {}", "  source: digits"),
        COMPLETE.replace("builder: digits_cnn", "file: m.keras"),
        stages("train", "quantize:", "package: {}"),
    ],
)
def test_what_the_loader_takes_is_accepted(accepted: Any, text: str) -> None:
    assert accepted(text)


@pytest.mark.parametrize(("line", "key"), KEYED, ids=[f"{line}-{key}" for line, key in KEYED])
def test_an_unknown_key_is_refused_everywhere(accepted: Any, line: int, key: str) -> None:
    text = LINES.copy()
    text[line - 1] = text[line - 1].replace(f"{key}:", f"{key}z:")
    assert not accepted("\n".join(text))


WHOLE = ("4.0", "4e0", "10.0")
"""Values that are integers to a JSON schema, but not to the loader."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [(key, value) for key, values in NUMBERS.items() for value in (*values, *NO_NUMBERS) if value not in WHOLE],
)
def test_a_number_of_a_wrong_type_or_range_is_refused(accepted: Any, setting: str, value: str) -> None:
    assert not accepted(COMPLETE.replace(setting, f"{setting.partition(':')[0]}: {value}"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: digits", "name: ../digits"),
        ("target: edgetpu", "target: gpu"),
        ("method: ptq", "method: qta"),
        ("builder: digits_cnn", "builder: digits_cnn\n  file: m.h5"),
        ("  builder: digits_cnn", "  trust: true"),
        ("    digits: {}", "    digits: {}\n    npz: {file: x}"),
        ("    digits: {}", "    npz: {}"),
        ("  source:\n    digits: {}", "  source: npz"),
        ("        size: [32, 32]\n", ""),
        ("  - distill: {}", "  - distil"),
        ("  - distill: {}", "  - 3"),
        ("filter: bilinear", "filter: 3"),
    ],
)
def test_what_the_loader_refuses_is_refused(accepted: Any, old: str, new: str) -> None:
    assert old in COMPLETE
    assert not accepted(COMPLETE.replace(old, new))


def properties(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every setting in a schema, with its dotted name."""
    if isinstance(schema, list):
        for item in schema:
            yield from properties(item, name)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties":
                for setting, inner in value.items():
                    yield f"{name}.{setting}", inner
                    yield from properties(inner, f"{name}.{setting}")
            else:
                yield from properties(value, f"{name}.{key}" if name.endswith("$defs") else name)


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_of_every_stage_is_explained(stage: str) -> None:
    settings = [*properties(STAGES[stage].model_json_schema())]
    assert {name.split(".")[-1] for name, _ in settings} >= STAGES[stage].model_fields.keys()
    for name, setting in settings:
        assert len(setting.get("description", "")) > 10, name


def test_every_key_of_a_pipeline_is_explained() -> None:
    plain = copy.deepcopy(SCHEMA)
    del plain["properties"]["data"], plain["properties"]["stages"], plain["properties"]["model"]["oneOf"]
    for name, setting in properties(plain):
        assert setting.get("description") or name == ".model", name
    for kind in SCHEMA["properties"]["data"]["properties"]["source"]["anyOf"][1]["properties"].values():
        explained = kind["anyOf"][0] if "anyOf" in kind else kind
        assert all(setting["description"] for setting in explained.get("properties", {}).values())


GROUPS = {
    "augment": r"augment\.shift += 0 +Largest shift",
    "qat": r"qat\.ranges += averaged +Activation ranges",
    "widths": r"widths += \[0\.25, 0\.5, 0\.75\] +Shares of the channels",
    "recognition": r"recognition\.references += 5 +Number of training samples",
}
"""The line of settings that are groups or lists."""


@pytest.mark.parametrize("stage", STAGES)
def test_the_text_names_every_setting_with_its_default_and_meaning(stage: str) -> None:
    (section,) = [part for part in manual.stages().split("\n\n") if part.startswith(f"{stage}\n")]
    purpose = " ".join((STAGES[stage].__doc__ or "").split())
    assert purpose in section
    assert f"makes a {STAGES[stage].produces}" in section
    for name, field in STAGES[stage].model_fields.items():
        if name in GROUPS:
            assert re.search(rf"^ +{GROUPS[name]}", section, re.M)
            continue
        default = {"None": "null", "False": "false", "True": "true", "()": "[]"}.get(str(field.default), field.default)
        line = re.search(rf"^ +{name} += (\S+) +(.+)$", section, re.M)
        assert line is not None, name
        assert line[1] == (f"{default:g}" if isinstance(default, float) else str(default))
        assert line[2] == " ".join((field.description or "").split())


def test_the_stages_as_plain_values() -> None:
    rows = json.loads(json.dumps(manual.stages_json()))
    assert [row["name"] for row in rows] == [*STAGES]
    for row in rows:
        assert row.keys() == {"name", "summary", "consumes", "produces", "settings"}
        assert row["settings"].keys() == STAGES[row["name"]].model_fields.keys()
    assert rows[0]["settings"]["epochs"]["default"] == 30


def printed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "compress", "manual", *arguments]
    return subprocess.run(command, env=tiny.environment(), check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("reference/sources", "# Data sources\n"),
        ("docs/operators.md", "# Operators on the Edge TPU\n"),
        ("reference/stages", "# Stages\n"),
        ("training", (ROOT / "docs" / "training.md").read_text()),
    ],
)
def test_pages_are_printed(page: str, text: str) -> None:
    assert printed(page).stdout.startswith(text)


def test_an_unknown_page_is_refused() -> None:
    done = printed("../README")
    assert done.returncode == 2
    assert "'../README' is not a page of the manuals; allowed: api, " in done.stderr
