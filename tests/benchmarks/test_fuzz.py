"""The targets of `make fuzz`: undamaged files, some damaged ones, and every file of the corpus."""

from __future__ import annotations

from pathlib import Path

import fuzz_targets
import pytest
from fuzz_targets import CORPUS, Seed, Target

TARGETS = fuzz_targets.targets()
SLOW = {"tflite_run": 5, "yaml": 5, "import": 4}
COUNT = 20
OF_CORPUS = {"h5": "keras"}
"""Folders of the corpus whose target has another name."""


def outcome(folder: Path, target: Target, seed: Seed, content: bytes) -> str:
    """Return "answer", "refused", or "no words" for a refusal without a message. Any other error fails the test."""
    target.prepare(folder, seed)
    (folder / seed.name).parent.mkdir(parents=True, exist_ok=True)
    (folder / seed.name).write_bytes(content)
    try:
        target.read(folder, seed)
    except target.refusals as error:
        return "refused" if str(error) else "no words"
    return "answer"


NAMES = [pytest.param(name, marks=pytest.mark.tensorflow) if name == "import" else name for name in TARGETS]


@pytest.mark.parametrize("name", NAMES)
def test_sound_files_give_an_answer(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    for index, seed in enumerate(target.seeds()[: target.sound]):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert outcome(folder, target, seed, seed.content) == "answer"


@pytest.mark.night
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_give_an_answer_or_an_error_in_words(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    for number in range(SLOW.get(name, COUNT)):
        seed, content = fuzz_targets.damaged(target, 0, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert outcome(folder, target, seed, content) in ("answer", "refused")


def stored() -> list[Path]:
    return [path for path in sorted(CORPUS.glob("*/*")) if path.is_file()]


@pytest.mark.parametrize("path", stored(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_the_corpus(tmp_path: Path, path: Path) -> None:
    """Each file caused a crash or a hang, or reached code that no other file reached."""
    target = TARGETS[OF_CORPUS.get(path.parent.name, path.parent.name)]
    seed = next(candidate for candidate in target.seeds() if candidate.content == path.read_bytes())
    assert outcome(tmp_path, target, seed, seed.content) in ("answer", "refused")
