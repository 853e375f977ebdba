"""Exchanges between the devices of a training: the same start, the mean of statistics, and the loss of a worker.

Every worker must call the same functions in the same order. Each value is the sum of one array over all workers, to
which the workers that have nothing to say contribute zeros.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.files import digest_of
from compress.learning.training.batches import Shares
from compress.learning.training.cluster import WorkerCluster
from compress.model.ir.tensorflow import keras, set_weights

MEETING_S = 3600
"""Seconds in which every worker must have reached a training that one has reached: machines may differ in speed."""
LAST_LOOK_S = 3.0
"""Seconds that a worker stays reachable after another one is lost, so that all report the same one."""


def total(strategy: Any, array: NDArray[Any], timeout_s: float = 0) -> NDArray[Any]:
    """Return the sum of an array over all workers.

    Args:
        strategy: the strategy of several workers.
        array: of the same shape and type on every worker: float64, int64 or int32.
        timeout_s: seconds to wait for the other workers; 0: until one is lost.
    """
    summed = _summing(strategy, str(array.dtype), timeout_s)(array.ravel())
    result: NDArray[Any] = strategy.experimental_local_results(summed)[0].numpy().reshape(array.shape)
    return result


@functools.cache
def _summing(strategy: Any, dtype: str, timeout_s: float) -> Callable[[NDArray[Any]], Any]:
    """Return the function that sums arrays [n] over all workers; of several devices of a worker only one counts."""
    import tensorflow

    options = tensorflow.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s or None)
    replicas = len(strategy.extended.worker_devices)

    def summed(local_values: Any) -> Any:
        context = tensorflow.distribute.get_replica_context()
        is_first = tensorflow.cast(context.replica_id_in_sync_group % replicas == 0, local_values.dtype)
        return context.all_reduce("SUM", local_values * is_first, options)

    signature = [tensorflow.TensorSpec([None], dtype)]
    run: Callable[[NDArray[Any]], Any] = tensorflow.function(
        lambda local_values: strategy.run(summed, (local_values,)), signature, autograph=False
    )
    return run


@dataclass(frozen=True)
class Peers:
    """The workers and devices of a training, as one of the workers sees them.

    Attributes:
        strategy: the strategy of the training.
        cluster: the workers; None: this process is alone, and only its own devices share batches and statistics.
    """

    strategy: Any
    cluster: WorkerCluster | None

    @property
    def shares(self) -> Shares | None:
        """The part of every batch that this process reads, a share for each of its devices; None for one device alone.

        TensorFlow's own division of a batch can leave devices without samples: 5 samples as 2, 2, 1 and 0.
        """
        count = self.strategy.num_replicas_in_sync
        if self.cluster is None:
            return None if count == 1 else Shares(0, count, count)
        local_device_count = len(self.strategy.extended.worker_devices)
        return Shares(self.cluster.index * local_device_count, local_device_count, count)

    def distributed(self, dataset: Any) -> Any:
        """Return a data set of the shares of this process for `fit`."""
        if self.shares is None:
            return dataset
        return self.strategy.distribute_datasets_from_function(lambda context: dataset)

    def agree(self, what_is_trained: Callable[[], Mapping[str, Any]]) -> None:
        """Check that all workers train the same.

        Args:
            what_is_trained: returns plain JSON values that must be equal on all workers, by what they are.

        Raises:
            StageError: a worker has another value.
        """
        cluster = self.cluster
        if cluster is None:
            return
        facts = what_is_trained()
        mine = [int(digest_of(value)[:15], 16) for value in facts.values()]
        table = np.zeros((len(cluster.addresses), len(mine)), np.int64)
        table[cluster.index] = mine
        table = total(self.strategy, table, MEETING_S)
        for index, row in enumerate(table):
            for name, worker_digest, chiefs in zip(facts, row, table[0], strict=True):
                if worker_digest != chiefs:
                    raise StageError(
                        f"{name} of {cluster.named(index)} differ from those of the chief",
                        hint="use the same files, versions and command on all machines",
                    )

    def from_chief(self, content: bytes) -> bytes:
        """Return the chief's bytes on every worker."""
        if self.cluster is None:
            return content
        local_content = content if self.cluster.is_chief else b""
        size = int(total(self.strategy, np.array([len(local_content)], np.int64))[0])
        padded = local_content.ljust(-(-size // 4) * 4, b"\0")
        return total(self.strategy, np.frombuffer(padded, np.int32)).tobytes()[:size] if size else b""

    def share_weights(self, model: Any) -> None:
        """Give every worker the weights of the chief's model."""
        if self.cluster is None:
            return
        stream = io.BytesIO()
        np.savez(stream, *model.get_weights())
        content = self.from_chief(stream.getvalue())
        if not self.cluster.is_chief:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                set_weights(model, [arrays[name] for name in arrays.files])

    def callbacks(self, model: Any) -> list[Any]:
        """Return the callback that averages what is measured on each device, before every validation.

        Keras updates the statistics of batch norms, and other variables that are assigned in a step, on each device
        alone, and reads those of the first device.
        """
        if self.strategy.num_replicas_in_sync == 1:
            return []
        average = self._average
        measured = [variable for variable in model.non_trainable_variables if "float" in variable.dtype]

        class Average(keras().callbacks.Callback):  # type: ignore[misc]
            def on_test_begin(self, logs: Any = None) -> None:
                del logs
                average(measured)

        return [Average()]

    def _average(self, variables: Sequence[Any]) -> None:
        """Set variables to their means over all devices; 64-bit sums leave those that are equal as they are."""
        if not variables:
            return
        values = [self._local_mean(variable) for variable in variables]
        means = np.concatenate([value.ravel() for value in values])
        if self.cluster is not None:
            means = total(self.strategy, means) / len(self.cluster.addresses)
        parts = np.split(means, np.cumsum([value.size for value in values])[:-1])
        for variable, value, part in zip(variables, values, parts, strict=True):
            variable.assign(part.reshape(value.shape).astype(variable.dtype))

    def _local_mean(self, variable: Any) -> NDArray[np.float64]:
        """Return the mean of a variable over the devices of this process."""
        devices = self.strategy.experimental_local_results(variable.value)
        mean: NDArray[np.float64] = np.mean(
            [device_value.numpy().astype(np.float64) for device_value in devices], axis=0
        )
        return mean

    @contextmanager
    def watched(self, epochs_saved: Callable[[], int] = int) -> Iterator[None]:
        """Convert TensorFlow's error for a lost worker to one of ours.

        Args:
            epochs_saved: returns the number of epochs in the checkpoint.

        Raises:
            StageError: a worker was lost.
        """
        if self.cluster is None:
            yield
            return
        import tensorflow

        errors = tensorflow.errors
        lost = (
            errors.UnavailableError,
            errors.AbortedError,
            errors.DeadlineExceededError,
            errors.FailedPreconditionError,
        )
        try:
            yield
        except lost as error:
            missing = self.cluster.unreachable()
            time.sleep(LAST_LOOK_S)
            names = ", ".join(map(self.cluster.named, missing)) or "a worker that no longer answers"
            epochs = epochs_saved()
            continues = f"the training continues after epoch {epochs}" if epochs else "the training starts again"
            raise StageError(
                f"lost {names}", hint=f"run the same command on all workers, or on fewer: {continues}"
            ) from error

    def trainer(self, kind: type[Any]) -> type[Any]:
        """Return a class of trainers that works with several workers.

        Keras 3.15 does not (https://github.com/keras-team/keras/issues/20585): it looks for the shape of a batch in the
        sum of those of all workers, and takes the mean of a step's results over their first axis, which they lack.
        """
        if self.cluster is None:
            return kind
        strategy = self.strategy

        class WorkerTrainer(kind):  # type: ignore[misc]
            has_shapes = False

            def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
                if self.has_shapes:
                    return
                self.has_shapes = True
                batch = data_batch if iterator is None else next(next(iter(iterator))[2])
                local_batch = keras().tree.map_structure(
                    lambda value: strategy.experimental_local_results(value)[0], batch
                )
                with strategy.scope():
                    self._symbolic_build(data_batch=local_batch)

            def train_step(self, data: Any) -> Any:
                return {name: value[None] for name, value in super().train_step(data).items()}

            def test_step(self, data: Any) -> Any:
                return {name: value[None] for name, value in super().test_step(data).items()}

        return WorkerTrainer
