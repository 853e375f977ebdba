"""How training runs on the hardware: devices, compilation, steps in one call."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.core.settings import Settings


class Execution(Settings):
    """How training runs on this machine. It is not part of the cache key: results differ by rounding, and on several
    devices by the batch norms and the random numbers of layers such as dropout."""

    strategy: Literal["one", "mirrored", "multi_worker", "tpu"] = "one"
    """The devices of a training. one: one device. mirrored: all GPUs of this machine, each with a copy of the model and
    a part of every batch. multi_worker: the devices of several processes, usually on several machines, whose addresses
    are in the environment variable TF_CONFIG. tpu: the cores of a Cloud TPU."""
    jit_compile: bool = False
    """Compile the training step with XLA, on one device. The first step takes much longer, and the others may be faster
    on a GPU. A TPU always compiles."""
    steps_per_execution: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Most batches in one call of the training function; more than 1 helps if steps take a few milliseconds. The number
    used is the largest that divides the batches of an epoch; it is 1 in trainings that change something at every step:
    `gradual`, and `freeze` of QAT."""
    profile: bool = False
    """Measure where the time of each stage goes, and write a trace of some training steps, which TensorBoard's profiler
    opens, to runs/NAME/profile. The same as `--profile`."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.strategy in ("mirrored", "multi_worker"):
            if self.jit_compile:
                raise ValueError("jit_compile: XLA cannot exchange gradients between devices; remove it")
            # Keras fails: https://github.com/keras-team/keras/issues/19246, with 3.15 too.
            if self.steps_per_execution > 1:
                raise ValueError("steps_per_execution: devices exchange gradients after every step; remove it")
        return self
