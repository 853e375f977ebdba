"""How training runs on the hardware: its devices, and whether it is profiled."""

from __future__ import annotations

from typing import Literal

from compress.core.settings import Settings


class Execution(Settings):
    """How training runs on this machine. It is not part of the cache key: results differ by rounding, and on several
    devices by the batch norms and the random numbers of layers such as dropout."""

    strategy: Literal["one", "mirrored", "multi_worker", "tpu"] = "one"
    """The devices of a training. one: one device. mirrored: all GPUs of this machine, each with a copy of the model and
    a part of every batch. multi_worker: the devices of several processes, usually on several machines, whose addresses
    are in the environment variable TF_CONFIG. tpu: the cores of a Cloud TPU."""
    profile: bool = False
    """Measure where the time of each stage goes, and write a trace of some training steps, which TensorBoard's profiler
    opens, to runs/NAME/profile. The same as `--profile`."""
