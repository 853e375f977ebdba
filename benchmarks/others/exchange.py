"""Files between benchmarks/other_tools.py and the workers, which run in other Python environments.

A worker gets a folder with job.json, whose keys are described at `Job`. It writes a .tflite
file and result.json: {"status": "made"}, or {"status": "cannot" or "failed", "error": text}, and facts about the run.

This module needs numpy alone: every environment has it.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "model.tflite"
FLOAT = "float.tflite"
RESULT = "result.json"
JOB = "job.json"
FORMATS = {"keras": "Keras", "h5": "Keras", "onnx": "ONNX"}
LONGEST = 600
"""Characters of an error message that are kept."""


class UnsupportedError(Exception):
    """The tool does not support this form of a model, or this work, by design; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """One model for one tool.

    Attributes:
        folder: of the job; the results go there.
        subject: the folder of the model and its samples.
        about: subject.json: name, format ("keras", "h5", "onnx"), layout, input_name, labelled, detector.
        variant: of the tool, such as "qat"; "" for the default.
        float_files: where earlier tools may have left a float .tflite file of this model.
    """

    folder: Path
    subject: Path
    about: dict[str, Any]
    variant: str
    float_files: tuple[Path, ...]

    @property
    def model(self) -> Path:
        """The model file."""
        return self.subject / str(self.about["file"])

    def array(self, name: str) -> Any:
        """Return an array of samples.npz: calibration, test, and if the samples have labels train_x, train_y,
        validation_x, validation_y, calibration_y and test_y.

        Samples are float32, and have the layout of the model.
        """
        with np.load(self.subject / "samples.npz") as arrays:
            return arrays[name]

    def channels_last(self, samples: Any) -> Any:
        """Return samples with the channels at the end."""
        return np.ascontiguousarray(samples.transpose(0, 2, 3, 1)) if self.about["layout"] == "nchw" else samples

    def refuse_unless(self, *formats: str) -> None:
        """Refuse a model in another format."""
        if self.about["format"] not in formats:
            allowed = " and ".join(sorted({FORMATS[name] for name in formats}))
            raise UnsupportedError(f"does not read {FORMATS[self.about['format']]} files; it reads {allowed}")


def read_job(folder: Path) -> Job:
    """Read the job in a folder."""
    written = json.loads((folder / JOB).read_text())
    subject = Path(written["subject"])
    about = json.loads((subject / "subject.json").read_text())
    return Job(folder, subject, about, written["variant"], tuple(map(Path, written["float_files"])))


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write result.json; another process never sees a part of it."""
    part = folder / f"{RESULT}.part"
    part.write_text(json.dumps(result, indent=1))
    part.replace(folder / RESULT)


def run_worker(work: Callable[[Job], dict[str, Any]], folder: Path) -> None:
    """Run a worker in the folder of a job: `work` writes the .tflite file, and returns facts about the run."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    folder = folder.resolve()
    try:
        facts = work(read_job(folder))
    except UnsupportedError as error:
        write_result(folder, {"status": "cannot", "error": str(error)})
    except Exception as error:  # noqa: BLE001 - the error of another program is a result
        traceback.print_exc()
        write_result(folder, {"status": "failed", "error": f"{type(error).__name__}: {error}"[:LONGEST]})
    else:
        write_result(folder, {"status": "made", **facts})
