"""The devices of a training, through `tf.distribute`: one, all GPUs of this machine, several workers, or a Cloud TPU.

Rules, for every strategy: `batch_size` is that of all devices together, so the learning rate and the number of steps
stay the same. Shuffling and augmentation are drawn for the whole batch before it is divided. Batch norms use the
statistics of the part of the batch on their device, and before every validation their moving averages become the mean
of all devices; the same holds for the ranges of quantization-aware training.

The environment variable TF_CONFIG has the addresses of workers: https://www.tensorflow.org/guide/distributed_training.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.core.errors import PipelineError, StageError, cause_of
from compress.core.files import digest_of
from compress.core.resources import manual
from compress.learning.context import Execution
from compress.model.ir.tensorflow import keras

VARIABLE = "TF_CONFIG"
EXAMPLE = '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}'


def worker(execution: Execution) -> int | None:
    """Return the index of this process among the workers of `multi_worker`; None for other strategies.

    Worker 0, the chief, writes the results. TensorFlow itself trains alone, without a message, if TF_CONFIG is missing.

    Raises:
        PipelineError: TF_CONFIG is missing or does not describe workers.
    """
    if execution.strategy != "multi_worker":
        return None
    try:
        content = json.loads(os.environ.get(VARIABLE) or "null")
        addresses = content["cluster"]["worker"]
        task = content["task"]
        is_worker = list(content["cluster"]) == ["worker"] and task["type"] == "worker"
        has_addresses = len({*addresses}) == len(addresses) > 1 and all(":" in address for address in addresses)
        if is_worker and has_addresses and task["index"] in range(len(addresses)):
            return int(task["index"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # the message below says what the variable needs
    raise PipelineError(
        "strategy: multi_worker needs the addresses of two or more workers and the index of this one in the "
        f"environment variable {VARIABLE}",
        where=VARIABLE,
        allowed=EXAMPLE,
        hint="set the variable on every machine, with the index of that machine",
    )


@functools.cache
def strategy(name: str) -> Any:
    """Return the `tf.distribute.Strategy` with a name of `Execution.strategy`; for "one" the strategy of TensorFlow.

    The first call for `multi_worker` has to be the first use of TensorFlow in this process; it waits for the others.

    Raises:
        StageError: this machine does not have the devices.
    """
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
        return tensorflow.distribute.TPUStrategy(tensorflow.distribute.cluster_resolver.TPUClusterResolver.connect())
    except (ValueError, tensorflow.errors.OpError) as error:
        raise StageError(
            f"strategy: tpu found no TPU: {cause_of(error)}",
            allowed="one, mirrored",
            hint=f"run it on a Cloud TPU VM, with TPU_NAME=local if there is more than one: {manual('training.md')}",
        ) from error


@dataclass(frozen=True)
class Devices:
    """The devices of a training, as one process sees them.

    Attributes:
        strategy: the `tf.distribute.Strategy`.
        worker: the index of this process among several workers; None: this process is alone.
    """

    strategy: Any
    worker: int | None = None

    @property
    def count(self) -> int:
        """The number of devices of all workers."""
        return int(self.strategy.num_replicas_in_sync)

    def distributed(self, dataset: Any) -> Any:
        """Return a data set for `fit` in which the batches of another are divided among the devices, without end.

        TensorFlow's own division can leave devices without samples: 5 samples as 2, 2, 1 and 0. Of a data set with an
        end, workers would ask each other at every step whether there is a next batch.
        """
        if self.count == 1:
            return dataset
        import tensorflow

        def divided(context: Any) -> Any:
            total = context.num_replicas_in_sync
            local = total // context.num_input_pipelines
            first = context.input_pipeline_id * local

            def parts(*batch: Any) -> Any:
                size = tensorflow.shape(tensorflow.nest.flatten(batch)[0], "int64")[0]

                def part(number: Any) -> Any:
                    rows = slice(size * number // total, size * (number + 1) // total)
                    return tensorflow.nest.map_structure(lambda values: values[rows], batch)

                return tensorflow.data.Dataset.range(first, first + local).map(part)

            return dataset.flat_map(parts).repeat()

        return self.strategy.distribute_datasets_from_function(divided)

    def refuse(self, samples: int, validation: int, batch_size: int, accumulated: int, precision: str) -> None:
        """Refuse batches that leave a device without samples for its batch norms, and what Keras cannot do.

        `samples` and `validation` are the numbers of samples for training and for validation.

        Raises:
            StageError: a setting is refused.
        """
        smallest = samples % batch_size or min(samples, batch_size)
        if smallest < self.count:
            raise StageError(
                f"batch_size: {batch_size} divides {samples} training samples so that one batch has {smallest}, which "
                f"are fewer than the {self.count} devices",
                allowed=f"sizes that leave no batch with fewer than {self.count} samples",
            )
        if validation < self.count:
            what = f"{validation} validation samples are fewer than the {self.count} devices"
            raise StageError(what, allowed="strategy: one, or more validation samples")
        if self.count > 1 and accumulated > 1:  # Keras cannot exchange gradients inside a condition
            raise StageError("gradient_accumulation cannot be used on several devices", hint="raise batch_size")
        if self.count > 1 and precision == "mixed_float16":
            # Keras' LossScaleOptimizer skips a step whose gradients overflow, and each device decides that alone: of
            # several workers, one would wait without end for a worker that skips the step.
            raise StageError(
                f"precision: {precision} cannot be used on several devices", allowed="float32, mixed_bfloat16"
            )

    def start_together(self, what_is_trained: Callable[[], Any], variables: Sequence[Any]) -> None:
        """Check that all workers train the same, and set the weights to the mean of theirs, which differ by rounding.

        Otherwise workers would exchange gradients of different models without a message. The JSON values of
        `what_is_trained` must be equal on all workers.

        Raises:
            StageError: the values differ.
        """
        if self.worker is None:
            return
        number = float(int(digest_of(what_is_trained())[:10], 16))  # 40 bits: the sum of 8,000 equal ones is exact
        (mean,) = self._means(lambda: [np.float64(number)])
        if mean != number:
            raise StageError(
                "the workers do not train the same: their settings, versions, layers, samples or checkpoints differ",
                hint="use the same files, versions, command and --out on all machines",
            )
        self.average(variables)

    def average(self, variables: Sequence[Any]) -> None:
        """Set variables to their means over all devices; 64-bit sums leave equal values as they are.

        Keras updates the statistics of batch norms, and other variables that are assigned in a step, on each device
        alone, and reads those of the first device.
        """
        floats = [variable for variable in variables if "float" in variable.dtype]
        if self.count == 1 or not floats:
            return
        for variable, mean in zip(floats, self._means(lambda: [each.value for each in floats]), strict=True):
            variable.assign(mean.astype(variable.dtype))

    def _means(self, values: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return the means of arrays over all devices; `values` returns the arrays of the device that calls it."""
        import tensorflow

        def means() -> Any:
            local = [tensorflow.cast(value, "float64") for value in values()]
            return tensorflow.distribute.get_replica_context().all_reduce("MEAN", local)

        run = tensorflow.function(lambda: self.strategy.run(means), autograph=False)
        return [self.strategy.experimental_local_results(mean)[0].numpy() for mean in run()]

    def callbacks(self, model: Any) -> list[Any]:
        """Return the callback that averages what is measured on each device, before every validation."""
        average = keras().callbacks.LambdaCallback(
            on_test_begin=lambda logs: self.average(model.non_trainable_variables)
        )
        return [] if self.count == 1 else [average]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Convert TensorFlow's error for a lost worker to one of ours.

        Raises:
            StageError: a worker was lost.
        """
        from tensorflow import errors

        lost = (errors.UnavailableError, errors.AbortedError, errors.DeadlineExceededError)
        try:
            yield
        except (*lost, errors.FailedPreconditionError) as error:
            if self.worker is None:
                raise
            raise StageError(
                f"another worker was lost: {cause_of(error)}",
                hint="run the same command on all workers: the training continues after its last checkpoint",
            ) from error

    def trainer(self, kind: type[Any]) -> type[Any]:
        """Return a class of trainers that works with several devices.

        Keras 3.15 looks for the shapes of a batch in the sum of the devices' parts, which must be equal, and with
        several workers (https://github.com/keras-team/keras/issues/20585) takes the mean of a step's results over their
        first axis, which they lack. It multiplies the loss of each device by the number of devices, and then weights it
        by the samples of that device: parts of different sizes would count twice.
        """
        if self.count == 1:
            return kind
        import tensorflow

        strategy = self.strategy
        has_axis = self.worker is None

        def first_part(value: Any) -> Any:
            return strategy.experimental_local_results(value)[0]

        class BatchLoss(keras().metrics.Mean):  # type: ignore[misc]
            """The mean of the losses of batches, in which every device has the same weight (`share_of_mean`)."""

            def update_state(self, values: Any, sample_weight: Any = None) -> Any:
                replica = tensorflow.distribute.get_replica_context()
                weight = replica.all_reduce("MEAN", tensorflow.cast(sample_weight, "float32"))
                return super().update_state(values, weight)

        class DistributedTrainer(kind):  # type: ignore[misc]
            has_shapes = False

            def compile(self, *arguments: Any, **named: Any) -> None:
                super().compile(*arguments, **named)
                self._loss_tracker = BatchLoss(name="loss")

            def _maybe_symbolic_build(self, iterator: Any) -> None:
                if not self.has_shapes:
                    self.has_shapes = True
                    batch = next(next(iter(iterator))[2])
                    super()._maybe_symbolic_build(data_batch=keras().tree.map_structure(first_part, batch))

            def train_step(self, data: Any) -> Any:
                results = super().train_step(data)
                return results if has_axis else {name: value[None] for name, value in results.items()}

            def test_step(self, data: Any) -> Any:
                results = super().test_step(data)
                return results if has_axis else {name: value[None] for name, value in results.items()}

        return DistributedTrainer


def devices(execution: Execution) -> Devices:
    """Return the devices of a training.

    Raises:
        PipelineError: TF_CONFIG is missing or does not describe workers.
        StageError: this machine does not have the devices.
    """
    return Devices(strategy(execution.strategy), worker(execution))


def share_of_mean(losses: Any) -> Any:
    """Return this device's part of the mean loss of the whole batch: the sum over its samples / all samples.

    There can be no samples on this device.
    """
    import tensorflow

    count = tensorflow.cast(tensorflow.size(losses), losses.dtype)
    total = tensorflow.distribute.get_replica_context().all_reduce("SUM", count)
    return tensorflow.reduce_sum(losses) / total
