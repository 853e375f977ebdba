"""The first axis of a model's inputs: a batch, if the model computes each sample as if it were alone.

Every importer makes a model of one sample, or of any number of samples. That is right only for a batch: a softmax over
the first axis of x[9, 6] would become 1 everywhere. So the original computes several different samples at once, and its
outputs are compared with those of each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers.common import verification
from compress.model.importers.common.verification import Arrays, Runs
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import tensors_in

if TYPE_CHECKING:
    import keras

SAMPLES = 4
"""Number of samples that are computed at once if the first dimension is open."""
MOST_COMPARED = 16
"""Largest number of samples of a fixed batch that are compared."""
OPEN_SIZES = (32, 96, 224)
"""Sizes to try for every other open dimension."""
HINT = "put a batch in front: a first dimension of 1 for one sample, or an open one for independent samples"
Shape = Sequence[int | None]
Run = Callable[[Arrays], Arrays]
"""A function that returns the outputs of a model for its inputs."""
SampleRuns = dict[str, list[Arrays]]
"""For each sample its inputs, its outputs, and its outputs for inputs with changed last bits ("repeated")."""


class BatchError(ModelError):
    """The first axis of an input is not a batch."""


def batch_of(shapes: Mapping[str, Shape]) -> int | None:
    """Return the number of samples that inputs with these shapes hold; None for any number.

    Raises:
        BatchError: the first dimensions contradict each other.
    """
    firsts = {name: shape[0] for name, shape in shapes.items() if len(shape)}
    sizes = set(firsts.values()) - {1}
    if len(sizes) > 1:
        listed = ", ".join(f"{name} has {'any' if size is None else size}" for name, size in firsts.items())
        raise BatchError(f"the first dimensions of its inputs are not those of one batch: {listed}", hint=HINT)
    return sizes.pop() if sizes else 1


def is_split(shape: Shape) -> bool:
    """Return whether an input has a part for each sample; otherwise all samples use all of it."""
    return len(shape) > 0 and shape[0] != 1


def fixed_batch(shapes: Mapping[str, Shape]) -> str:
    """Return a sentence that names the inputs with a fixed batch."""
    names = [name for name, shape in shapes.items() if is_split(shape)]
    return f"its input {', '.join(map(repr, names))} has a fixed first dimension of {batch_of(shapes)}"


def part_of_sample(outputs: Arrays, alone: Arrays, row: int, batch: int) -> list[NDArray[Any]]:
    """Return the part of each output that belongs to one sample; all of an output that has no batch.

    `outputs` are those for all samples, and `alone` those for the sample alone.
    """
    return [
        output[row : row + 1] if output.shape[:1] == (batch,) and single.shape[:1] == (1,) else output
        for output, single in zip(outputs, alone, strict=True)
    ]


def _check_independent(shapes: Mapping[str, Shape], outputs: Sequence[str], runs: SampleRuns, alone: Runs) -> None:
    """Check that the outputs for several samples at once (`runs`) are those for each sample alone.

    An output that changes much with the last bits of the inputs, or at random, says nothing and is left out.
    """
    allowed, _ = verification.allowed_differences(runs["outputs"], runs["repeated"])
    for limit, *run in zip(allowed, runs["outputs"], runs["repeated"], alone, strict=True):
        for name, together, changed, single in zip(outputs, *run, strict=True):
            difference = verification.compare_output(together, single)
            change = verification.compare_output(together, changed)
            if not difference.relative <= limit and change.relative <= verification.MAXIMUM_TOLERANCE:
                how = f"by {difference.relative:.2g} of its largest value"
                raise BatchError(
                    f"{fixed_batch(shapes) if batch_of(shapes) else 'its first dimension is open'}, and it is not a "
                    f"batch: for several different samples at once, the output {name!r} differs "
                    f"{how if np.isfinite(difference.relative) else 'in shape'} from that for each sample alone",
                    hint=HINT,
                )


def run_each(
    shapes: Mapping[str, Shape], outputs: Sequence[str], inputs: Arrays, count: int, together: Run, alone: Run
) -> SampleRuns:
    """Run several different samples at once and each of them alone, and check that the outputs are the same.

    Raises:
        BatchError: the first axis of the inputs is not a batch.
    """
    expected, changed = together(inputs), together(verification.change_last_bits([inputs])[0])
    runs: SampleRuns = {"inputs": [], "outputs": [], "repeated": []}
    single = []
    for row in np.linspace(0, count - 1, min(count, MOST_COMPARED)).astype(int).tolist():
        sample = [
            array[row : row + 1] if is_split(shape) else array
            for array, shape in zip(inputs, shapes.values(), strict=True)
        ]
        single.append(alone(sample))
        runs["inputs"].append(sample)
        runs["outputs"].append(part_of_sample(expected, single[-1], row, count))
        runs["repeated"].append(part_of_sample(changed, single[-1], row, count))
    _check_independent(shapes, outputs, runs, single)
    return runs


def of_any_batch(model: keras.Model) -> keras.Model:
    """Return a Keras model for any number of samples, after a check that it computes them independently.

    A model for one sample stays as it is, and so does a model that Keras cannot run on numbers.

    Raises:
        BatchError: the first axis of the model is not a batch.
        ModelError: Keras cannot run the model.
    """
    shapes = {tensor.name: tuple(tensor.shape) for tensor in model.inputs}
    batch = batch_of(shapes)
    if batch == 1 or any(tensor.dtype == "string" for tensor in model.inputs):
        return model
    free = model if batch is None else _with_free_batch(model, shapes)
    run, run_alone = (partial(verification.run_model, one) for one in (model, free))
    functional = getattr(model, "_functional", model)  # of a sequential model
    count = batch or SAMPLES
    run_each(shapes, functional.output_names, _accepted_samples(model, count), count, run, run_alone)
    return free


def _accepted_samples(model: keras.Model, batch: int) -> list[NDArray[Any]]:
    """Return random samples that a Keras model accepts; of an open size, the first that works.

    The values are from 0 to 1: an embedding has no row for other numbers.
    """
    dtypes = [tensor.dtype for tensor in model.inputs]
    shapes = [tuple(tensor.shape) for tensor in model.inputs]
    is_open = any(None in shape[1:] for shape in shapes)
    for size in OPEN_SIZES if is_open else OPEN_SIZES[-1:]:
        filled = [
            (batch if is_split(shape) else 1, *(size if side is None else side for side in shape[1:]))
            for shape in shapes
        ]
        inputs = verification.random_inputs(filled, dtypes)[0]
        try:
            verification.run_model(model, inputs)
            break
        except ModelError:
            if size == OPEN_SIZES[-1]:
                raise
    return inputs


def _with_free_batch(model: keras.Model, shapes: Mapping[str, Shape]) -> keras.Model:
    network = keras_graph.read(model)
    entrances = [network.layers[tensor.layer] for tensor in tensors_in(network.inputs)]
    opened = {layer.name: layer.configured(batch_shape=[None, *layer.config["batch_shape"][1:]]) for layer in entrances}
    try:
        return keras_graph.build(replace(network, layers={**network.layers, **opened}))
    except ModelError as error:
        raise BatchError(f"{fixed_batch(shapes)}, which other layers need: {error.what}", hint=HINT) from error
