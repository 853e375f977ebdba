"""Commands that change files, and checks whether the files are old, new or neither afterwards."""

from __future__ import annotations

import json
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import bundles
import numpy as np
import small_shop
import tiny

from compress.core.errors import CorallineError
from compress.pipeline.store import Store
from compress.surface.fleet import repository
from deploy.contract import bundle, releases
from deploy.contract import trust as update_trust
from deploy.contract.trust import TrustError
from deploy.learn import learnt_file

OLD, NEW, PARTLY, REMOVED = "old", "new", "partly new", "removed"


class Subject(ABC):
    """A command, and the files that it changes.

    Attributes:
        name: the name of the subject.
        arguments: the program, and its arguments.
        first: a command that runs before, if any.
        codes: the exit codes that are allowed for its errors.
        again: the exit codes with which a second command may refuse files that are new already.
        alone: see `fault_injection.Forge.start`.
        is_durable: whether the files survive a power cut after the end of the command.
    """

    name: str
    arguments: tuple[str, ...]
    first: tuple[str, ...] = ()
    codes: frozenset[int] = frozenset({6})
    again: frozenset[int] = frozenset()
    alone = False
    is_durable = True

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write the initial files into an empty folder."""

    def change(self, folder: Path) -> None:  # noqa: B027
        """Change the input of the command after the command `first` has run."""

    @abstractmethod
    def state(self, folder: Path, before: Path, after: Path) -> str:
        """Return `OLD`, `NEW`, `PARTLY`, `REMOVED` (by a run that fails), or what is wrong.

        Args:
            folder: the files after a fault.
            before: the files before the command.
            after: the files after the undisturbed command.
        """

    def left(self, folder: Path) -> list[str]:
        """Return files that a command may leave behind only if it was killed."""
        pattern = re.compile(r"\.new-|\..+\.[a-z0-9_]{8}$|\.nfs")
        return [str(path.relative_to(folder)) for path in folder.rglob(".*") if pattern.match(path.name)]

    def unfinished(self, folder: Path) -> list[str]:
        """Return what is wrong although a command succeeded."""
        return []

    def amount(self, folder: Path) -> int | None:
        """Return how many commands took effect; None if only one can."""
        return None


class WrittenFile(Subject):
    """A command that writes files whose content is known.

    Args:
        name: the name of the subject.
        arguments: see `Subject`.
        files: the names of the files.
        old: whether they exist before, with other content.
        again: see `Subject`.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], files: Sequence[str], *, old: bool, again: Sequence[int] = ()
    ) -> None:
        self.name, self.arguments, self.files = name, tuple(arguments), tuple(files)
        self._old, self.again = old, frozenset(again)

        self.codes = frozenset({2, 3, 4, 6})

    def prepare(self, folder: Path) -> None:
        (folder / "model.tflite").write_bytes(tiny.classifier())
        tiny.data(folder / "data.npz")
        for name in self.files if self._old else ():
            if not (folder / name).exists():
                (folder / name).write_bytes(b"old")

    def state(self, folder: Path, before: Path, after: Path) -> str:
        return _compared(self.files, folder, before, after)


class Results(WrittenFile):
    """`results`: a measurement of a device is stored in the folder of a run."""

    def __init__(self) -> None:
        arguments = ("compress", "results", "board.json", "--run", "run")
        super().__init__("results", arguments, ("run/devices/board.json",), old=True)

    def prepare(self, folder: Path) -> None:
        (folder / "run" / "devices").mkdir(parents=True)
        (folder / "run" / "v1.coralline").write_bytes(bundles.packed(1))
        (folder / "run" / "devices" / "board.json").write_bytes(b"old")
        rows = bundle.Bundle(bundles.packed(1)).manifest["members"]
        digests = {row["name"]: row["sha256"] for row in rows}
        median = {"value": 1.5, "unit": "ms", "how": "measured", "low": None, "high": None, "note": "100 runs"}
        result = {
            "schema_version": 1,
            "verb": "bench",
            "bundle": {"name": "tiny", "coralline": "0", "models": {"int8": digests["int8.tflite"]}},
            "benchmark": {"model": {}, "host": {}, "steady": {"median": median}, "doubts": []},
        }
        (folder / "board.json").write_text(json.dumps(result))


class Run(Subject):
    """A pipeline of light stages: it runs with a new model in the folder that has the outputs of the old model."""

    name = "run"
    arguments = ("compress", "pipeline.yaml", "--out", "out")
    first = arguments
    codes = frozenset({2, 3, 4, 6})
    is_durable = False  # the store is durable, new folders for it and for the outputs need not be
    outputs = ("model.tflite", "{}.coralline", "runner.pyz")
    title = "tiny"

    def prepare(self, folder: Path) -> None:
        tiny.project(folder)

    def change(self, folder: Path) -> None:
        """Replace the model after the first run, so that the next run has new outputs."""
        if self.first:
            (folder / "model.tflite").write_bytes(tiny.classifier(seed=1))

    def state(self, folder: Path, before: Path, after: Path) -> str:
        """Check that the artifacts for later runs are complete, and that each output is old or new."""
        store = Store(folder / "out" / ".store")
        for place in (store.folder / "artifacts").glob("*"):
            if store._open(place.name) is None:
                return f"the artifact {place.name} is not complete"
        for key in (store.folder / "keys").glob("[!.]*"):
            if store.find(key.name) is None:
                return f"the key {key.name} names nothing"
        report = folder / "out" / self.title / "report.json"
        if report.exists():
            json.loads(report.read_text())
        names = [f"out/{self.title}/{name.format(self.title)}" for name in self.outputs]
        return _compared(names, folder, before, after, removable=True)  # a run that fails removes earlier outputs


class Export(Run):
    """`export` of a quantized model, into a new folder."""

    name = "export"
    arguments = ("compress", "export", "model.tflite", "-o", "out")
    first = ()
    title = "model"


class Training(Run):
    """A pipeline that trains a network with TensorFlow, from random weights."""

    name = "training"
    arguments = ("compress", "training.yaml", "--out", "out")
    first = ()
    alone = True
    text = """
schema_version: 1
name: tiny
model: {builder: digits_cnn}
data:
  source: {digits: {}}
  preprocess: [{resize: {size: [32, 32], filter: bilinear}}, {scale: {from: [0, 16], to: [0, 1]}}]
stages:
  - train: {epochs: 2}
  - quantize: {method: ptq}
  - package: {}
measure: {latency: {runs: 5}}
"""

    def prepare(self, folder: Path) -> None:
        (folder / "training.yaml").write_text(self.text)


class Learn(Subject):
    """`learn` on a device: one more class in the file next to the bundle."""

    name = "learn"
    arguments = ("deploy", "learn", "shop.coralline", "seven", "--name", "Seven")
    codes = frozenset({3, 6, 8})

    def prepare(self, folder: Path) -> None:
        (folder / "shop.coralline").write_bytes(small_shop.packed())
        (folder / "seven").mkdir()
        for number, photo in enumerate(small_shop.photos(7, 3)[0]):
            np.save(folder / "seven" / f"{number}.npy", photo)

    def state(self, folder: Path, before: Path, after: Path) -> str:
        try:
            return NEW if self.amount(folder) else OLD
        except learnt_file.LearntFileError as error:
            return str(error)

    def amount(self, folder: Path) -> int:
        digest = bundle.Bundle((folder / "shop.coralline").read_bytes()).digest
        path = folder / "shop.learnt"
        return len(learnt_file.read(str(path), digest, small_shop.HIDDEN).changes)


class Deploy(Subject):
    """`deploy` into a folder of this machine where another version runs: the host side and the device side."""

    name = "deploy"
    arguments = ("compress", "deploy", "b2.coralline", "--to", "./there", "--log", "log.jsonl", "--keep", "1")
    first = (*arguments[:2], "b1.coralline", *arguments[3:])
    codes = frozenset({6, 15})

    def prepare(self, folder: Path) -> None:
        (folder / "b1.coralline").write_bytes(bundles.packed(1))
        (folder / "b2.coralline").write_bytes(bundles.packed(2, extra_bytes=20_000))

    def state(self, folder: Path, before: Path, after: Path) -> str:
        """Return the state by the version that runs, after its files were compared with their checksums."""
        there = folder / "there"
        installed = releases.DeviceFolder(str(there), by="", create=False, lock=False)
        current = installed.current()
        if current is None:
            return "no release is current"
        if not installed.whole(current):
            return "the current release is damaged"
        content = (there / "releases" / current / releases.BUNDLE).read_bytes()
        version = bundle.Bundle(content).manifest["version"]
        return {1: OLD, 2: NEW}.get(version, f"version {version}")

    def left(self, folder: Path) -> list[str]:
        """Return nothing: the next deployment continues with the files that an interrupted one leaves."""
        return []

    def unfinished(self, folder: Path) -> list[str]:
        """Return files that no deployment may leave, and an error if the log does not end with the deployment's end."""
        there = folder / "there"
        names = [str(path.relative_to(there)) for path in there.rglob("*")]
        leftovers = [name for name in names if re.match(r"incoming/.|releases/\.|\.new", name) or "/.nfs" in name]
        if json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["event"] != "done":
            leftovers.append("log.jsonl does not end with the end of the deployment")
        return leftovers


class FirstDeploy(Deploy):
    """`deploy` to a folder without a deployment."""

    name = "first deploy"
    first = ()

    def state(self, folder: Path, before: Path, after: Path) -> str:
        """Return the state as `Deploy` does; a folder without a release is `OLD`."""
        if not (folder / "there" / "current").is_symlink() and not (folder / "there" / "current").exists():
            return OLD
        return super().state(folder, before, after)


class Trust(Subject):
    """`trust add` in a repository that lists another bundle."""

    name = "trust"
    arguments = ("compress", "trust", "add", "repository", "b2.coralline", "--keys", "keys")
    files = ("repository",)
    codes = frozenset({6, 8})

    def prepare(self, folder: Path) -> None:
        repository.init(folder / "repository", folder / "keys")
        repository.Editor(folder / "repository", [folder / "keys"]).add({"b1.coralline": bundles.packed(1)})
        (folder / "b2.coralline").write_bytes(bundles.packed(2))

    def state(self, folder: Path, before: Path, after: Path) -> str:
        """Follow the metadata as devices do, and compare the listed files."""
        place = folder / "repository"
        try:
            contents = repository.read(place)
            source = update_trust.folder_source(str(place))
            with tempfile.TemporaryDirectory() as device_folder:
                device = update_trust.first_contact(source, contents.fingerprint, f"{device_folder}/trust")
                device.update(source)
                listed = device.listed()
            for name in listed:
                update_trust.download(str(place), name, listed, True)
        except (CorallineError, TrustError, OSError) as error:
            return str(error)
        return NEW if "b2.coralline" in listed else OLD


def _compared(names: Sequence[str], folder: Path, before: Path, after: Path, *, removable: bool = False) -> str:
    """Compare files with those before and after the command. Files that the command did not change do not count."""
    states = set()
    for name in names:
        content, old, new = (_content(place / name) for place in (folder, before, after))
        if content not in (old, new) and not (content is None and removable):
            return f"{name} is neither old nor new"
        if old != new:
            states.add(NEW if content == new else OLD if content == old else REMOVED)
    return states.pop() if len(states) == 1 else PARTLY


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def subjects() -> list[Subject]:
    legalized = ("compress", "legalize", "model.tflite", "new.tflite")
    return [
        Run(),
        Export(),
        WrittenFile("legalize", legalized, ("new.tflite",), old=True),
        WrittenFile("init", ("compress", "init", "data.npz", "-o", "shop.yaml"), ("shop.yaml",), old=False, again=(2,)),
        Results(),
        Learn(),
        Deploy(),
        FirstDeploy(),
        Trust(),
        Training(),
    ]
