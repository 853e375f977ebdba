"""Keys of artifacts: whatever changes an artifact changes its key."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import works
from PIL import Image

from compress.core.files import digest_of
from compress.core.settings import Settings
from compress.learning.context import Context, Need, Undeclared
from compress.pipeline.resolution import Resolution
from compress.pipeline.stage import NOTHING, Work
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.load import Build
from compress.pipeline.stages.origin import Origin
from compress.pipeline.stages.package import Package
from compress.pipeline.store import Store

CONCRETE = [kind for kind in works.KINDS if not kind.__name__.startswith("_")]
NEEDS = get_args(Need)
NOT_IN_THE_KEY = {"folder", "trust", "progress", "unfinished", "logs", "specification", "execution", "profile"}
"""Attributes of Context that are not in the key; its docstring has the reasons."""
LABELS = {"id"}
"""Settings that change no artifact."""
GROUPS: dict[type[Settings], dict[str, Any]] = {Origin: {"builder": "digits_cnn"}}
"""Settings of groups that are read while the key is computed."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two files and a folder of images, by name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "images").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "images" / "photo.png")
    for name in ("first", "second"):
        (folder / name).write_bytes(name.encode())
    return {path.name: path for path in folder.iterdir()}


def example(kind: type[Work], files: dict[str, Path]) -> Work:
    """Return a stage or probe with its default settings, where there are some."""
    required: dict[str, Any] = {
        "path": files["first"],
        "function": "build",
        "signature": "serving_default",
        "split": "test",
        "runs": 5,
        "threads": 1,
        "host": "usb3",
    }
    names = [name for name, field in kind.model_fields.items() if field.is_required()]
    return kind.model_validate({name: required[name] for name in names})


def others(annotation: Any, value: Any, other_file: Path) -> Iterator[Any]:
    """Yield other values of a setting: one for each type that it may have, and one for each setting of a group."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(value, Settings):
        for name, field in type(value).model_fields.items():
            for other in others(field.annotation, getattr(value, name), other_file):
                yield value.model_copy(update={name: other})
    elif origin in (Union, UnionType):
        for part in inner:
            yield from others(part, value, other_file)
    elif origin is Annotated:
        yield from others(inner[0], value, other_file)
    elif origin is Literal:
        yield from (choice for choice in inner if choice != value)
    elif origin is dict:
        yield {"key": next(others(inner[1], None, other_file))}
    elif origin in (tuple, list):
        yield origin([next(others(inner[0], None, other_file))])
    elif annotation is Path:
        yield other_file
    elif annotation is bool:
        yield not value
    elif annotation is Any or annotation in (int, float, str):
        yield 7 if annotation is Any else annotation(7)
    elif annotation is not NoneType:
        yield annotation.model_construct(**GROUPS.get(annotation, {}))  # a group that is not set by default


@pytest.mark.parametrize("kind", CONCRETE, ids=[kind.__name__ for kind in CONCRETE])
def test_every_setting_changes_the_key(kind: type[Work], files: dict[str, Path]) -> None:
    work = example(kind, files)
    key = digest_of(work.identity())
    other_file = files["images" if kind is Package else "second"]
    without_effect: list[tuple[str, Any]] = []
    for name in kind.model_fields.keys() - LABELS:
        values = [*others(kind.model_fields[name].annotation, getattr(work, name), other_file)]
        assert values or name == "precision", f"{name} has no other value"
        changed = {digest_of(work.model_copy(update={name: value}).identity()): value for value in values}
        without_effect += [(name, changed[digest]) for digest in changed if digest == key]
    assert without_effect == []


def test_a_file_elsewhere_has_the_same_key(files: dict[str, Path], tmp_path: Path) -> None:
    """The key has the content of every file of the settings, but neither its folder nor its name."""
    shutil.copyfile(files["second"], tmp_path / "copy")
    (tmp_path / "copies").mkdir()
    shutil.copyfile(files["images"] / "photo.png", tmp_path / "copies" / "copy.png")
    moved: set[str] = set()
    changed: list[str] = []
    for kind in CONCRETE:
        work = example(kind, files)
        file, copy = (files["images"], tmp_path / "copies") if kind is Package else (files["second"], tmp_path / "copy")
        for name, field in kind.model_fields.items():
            here = others(field.annotation, getattr(work, name), file)
            there = others(field.annotation, getattr(work, name), copy)
            for pair in zip(here, there, strict=True):
                if pair[0] == pair[1]:
                    continue
                moved.add(name)
                keys = {digest_of(work.model_copy(update={name: value}).identity()) for value in pair}
                if len(keys) > 1:
                    changed.append(f"{kind.__name__}.{name}")
    assert changed == []
    assert moved == {"path", "backbone", "weights", "plan", "scales_from", "teachers", "recognition"}


@pytest.mark.parametrize("kind", CONCRETE, ids=[kind.__name__ for kind in CONCRETE])
def test_every_need_is_in_the_key(kind: type[Work], files: dict[str, Path], tmp_path: Path) -> None:
    """The key depends on exactly what the context has."""
    work = example(kind, files)

    def key(**changes: str) -> str:
        value = {need: changes.get(need, "first") for need in NEEDS}
        target = SimpleNamespace(digest=value["target"], compiler_identity=lambda settings: {})
        head = SimpleNamespace(seed=value["seed"], name=value["name"])
        data = SimpleNamespace(digest=value["data"], task="classification")
        pipeline: Any = SimpleNamespace(data=data, target=target, head=head)
        session = Resolution(pipeline, Store(tmp_path))
        session.artifacts, session.original = {"model": replace(NOTHING, digest=value["original"])}, "model"
        return session.key(work, {"given": replace(NOTHING, digest=changes.get("input", "first"))})

    in_the_key = {name for name in (*NEEDS, "input") if key(**{name: "second"}) != key()}
    assert in_the_key == {*work.needs, "input"}


def test_the_context_has_only_what_is_declared() -> None:
    values: Any = {field.name: f"the {field.name}" for field in fields(Context)}
    context = Context(**values).only(frozenset({"data"}))
    assert context.data == values["data"]
    assert {name for name in values if getattr(context, name) is values[name]} == {"data", *NOT_IN_THE_KEY}
    assert {*NEEDS, *NOT_IN_THE_KEY} == values.keys()
    assert replace(context, seed=3).seed == 3


USES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda value: value.digest,
    "call": lambda value: value(),
    "item": lambda value: value[0],
    "iteration": list,
    "truth": bool,
    "equality": lambda value: value == 0,
    "hash": hash,
    "text": str,
    "format": lambda value: f"{value}",
    "int": int,
    "float": float,
    "index": range,
    "sum": lambda value: value + 1,
    "copy": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_is_not_declared_cannot_be_used(use: Callable[[Any], object]) -> None:
    with pytest.raises(AssertionError, match="the context's 'seed' is used, but is not in `needs`"):
        use(Undeclared("seed"))


def test_the_stage_of_a_student_is_in_the_key(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    distill = Distill.model_validate({"student": {"builder": "digits_cnn"}})
    other = Distill.model_validate({"student": {"builder": "mobilenet_v1"}})
    key = digest_of(distill.identity())
    assert digest_of(other.identity()) != key
    monkeypatch.setattr(Build, "version", Build.version + 1)
    assert digest_of(distill.identity()) != key


def test_files_that_a_builder_imports_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("build", "import compress, keras, blocks"),
        ("blocks", "from sizes import WIDTH"),
        ("sizes", "WIDTH=1"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "compress").mkdir()
    (tmp_path / "compress" / "__init__.py").write_text("")  # as in a clone, the folder has our packages too
    monkeypatch.syspath_prepend(tmp_path)
    stage = Build(path=tmp_path / "build.py", function="build")
    key = digest_of(stage.identity())
    (tmp_path / "other.py").write_text("")
    (tmp_path / "compress" / "__init__.py").write_text("changed = 1")
    assert digest_of(stage.identity()) == key
    (tmp_path / "sizes.py").write_text("WIDTH=2")
    assert digest_of(stage.identity()) != key
    monkeypatch.undo()
    assert stage.identity()["imports"] == []
