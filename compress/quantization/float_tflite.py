"""A float .tflite file that no Keras model stands for, quantized as it is: by TensorFlow's own quantizer.

It chooses the ranges (the lowest and highest values on the samples) and knows none of the
other ways; what it made is measured like everything else. The calls are those that
TFLiteConverter makes with a representative data set, and private. They run in a process of
their own: there are files that make the calibrator crash (TensorFlow 2.21 with WHILE).
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.quantization.export import InputType
from compress.tflite import float_graph, graph

GIVEN, SAMPLES, MADE, ERROR = "given.tflite", "samples.npy", "made.tflite", "error.txt"


def convert(content: bytes, samples: NDArray[np.float32], io: InputType = "int8") -> bytes:
    """The file with everything quantized that the quantizer has in 8 bits.

    Args:
        content: a float .tflite file with one input.
        samples: preprocessed calibration samples [n, ...].
        io: type of the result's input and output.

    Raises:
        StageError: the calibrator or the quantizer does not take it, or crashes.
    """
    with tempfile.TemporaryDirectory(prefix="coralline-") as name:
        folder = Path(name)
        (folder / GIVEN).write_bytes(graph.serialize(float_graph.plain(graph.parse(content)).graph))
        np.save(folder / SAMPLES, samples)
        process = multiprocessing.get_context("spawn").Process(target=_quantize, args=(folder, io))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        if (folder / MADE).exists() and process.exitcode == 0:
            return (folder / MADE).read_bytes()
        crash = f"it ended with code {process.exitcode}"
        said = (folder / ERROR).read_text() if (folder / ERROR).exists() else crash
    raise StageError(
        f"TensorFlow's quantizer does not take the file: {said}",
        todo="give the Keras model that it was made of, or one without the operators that Keras has no layers for",
    )


def _quantize(folder: Path, io: InputType) -> None:
    """Reads what `convert` has written, and writes the result or what went wrong."""
    warnings.simplefilter("ignore")
    from compress.ir.tensorflow import keras

    keras()  # with its settings of TensorFlow
    import tensorflow
    from tensorflow.lite.python import convert as converter
    from tensorflow.lite.python import util
    from tensorflow.lite.python.optimize import calibrator

    kind: Any = getattr(tensorflow, io)
    samples = np.load(folder / SAMPLES)
    try:
        calibration = calibrator.Calibrator((folder / GIVEN).read_bytes())
        made = converter.mlir_quantize(
            calibration.calibrate(lambda: ([sample[np.newaxis]] for sample in samples)),
            # The compiler of 2021 and the TF 2.5 interpreter take per-channel dense weights for per-tensor ones.
            disable_per_channel_for_dense_layers=True,
        )
        (folder / MADE).write_bytes(util.modify_model_io_type(made, kind, kind))
    except (ValueError, RuntimeError, converter.ConverterError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        (folder / ERROR).write_text(text[:300])
