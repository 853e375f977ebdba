"""Quantization of a float .tflite file without a Keras model, by TensorFlow's own quantizer.

The quantizer chooses the ranges: the lowest and highest values on the samples. The calls are those that
TFLiteConverter makes with a representative data set, and private. They run in a separate
process: some files make the calibrator crash (TensorFlow 2.21 with WHILE).
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import memory
from compress.core.errors import StageError
from compress.learning.quantization import attention_masks, constant_biases
from compress.learning.quantization.export import InputType
from compress.model.tflite import float_graph, graph
from compress.model.tflite.edit import compact

INPUT, SAMPLES, OUTPUT, ERROR = "input.tflite", "samples.npy", "output.tflite", "error.txt"


def convert(content: bytes, samples: NDArray[np.float32], io: InputType = "int8") -> bytes:
    """Return a float .tflite file with all operators quantized that have an 8-bit form.

    Raises:
        StageError: the calibrator or the quantizer refuses the file, or crashes, or memory is short.
    """
    with tempfile.TemporaryDirectory(prefix="coralline-") as name:
        folder = Path(name)
        plain = compact(float_graph.plain(graph.parse(content)).graph)
        limited = attention_masks.limited_graph(plain, plain.feeds(samples))
        (folder / INPUT).write_bytes(graph.serialize(limited))
        np.save(folder / SAMPLES, samples)
        process = multiprocessing.get_context("spawn").Process(target=_quantize, args=(folder, io))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        if (folder / OUTPUT).exists() and process.exitcode == 0:
            return (folder / OUTPUT).read_bytes()
        if memory.killed_for_memory(process.exitcode or 0):
            raise memory.exhausted(
                "the process of TensorFlow's quantizer was killed: most likely memory was short",
                ("calibration_samples",),
            )
        crash = f"it crashed with code {process.exitcode}"
        said = (folder / ERROR).read_text() if (folder / ERROR).exists() else crash
    raise StageError(
        f"TensorFlow's quantizer refuses the file: {said}",
        hint="use the Keras model that it was converted from, or a model whose operators all have Keras layers",
    )


def _quantize(folder: Path, io: InputType) -> None:
    """Read the input of `convert`, and write the output or the error."""
    warnings.simplefilter("ignore")
    from compress.model.ir.tensorflow import keras

    keras()  # with its settings of TensorFlow
    import tensorflow
    from tensorflow.lite.python import convert as converter
    from tensorflow.lite.python import util
    from tensorflow.lite.python.optimize import calibrator

    kind: Any = getattr(tensorflow, io)
    content = (folder / INPUT).read_bytes()
    feeds = graph.parse(content).feeds(np.load(folder / SAMPLES))
    try:
        calibration = calibrator.Calibrator(content)
        int8_content = converter.mlir_quantize(
            calibration.calibrate(lambda: iter(feeds)),
            # The compiler of 2021 and the TF 2.5 interpreter treat per-channel dense weights as per-tensor ones.
            disable_per_channel_for_dense_layers=True,
        )
        (folder / OUTPUT).write_bytes(constant_biases.corrected(util.modify_model_io_type(int8_content, kind, kind)))
    except (ValueError, RuntimeError, converter.ConverterError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        (folder / ERROR).write_text(text[:300])
