"""The command `learn`, and the use of learnt classes by `run` and `serve`."""

from __future__ import annotations

import argparse
import os
from typing import Any, Callable, Dict, List, Optional, Tuple

from deploy.contract.durable_files import write_atomically
from deploy.contract.errors import ArgumentError, ImageError
from deploy.learn import learnt_file
from deploy.learn.recognizer import Recognizer
from deploy.runner import samples
from deploy.runner.model import Model

Result = Dict[str, Any]
ACTIONS = ("name", "undo", "list", "export", "import_file")


def use(model: Model, arguments: argparse.Namespace, progress: Callable[[str], None]) -> Optional[Recognizer]:
    """Let a model answer with learnt classes, if there are any, and with calibrated confidences.

    Returns:
        The recognizer; None: the model answers without changes.

    Raises:
        ArgumentError: the options contradict each other, or the model is not a classifier.
        LearntFileError, OSError: see `Recognizer`.
    """
    if arguments.learnt is not None and arguments.no_learnt:
        raise ArgumentError("--learnt names a file, and --no-learnt ignores it", "leave out one of them")
    path = arguments.learnt or learnt_file.beside(arguments.bundle)
    exists = os.path.exists(path)
    if arguments.learnt is not None and not exists:
        raise ArgumentError("the file %s does not exist" % path, "learn a class first, or leave out --learnt")
    uses_file = exists and not arguments.no_learnt
    if not uses_file and not arguments.confidence:
        return None
    recognizer = Recognizer(model, path if uses_file else "")
    if uses_file:
        count = len(recognizer.learnt)
        what = "%d learnt class%s from %s; --no-learnt ignores the file"
        progress(what % (count, "" if count == 1 else "es", path))
    return recognizer


def run(model: Model, arguments: argparse.Namespace) -> Tuple[Result, str]:
    """Run the command; return the result for JSON and as text.

    Raises:
        ArgumentError: not exactly one action is selected, or see `Recognizer.learn`.
        ImageError: a photo cannot be used.
        LearntFileError, OSError: see `Recognizer`.
    """
    chosen = [name for name in ACTIONS if getattr(arguments, name) not in (None, False)]
    if len(chosen) != 1:
        hint = "use one of --name NAME PHOTO …, --undo, --list, --export FILE, --import FILE"
        raise ArgumentError("%d actions are selected" % len(chosen), hint)
    if arguments.images and chosen != ["name"]:
        raise ArgumentError("photos belong to --name", "add --name, or leave out the photos")
    path = arguments.learnt or learnt_file.beside(arguments.bundle)
    recognizer = Recognizer(model, path)
    return _RUN[chosen[0]](recognizer, arguments)


def _learn(recognizer: Recognizer, arguments: argparse.Namespace) -> Tuple[Result, str]:
    files = samples.listed(arguments.images, recognizer.model.bundle.decoding)
    if samples.STDIN in files:
        raise ArgumentError("photos cannot be read from stdin", "name their files")
    if not files:
        raise ArgumentError("there are no photos of %r" % arguments.name, "name about five files")
    photos = [sample for _, sample in samples.named(files, recognizer.model.bundle)]
    report = recognizer.learn(arguments.name, photos)
    result = {"learnt": report.to_json(), "file": recognizer.path}
    if 2 * report.recognized < report.photos:
        facts = (report.name, report.recognized, report.photos)
        what = "the class %r was added, and only %d of its %d photos are recognized as it" % facts
        error = ImageError(what, "add photos that show it from other sides, or take it back: learn --undo")
        result["failed"] = error.to_json()
    return result, "%s\n  file: %s" % (report.text(), recognizer.path)


def _undo(recognizer: Recognizer, arguments: argparse.Namespace) -> Tuple[Result, str]:
    change = recognizer.undo()
    event = change.event("undo", change.time)
    text = "undone: %s of %d photos of %s" % (change.action, change.photos, ", ".join(event["names"]))
    return {"undone": event, "classes": _rows(recognizer)}, text


def _list(recognizer: Recognizer, arguments: argparse.Namespace) -> Tuple[Result, str]:
    lines = ["%s: %d photos" % pair for pair in recognizer.learnt] or ["no learnt classes"]
    if recognizer.history:
        lines.append("changes:")
    row = "  %s %s %s (%d photos)"
    for event in recognizer.history:
        names = ", ".join(event["names"])
        lines.append(row % (event["time"], event["action"], names, event["photos"]))
    return {"classes": _rows(recognizer), "history": recognizer.history, "file": recognizer.path}, "\n".join(lines)


def _export(recognizer: Recognizer, arguments: argparse.Namespace) -> Tuple[Result, str]:
    if not recognizer.learnt:
        raise ArgumentError("there are no learnt classes to export", "learn a class first")
    write_atomically(arguments.export, recognizer.exported())
    text = "wrote %d learnt classes to %s" % (len(recognizer.learnt), arguments.export)
    return {"classes": _rows(recognizer), "file": arguments.export}, text


def _import(recognizer: Recognizer, arguments: argparse.Namespace) -> Tuple[Result, str]:
    with open(arguments.import_file, "rb") as stream:
        content = stream.read(learnt_file.MAX_BYTES + 1)
    change = recognizer.imported(content, arguments.import_file)
    names = ", ".join(learnt_class.name for learnt_class in change.classes)
    return {"classes": _rows(recognizer), "file": recognizer.path}, "added %d photos of %s" % (change.photos, names)


def _rows(recognizer: Recognizer) -> List[Result]:
    return [{"name": name, "photos": count} for name, count in recognizer.learnt]


_RUN = {"name": _learn, "undo": _undo, "list": _list, "export": _export, "import_file": _import}
