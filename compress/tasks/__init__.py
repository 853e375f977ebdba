"""Tasks, such as classification or detection: one file for each, and the table of all tasks."""

from __future__ import annotations

from compress.core.measurement import Metric
from compress.data.types import Data
from compress.tasks.base import Location, Refusal, Task
from compress.tasks.classification import Classification
from compress.tasks.detection import Detection
from compress.tasks.embeddings import Embeddings
from compress.tasks.keypoints import Keypoints
from compress.tasks.multi_label import MultiLabel
from compress.tasks.outputs import OutputsTask
from compress.tasks.reconstruction import Reconstruction
from compress.tasks.regression import Regression
from compress.tasks.segmentation import Segmentation
from compress.tasks.unlabelled_detection import UnlabelledDetection

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Classification(),
        MultiLabel(),
        Regression(),
        Segmentation(),
        Keypoints(),
        Reconstruction(),
        Embeddings(),
        Detection(),
        UnlabelledDetection(),
        OutputsTask(),
    )
}


def task_of(data: Data) -> Task:
    """Return the task of a data set."""
    return TASKS[data.task]


def limits() -> dict[str, Metric]:
    """Return the metrics that a budget can limit, by the key of `budget`."""
    return {metric.change: metric for task in TASKS.values() for metric in task.metrics if metric.limited}


def refused_budget(task: Task, keys: list[str]) -> list[tuple[Location, Refusal]]:
    """Return the keys of a budget that limit the models of other tasks."""
    allowed = ", ".join(metric.change for metric in task.metrics if metric.limited)
    refused: list[tuple[Location, Refusal]] = []
    for other in TASKS.values():
        foreign = [metric.change for metric in other.metrics if metric.limited and metric.change in keys]
        if not set(other.metrics) <= set(task.metrics):
            judged = f"{task.models} are judged by {task.metrics[0].label.lower()}"
            refused += [
                (("budget", key), Refusal(f"{key} limits {other.models}, but {judged}", allowed)) for key in foreign
            ]
    return refused
