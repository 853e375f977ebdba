"""The devices of a training, through `tf.distribute`: one, all GPUs of this machine, several workers, or a Cloud TPU.

Rules, for every strategy: `batch_size` is that of all devices together, so the learning rate and the number of steps
stay the same. Shuffling and augmentation are drawn for the whole batch before it is divided. Batch norms use the
statistics of the part of the batch on their device, and before every validation their moving averages become the mean
of all devices; the same holds for the ranges of quantization-aware training.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from compress.core.errors import StageError, cause_of
from compress.core.execution import Execution
from compress.core.resources import manual
from compress.learning.training.cluster import WorkerCluster, from_environment, wait_for_all
from compress.model.ir.tensorflow import keras


def strategy(execution: Execution) -> Any:
    """Return the `tf.distribute.Strategy`; for one device that of TensorFlow, which changes nothing.

    Raises:
        StageError: this machine does not have the devices.
    """
    return _strategy(execution.strategy)


def workers(execution: Execution) -> WorkerCluster | None:
    """Return the workers of `strategy: multi_worker`; None for the strategies of one process.

    Raises:
        PipelineError: TF_CONFIG is missing or invalid.
    """
    return from_environment(os.environ) if execution.strategy == "multi_worker" else None


def join(execution: Execution, waiting: Callable[[str], None]) -> None:
    """Start TensorFlow's server for the other workers, and wait for them.

    It has to be the first use of TensorFlow in this process.

    Args:
        execution: how training runs; nothing is done for the strategies of one process.
        waiting: receives a line for the user.

    Raises:
        StageError: a worker has not started in time, or the port is in use.
    """
    cluster = workers(execution)
    if cluster is not None:
        wait_for_all(cluster, waiting)
        strategy(execution)


def refuse_batches(samples: int, batch_size: int, strategy: Any) -> None:
    """Refuse batches that cannot be divided among the devices: each needs samples, for its batch norms.

    Args:
        samples: number of training samples.
        batch_size: number of samples in a batch; the last one of an epoch may be smaller.
        strategy: the strategy.

    Raises:
        StageError: they cannot be divided.
    """
    count = strategy.num_replicas_in_sync
    if batch_size % count:
        raise StageError(
            f"batch_size: {batch_size} samples cannot be divided equally among {count} devices",
            allowed=f"multiples of {count}, such as {-(-batch_size // count) * count}",
        )
    last = samples % batch_size
    if 0 < last < count:
        raise StageError(
            f"batch_size: the last of {-(-samples // batch_size)} batches has {last} samples for {count} devices",
            allowed=f"sizes that leave no batch with fewer than {count} of {samples} samples",
        )


def refuse_accumulation(batches: int, strategy: Any) -> None:
    """Refuse gradients of several batches on several devices: Keras cannot exchange gradients inside a condition.

    Raises:
        StageError: there are several devices.
    """
    if batches > 1 and strategy.num_replicas_in_sync > 1:
        raise StageError(
            f"gradient_accumulation: {batches} batches cannot be accumulated on several devices",
            allowed="1",
            hint="raise batch_size: each device has a part of the batch",
        )


def share_of_mean(losses: Any) -> Any:
    """Return this device's part of the mean loss of the whole batch: the sum over its samples / all samples.

    Args:
        losses: the losses of the samples on this device [n]; n can be 0.
    """
    import tensorflow

    count = tensorflow.cast(tensorflow.size(losses), losses.dtype)
    total = tensorflow.distribute.get_replica_context().all_reduce("SUM", count)
    return tensorflow.reduce_sum(losses) / total


def loss_scaled(optimizer: Any, replicas: int) -> Any:
    """Return an optimizer around another one that scales the loss, for float16: Keras' own for one device.

    It skips a step whose gradients are not finite, and halves the scale. With several devices, all of them skip the
    step if one has such gradients. Keras' own decides before the gradients are added, but as if they were: of several
    workers, one would wait without end for a worker that skips; of several devices of a worker, the first would decide
    for all.

    Args:
        optimizer: the optimizer that updates the weights.
        replicas: number of devices.
    """
    library = keras()
    if replicas == 1:
        return library.optimizers.LossScaleOptimizer(optimizer)
    import tensorflow

    class SharedLossScale(library.optimizers.LossScaleOptimizer):  # type: ignore[misc, name-defined]
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            ops = library.ops
            overflows = 1 - ops.cast(self.check_finite(grads), "float32")
            overflows = tensorflow.distribute.get_replica_context().all_reduce("SUM", overflows)
            divisor = ops.where(overflows > 0, np.nan, 1.0)
            super().apply([None if grad is None else ops.divide(grad, divisor) for grad in grads], trainable_variables)

    return SharedLossScale(optimizer)


def draw_apart(model: Any, replicas: int) -> None:
    """Let the layers of a model draw other random numbers on each device, such as the masks of dropout.

    The states of Keras' generators stay the same on all devices, so checkpoints do not depend on their number.

    Args:
        model: a Keras model that is trained on the devices.
        replicas: number of devices; one device draws as without this function.
    """
    if replicas == 1:
        return
    for layer in model._flatten_layers():
        for generator in layer._seed_generators:
            generator.next = functools.partial(_device_seed, generator.next)


def _device_seed(draw: Callable[[bool], Any], ordered: bool = True) -> Any:
    """Return the next seed of a generator for this device."""
    import tensorflow

    seed = draw(ordered)
    device = tensorflow.distribute.get_replica_context()  # None while Keras looks for the shapes of a model
    number = 0 if device is None else device.replica_id_in_sync_group
    return tensorflow.random.experimental.stateless_fold_in(seed, number)


@contextmanager
def compiled(trainer: Any, execution: Execution) -> Iterator[None]:
    """Let XLA compile the steps of a trainer on one device, if `jit_compile` is set.

    Args:
        trainer: a Keras model after its `compile`, which ignores `jit_compile` where operations are deterministic.
        execution: how training runs.

    Raises:
        StageError: XLA cannot compile the step.
    """
    if not execution.jit_compile or execution.strategy != "one":
        yield
        return
    import tensorflow

    trainer._jit_compile = True
    try:
        yield
    except (tensorflow.errors.InvalidArgumentError, tensorflow.errors.UnimplementedError) as error:
        if "XLA" not in str(error):
            raise
        match = re.search(r"compile graph \S+ on \S+: (\w+)", str(error))
        operation = f"the operation {match[1]}" if match else "the training step"
        hint = "remove execution.jit_compile"
        raise StageError(f"XLA cannot compile {operation} of this training", hint=hint) from error


@functools.cache
def _strategy(name: str) -> Any:
    keras()  # sets the environment before TensorFlow is imported
    import tensorflow

    if name == "one":
        return tensorflow.distribute.get_strategy()
    if name == "tpu":
        return _tpu(tensorflow)
    if name == "multi_worker":
        return tensorflow.distribute.MultiWorkerMirroredStrategy()
    devices = tensorflow.config.list_logical_devices("GPU") or tensorflow.config.list_logical_devices("CPU")
    if len(devices) < 2:
        raise StageError(
            f"strategy: mirrored needs several devices, and TensorFlow finds only {devices[0].name}",
            allowed="one",
            hint="TensorFlow sees the GPUs in the environment variable CUDA_VISIBLE_DEVICES, such as 0,1",
        )
    return tensorflow.distribute.MirroredStrategy([device.name for device in devices])


def _tpu(tensorflow: Any) -> Any:
    try:
        resolver = tensorflow.distribute.cluster_resolver.TPUClusterResolver()
        tensorflow.config.experimental_connect_to_cluster(resolver)
        tensorflow.tpu.experimental.initialize_tpu_system(resolver)
        return tensorflow.distribute.TPUStrategy(resolver)
    except (ValueError, tensorflow.errors.OpError) as error:
        raise StageError(
            f"strategy: tpu found no TPU: {cause_of(error)}",
            allowed="one, mirrored",
            hint=f"run it on a Cloud TPU VM, with TPU_NAME=local if there is more than one: {manual('training.md')}",
        ) from error
