"""A signature of a SavedModel as a function of one sample, and its outputs for random samples, in TensorFlow.

This code runs in the child process of `conversion`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import cause_of
from compress.model.importers.common import batches
from compress.model.importers.common.batches import BatchError, SampleRuns
from compress.model.importers.common.verification import Arrays
from compress.model.importers.saved_model.saved_model_folder import port_order


@dataclass(frozen=True)
class LoadedSignature:
    """A signature as TensorFlow loads it.

    Attributes:
        inputs: names of its inputs, in the order of the folder.
        outputs: names of its outputs, in the order of the folder.
    """

    function: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: tuple[Any, ...]

    @classmethod
    def of(cls, function: Any) -> Self:
        """Return a loaded signature."""
        specs = function.structured_input_signature[1]
        inputs = sorted(specs, key=port_order)
        outputs = sorted(function.structured_outputs, key=port_order)
        return cls(function, tuple(inputs), tuple(outputs), tuple(specs[name] for name in inputs))

    @property
    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """The shapes of the inputs by name."""
        return {name: tuple(spec.shape) for name, spec in zip(self.inputs, self.specs, strict=True)}

    def __call__(self, tensors: Any) -> list[NDArray[Any]]:
        """Return the outputs for one array for each input."""
        import tensorflow as tf

        results = self.function(**dict(zip(self.inputs, map(tf.constant, tensors), strict=True)))
        return [results[name].numpy() for name in self.outputs]

    def for_one_sample(self) -> Any:
        """Return a concrete function of one sample, with inputs input_0, input_1, … and a list of the outputs.

        Raises:
            BatchError: the first dimensions contradict each other, or the graph works only with its fixed batch.
        """
        import tensorflow as tf

        specs = [
            tf.TensorSpec([1, *spec.shape[1:]][: spec.shape.rank], spec.dtype, f"input_{index}")
            for index, spec in enumerate(self.specs)
        ]
        function = self.function if batches.batch_of(self.shapes) in (None, 1) else self._with_free_batch()

        @tf.function(input_signature=specs, autograph=False)  # type: ignore[untyped-decorator]
        def run(*tensors: Any) -> Any:
            outputs = function(**dict(zip(self.inputs, tensors, strict=True)))
            return [outputs[name] for name in self.outputs]

        return run.get_concrete_function()

    def _with_free_batch(self) -> Any:
        """Return the function for inputs with another first dimension: its graph, with its shapes inferred again."""
        import tensorflow as tf
        from tensorflow.python.framework import convert_to_constants

        frozen = convert_to_constants.convert_variables_to_constants_v2(self.function, lower_control_flow=False)
        placeholders = dict(zip(sorted(self.inputs), frozen.inputs, strict=True))  # TensorFlow's order is by name
        results = [tensor.name for tensor in frozen.outputs]

        def call(**tensors: Any) -> dict[str, Any]:
            replaced = {placeholders[name].name: tensor for name, tensor in tensors.items()}
            try:
                outputs = tf.graph_util.import_graph_def(
                    frozen.graph.as_graph_def(), input_map=replaced, return_elements=results, name=""
                )
            except ValueError as error:
                what = f"{batches.fixed_batch(self.shapes)}, which other operators need: {cause_of(error)}"
                raise BatchError(what, hint=batches.HINT) from error
            return dict(zip(sorted(self.outputs), outputs, strict=True))

        return call


def run_samples(signature: LoadedSignature, function: Any) -> SampleRuns:
    """Return the inputs, the outputs and the repeated outputs of random samples (`conversion.Converted`).

    The signature computes all samples of a batch at once: they are different, so an operation over the first axis
    changes the result.

    Raises:
        BatchError: the outputs of several samples are not those of each sample alone.
    """
    import tensorflow as tf

    generator = np.random.default_rng(0)
    batch = batches.batch_of(signature.shapes)
    rows = batches.SAMPLES if batch is None else batch
    try:
        runs = _run_together(signature, function, generator, rows)
    except tf.errors.OpError:
        if batch is not None:
            raise
        rows = 1  # the dimension is open, but the graph takes one sample only
        runs = _run_together(signature, function, generator, rows)
    while rows == 1 and len(runs["inputs"]) < batches.SAMPLES:
        for kind, arrays in _run_together(signature, function, generator, rows).items():
            runs[kind] += arrays
    return runs


def _run_together(signature: LoadedSignature, function: Any, generator: np.random.Generator, rows: int) -> SampleRuns:
    """Return the runs of some samples that the signature computes at once."""
    import tensorflow as tf

    inputs = [
        _random(generator, (rows, *spec.shape[1:]) if batches.is_split(shape) else tuple(spec.shape), spec.dtype)
        for spec, shape in zip(signature.specs, signature.shapes.values(), strict=True)
    ]

    def alone(sample: Arrays) -> Arrays:
        return [tensor.numpy() for tensor in function(*map(tf.constant, sample))]

    return batches.run_each(signature.shapes, signature.outputs, inputs, rows, signature, alone)


def _random(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return standard normal values, every value of an 8-bit integer, or 0 and 1 for other integers."""
    kind = np.dtype(dtype.as_numpy_dtype)
    values: NDArray[Any]
    if dtype.is_floating:
        values = generator.standard_normal(shape)
    elif kind.itemsize == 1 and dtype.is_integer:
        values = generator.integers(dtype.min, dtype.max, shape, endpoint=True)
    else:
        values = generator.integers(0, 2, shape)
    return values.astype(kind)
