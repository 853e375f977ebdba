"""How training runs on the hardware: devices, compilation, steps per call. What is trained does not depend on it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.settings import Settings


class Execution(Settings):
    """How training runs on this machine. The result depends on it only by rounding: it is not part of the cache key."""

    strategy: Literal["one", "mirrored", "multi_worker", "tpu"] = "one"
    """The devices of a training. one: one device. mirrored: all GPUs of this machine, each with a copy of the model and
    a part of every batch. multi_worker: the devices of several processes, usually on several machines, whose addresses
    are in the environment variable TF_CONFIG. tpu: the cores of a Cloud TPU."""
    jit_compile: bool = False
    """Compile the training step with XLA. The first step takes longer, and the others may be faster."""
    steps_per_execution: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Most batches in one call of the training function; more than 1 helps if steps take a few milliseconds. The number
    used is the largest that divides the batches of an epoch."""
    profile: bool = False
    """Measure where the time of each stage goes, and write a trace of some training steps, which TensorBoard's profiler
    opens, to runs/NAME/profile. The same as `--profile`."""

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.strategy == "multi_worker":
            if self.jit_compile:
                raise ValueError("jit_compile: XLA cannot exchange gradients between workers; remove it")
            if self.steps_per_execution > 1:
                raise ValueError("steps_per_execution: workers exchange gradients after every step; remove it")
        return self
