"""The recipes in models/*.yaml: they are valid, have a header and a page, and their data is prepared correctly."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import recipe_data
from paths import ROOT, SHARED
from PIL import Image

from compress.pipeline.schema import Pipeline, load

RECIPES = sorted(path.stem for path in (ROOT / "models").glob("*.yaml"))
PARTS = ("Recipe", "Data", "Split", "Result", "Page")
BENCHMARK = [sys.executable, str(ROOT / "benchmarks" / "recipes.py")]
shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there; CORALLINE_SHARED names it")


def header(recipe: str) -> str:
    text = (ROOT / "models" / f"{recipe}.yaml").read_text()
    return text[: text.index("schema_version:")]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a recipe with small data, which is prepared from the public format."""
    root = tmp_path_factory.mktemp("recipes")

    def write(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder / f"{name}.yaml"
        script, target, *options = recipe_data.PREPARED[name]
        source = root / f"public-{script}"
        if not source.exists():
            source.mkdir()
            recipe_data.WRITERS[script](source)
        folder.mkdir()
        recipe_data.models(folder / "model")
        done = recipe_data.prepare(script, source, folder / target, *options)
        assert done.returncode == 0, done.stderr
        return Path(shutil.copy(ROOT / "models" / f"{name}.yaml", folder))

    return write


def sizes(pipeline: Pipeline) -> dict[str, int]:
    return {split: len(pipeline.data.labels(split)) for split in ("train", "validation", "test")}


def test_every_recipe_has_data_for_its_tests() -> None:
    assert sorted(recipe_data.PREPARED) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_with_its_data(recipe: Callable[[str], Path], name: str) -> None:
    pipeline = load(recipe(name))
    assert pipeline.head.name == name
    stages = [step.stage.name for step in pipeline.steps if step.stage.name != "expose_embedding"]
    assert stages[-3:] == ["quantize", "compile", "package"]
    assert min(sizes(pipeline).values()) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_the_header_has_all_parts(name: str) -> None:
    text = header(name)
    for part in PARTS:
        assert re.search(rf"^# {part}: +\S", text, re.MULTILINE), part
    uses_file = re.search(r"file: model/|backbone: model/", (ROOT / "models" / f"{name}.yaml").read_text())
    assert bool(uses_file) == ("# Model:" in text)
    assert re.search(r"[\w-]+/[\w.-]+ *\([^)]*(MIT|Apache|CC BY)", text.replace("\n# ", " ")), "repository and licence"


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_exists_and_names_data_split_and_limits(name: str) -> None:
    (page,) = re.findall(r"^# Page: +(\S+)$", header(name), re.MULTILINE)
    text = (ROOT / page).read_text()
    assert page == f"docs/recipes/{name}.md"
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Data", "Commands", "Result", "Your own data", "Limits"]
    assert f"python -m compress {name}.yaml" in text
    assert "split" in text
    assert f"({name}.md)" in (ROOT / "docs" / "recipes" / "index.md").read_text()


def test_the_pages_show_the_results_of_the_benchmark() -> None:
    done = subprocess.run([*BENCHMARK, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(recipe_data.WRITERS))
def test_the_manifest_names_origin_licence_and_splits(name: str) -> None:
    manifest = tomllib.loads((ROOT / "calibration_data" / name / "manifest.toml").read_text())
    assert re.match(r"[\w-]+/[\w.-]+, (commit [0-9a-f]{7}|packages [\w-]+ \d)", manifest["origin"])
    assert re.search("MIT|Apache-2.0|CC BY", manifest["licence"])
    assert manifest["splits"]
    assert (ROOT / "calibration_data" / name / manifest["prepare"]).exists()


@pytest.mark.parametrize("name", sorted(recipe_data.WRITERS))
def test_another_folder_is_refused_with_what_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = recipe_data.prepare(name, tmp_path / "empty", tmp_path / "out.npz")
    assert done.returncode == 1
    assert re.search(r"empty.*; allowed: ", done.stderr)
    assert "Traceback" not in done.stderr


# --- splits -----------------------------------------------------------------------------


def test_no_chapter_is_in_two_splits(recipe: Callable[[str], Path]) -> None:
    with (recipe("text").parent / "data" / "verses.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    chapters = {(row["chapter"], row["split"]) for row in rows}
    assert len({chapter for chapter, _ in chapters}) == len(chapters) == 60
    of_law = [split for chapter, split in chapters if int(chapter) < 6000]
    assert {split: of_law.count(split) for split in set(of_law)} == {"train": 7, "validation": 1, "test": 2}
    assert {row["kind"] for row in rows} == {"law", "history", "wisdom", "prophets", "gospels", "letters"}


def test_the_last_strokes_of_each_digit_are_the_test(recipe: Callable[[str], Path]) -> None:
    with np.load(recipe("gestures").parent / "data" / "gestures.npz") as file:
        number = np.round(file["x"][:, 0, 0] * 100).astype(int)  # in the order of recording
        split, at_random = file["time_split"], file["random_split"]
    assert set(number[split == "test"]) == {8, 9}
    assert set(number[split == "validation"]) == {7}
    assert len(set(number[at_random == "test"])) > 2
    assert [np.sum(at_random == name) for name in ("train", "validation", "test")] == [70, 10, 20]


def speakers(pipeline: Pipeline, folder: Path, column: str) -> dict[str, set[str]]:
    lines = (folder / "labels.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    speakers_by_split: dict[str, set[str]] = {}
    for row in rows:
        speakers_by_split.setdefault(row[column], set()).add(row["speaker"])
    assert sizes(pipeline) == {split: sum(row[column] == split for row in rows) for split in speakers_by_split}
    return speakers_by_split


def test_the_test_speakers_are_in_no_other_split(recipe: Callable[[str], Path]) -> None:
    path = recipe("spoken_digits")
    speakers_by_split = speakers(load(path), path.parent / "data" / "spoken_digits", "speaker_split")
    assert speakers_by_split["test"] == {"theo", "yweweler"}
    assert not speakers_by_split["test"] & (speakers_by_split["train"] | speakers_by_split["validation"])


def test_the_official_split_of_spoken_digits_is_one_word_away(recipe: Callable[[str], Path], tmp_path: Path) -> None:
    path = recipe("spoken_digits")
    text = path.read_text().replace("split: speaker_split", "split: official_split")
    other = path.with_name("official.yaml")
    other.write_text(text)
    speakers_by_split = speakers(load(other), path.parent / "data" / "spoken_digits", "official_split")
    assert len(speakers_by_split["test"]) == len(speakers_by_split["train"]) == 6


@pytest.mark.parametrize("series", ["ambient", "machine"])
def test_training_windows_are_normal_and_share_no_value_with_the_test(tmp_path: Path, series: str) -> None:
    (tmp_path / "public").mkdir()
    recipe_data.temperature(tmp_path / "public")
    done = recipe_data.prepare("temperature", tmp_path / "public", tmp_path / "out.npz", "--series", series)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as file:
        arrays = {name: file[name] for name in file.files}
    hours = arrays["x"].shape[1]
    covered: dict[str, set[int]] = {}
    for split in ("train", "validation", "test"):
        chosen = (arrays["split"] == split) & (arrays["y"] == 0)
        covered[split] = {hour for end in arrays["hour"][chosen] for hour in range(end - hours + 1, end + 1)}
    assert not covered["train"] & covered["validation"]
    assert not (covered["train"] | covered["validation"]) & covered["test"]
    assert set(arrays["split"][arrays["y"] == 1]) == {"test"}
    assert sorted(set(arrays["anomaly"].tolist())) == [-1, 0, 1]


def test_alarms_are_counted() -> None:
    sys.path.insert(0, str(ROOT / "calibration_data" / "temperature"))
    try:
        import alarms
    finally:
        sys.path.pop(0)
    split = np.array(["train"] * 2 + ["test"] * 8)
    #                  train    false alarm of two windows, quiet, another, before and in an anomaly, missed anomaly
    error = np.array([1.0, 2.0, 3.0, 3.0, 0.0, 3.0, 0.0, 3.0, 3.0, 0.0])
    label = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    anomaly = np.array([-1, -1, -1, -1, -1, -1, -1, -1, 0, 1])
    hour = np.array([0, 1, 2, 3, 4, 40, 41, 80, 81, 82])
    arrays = {"split": split, "y": label, "anomaly": anomaly, "hour": hour}
    counts = alarms.count(error, arrays, 1.0)
    assert (counts["threshold"], counts["found"], counts["false_alarms"]) == (2.0, [True, False], 2)
    assert alarms.count(error, arrays, 2.0)["false_alarms"] == 0
    arrays["hour"] = np.arange(10)  # within a day, all of them are one alarm
    assert alarms.count(error, arrays, 1.0)["false_alarms"] == 1


def test_a_person_must_cover_half_a_percent(recipe: Callable[[str], Path]) -> None:
    folder = recipe("person").parent / "data" / "person"
    kinds = {path.parent.name + path.name[:-5] for path in folder.rglob("*.jpg")}
    assert kinds == {"personlarge", "no_personsmall", "no_personother", "no_personnone"}


def test_boxes_are_those_of_the_table(recipe: Callable[[str], Path]) -> None:
    content = json.loads((recipe("cards").parent / "data" / "cards" / "test.json").read_text())
    assert [category["name"] for category in content["categories"]] == ["ace", "king"]
    assert content["annotations"][0]["bbox"] == [2.0, 3.0, 10.0, 17.0]
    assert len(content["annotations"]) == 2 * len(content["images"]) == 8


def test_boxes_of_other_classes_are_left_out(recipe: Callable[[str], Path]) -> None:
    content = json.loads((recipe("custom_detector").parent / "data" / "road" / "train.json").read_text())
    assert len(content["images"]) == 16
    assert {annotation["category_id"] for annotation in content["annotations"]} == {1}
    assert sorted({annotation["bbox"][2] for annotation in content["annotations"]}) == [pytest.approx(1.2), 12.0]


def test_photos_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    recipe_data.groceries(tmp_path / "public")
    (tmp_path / "public" / "dataset" / "train.txt").write_text("../../secret.jpg, 0, 0\n")
    done = recipe_data.prepare("groceries", tmp_path / "public", tmp_path / "out")
    assert done.returncode == 1
    assert "leads out of the folder" in done.stderr


def test_photos_are_made_smaller(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    recipe_data.groceries(tmp_path / "public")
    done = recipe_data.prepare("groceries", tmp_path / "public", tmp_path / "out", "--side", "12")
    assert done.returncode == 0, done.stderr
    with Image.open(next((tmp_path / "out").rglob("*.jpg"))) as image:
        assert image.size == (12, 12)
    with (tmp_path / "out" / "labels.csv").open() as stream:
        products = {(row["product"], row["category"]) for row in csv.DictReader(stream) if row["split"] == "val"}
    assert products == {("Golden-Delicious", "Apple"), ("Pink-Lady", "Apple"), ("Milk", "Milk")}


# --- the real data ----------------------------------------------------------------------


@shared
def test_every_row_of_the_benchmark_is_accepted_with_the_real_data(tmp_path: Path) -> None:
    command = [*BENCHMARK, "--dry-run", "--work", str(tmp_path)]
    environment = {**os.environ, "CORALLINE_SHARED": str(SHARED)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*/*.yaml")} == set(RECIPES)


@shared
@pytest.mark.tensorflow
def test_gestures_are_learnt(tmp_path: Path) -> None:
    source = SHARED / "data" / "magic_wand_digits.npz"
    prepared = recipe_data.prepare("gestures", source, tmp_path / "data" / "gestures.npz")
    assert prepared.returncode == 0, prepared.stderr
    text = (ROOT / "models" / "gestures.yaml").read_text()
    (tmp_path / "gestures.yaml").write_text(text.replace("epochs: 40", "epochs: 12"))
    command = [sys.executable, "-m", "compress", "gestures.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["models"]["result"]["measurements"]["accuracy"]["value"] > 0.9
    assert abs(report["comparison"]["measurements"]["accuracy_drop"]["value"]) <= 0.015
