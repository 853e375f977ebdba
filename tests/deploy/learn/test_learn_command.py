"""`runner.pyz learn`, and learnt classes in `run` and `serve`, also on Python 3.7."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import small_shop
from interpreters import executable
from serving import serving

from deploy import Model
from deploy import __main__ as command
from deploy.learn import command as learn_command
from deploy.learn.recognizer import LearnReport, Recognizer
from deploy.service.serve import _facts, unit

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle, and photos of seven in a folder, as arrays: Python 3.7 has no image decoder here."""
    (tmp_path / "shop.coralline").write_bytes(small_shop.packed())
    (tmp_path / "seven").mkdir()
    photos, others = small_shop.photos(7, 8)
    for number, photo in enumerate(photos):
        np.save(tmp_path / "seven" / f"{number}.npy", photo)
    np.save(tmp_path / "other.npy", others[0])
    return tmp_path / "shop.coralline"


def ran(path: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert command.main([str(arguments[0]), str(path), *map(str, arguments[1:]), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failed(path: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = command.main([str(arguments[0]), str(path), *map(str, arguments[1:])])
    assert code in (2, 3, 6)
    return capsys.readouterr().err


@pytest.mark.parametrize(("recognized", "code"), [(5, 0), (3, 0), (2, 3), (0, 3)])
def test_a_class_that_is_not_recognized_is_a_failure(
    path: Path, recognized: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = LearnReport("Seven up", 5, 5, recognized, [], None, 0)
    monkeypatch.setattr(Recognizer, "learn", lambda *arguments: report)
    assert command.main(["learn", str(path), str(path.parent / "seven"), "--name", "Seven up"]) == code
    captured = capsys.readouterr()
    assert f"now {recognized} of these 5 photos" in captured.out
    assert (f"only {recognized} of its 5 photos are recognized" in captured.err) is (code != 0)


@pytest.mark.parametrize("version", ["3.7", None])
def test_from_photos_to_an_answer(path: Path, tmp_path: Path, version: str | None) -> None:
    """Learn, run, list, export, undo, import: each in a separate process."""
    python = {} if version is None else {"python": executable(version)}

    def ok(*arguments: object) -> str:
        done = devices.runner(arguments[0], path, *arguments[1:], CORALLINE_ROOT=tmp_path / "nothing", **python)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    text = ok("learn", tmp_path / "seven", "--name", "Seven up")
    assert "learnt 'Seven up' from 8 photos, 8 in total" in text
    answer = json.loads(ok("run", tmp_path / "other.npy", "--json"))["answers"][0]
    assert answer["top"][0]["label"] == "Seven up"
    assert answer["unknown"] is False
    assert json.loads(ok("learn", "--list", "--json"))["classes"] == [{"name": "Seven up", "photos": 8}]
    ok("learn", "--export", tmp_path / "exported")
    assert "undone: learn of 8 photos of Seven up" in ok("learn", "--undo")
    assert "Seven up" not in ok("run", tmp_path / "other.npy")
    assert "added 8 photos of Seven up" in ok("learn", "--import", tmp_path / "exported")
    listed = ok("learn", "--list")
    assert listed.splitlines()[0] == "Seven up: 8 photos"
    assert [line.split()[1] for line in listed.splitlines()[2:]] == ["learn", "undo", "import"]


def test_run_says_what_it_uses(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = tmp_path / "other.npy"
    plain = ran(path, capsys, "run", sample)["answers"][0]
    assert "unknown" not in plain
    sure = ran(path, capsys, "run", sample, "--confidence")["answers"][0]
    assert "unknown" in sure
    ran(path, capsys, "learn", tmp_path / "seven", "--name", "seven")
    assert command.main(["run", str(path), str(sample)]) == 0
    streams = capsys.readouterr()
    assert "1 learnt class from" in streams.err
    assert "--no-learnt" in streams.err
    assert "seven" in streams.out
    assert ran(path, capsys, "run", sample, "--no-learnt")["answers"][0] == plain
    assert ran(path, capsys, "run", sample, "--no-learnt", "--confidence")["answers"][0] == sure
    path.with_suffix(".learnt").rename(tmp_path / "elsewhere")
    named = ran(path, capsys, "run", sample, "--learnt", tmp_path / "elsewhere")["answers"][0]
    assert named["top"][0]["label"] == "seven"


def test_an_unknown_answer_is_shown(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Model(str(path)) as model:
        arguments = command._arguments(["run", str(path), "--confidence"])
        learn_command.use(model, arguments, print)
        unknown = next(image for image in small_shop.photos(3, 100)[0] if model(image).is_unknown)
    np.save(tmp_path / "unknown.npy", unknown)
    assert command.main(["run", str(path), str(tmp_path / "unknown.npy"), "--confidence"]) == 0
    assert ": unknown; the best guesses: " in capsys.readouterr().out


def test_serve_answers_with_learnt_classes(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(path, capsys, "learn", tmp_path / "seven", "--name", "seven")
    with Model(str(path)) as model:
        arguments = command._arguments(["serve", str(path)])
        recognizer = learn_command.use(model, arguments, print)
        facts = _facts(model, recognizer)
        assert facts["labels"] == [*small_shop.NAMES, "seven"]
        with serving(model, facts) as service:
            status, _, answer = service.ask("POST", "/v1/predict", (tmp_path / "other.npy").read_bytes())
    assert (status, answer["top"][0]["label"], answer["unknown"]) == (200, "seven", False)


def test_the_unit_has_the_options(path: Path) -> None:
    arguments = ["serve", str(path), "--learnt", "a b", "--confidence", "--print-unit"]
    assert f'"{Path("a b").absolute()}" --confidence' in unit(command._arguments(arguments))


def test_mistakes_are_named(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (("learn",), "0 actions are selected"),
        (("learn", "--undo", "--list"), "2 actions are selected"),
        (("learn", "--name", "seven"), "no photos of 'seven'"),
        (("learn", "--undo", tmp_path / "seven"), "photos belong to --name"),
        (("learn", "--undo"), "no change to undo"),
        (("learn", "--export", "x"), "no learnt classes to export"),
        (("learn", "--import", tmp_path / "none"), "it does not exist"),
        (("learn", "--import", path), "damaged, or not a file with learnt classes"),
        (("learn", "--name", "Zero", tmp_path / "seven"), "is a class of the bundle already"),
        (("learn", "--name", "a", "-"), "cannot be read from stdin"),
        (("learn", "--name", "a", tmp_path / "seven", "--role", "original"), "the original model has no embedding"),
        (("run", "--learnt", "none"), "the file none does not exist"),
        (("run", "--learnt", "none", "--no-learnt"), "leave out one of them"),
    ]
    for arguments, message in cases:
        assert message in failed(path, capsys, *arguments), arguments
    assert not path.with_suffix(".learnt").exists()


def test_a_bundle_of_another_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.coralline"
    path.write_bytes(devices.packed(task="outputs", labels=[]))
    assert "the task of the bundle is outputs" in failed(path, capsys, "run", "--confidence")
