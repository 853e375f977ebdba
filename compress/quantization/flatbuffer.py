"""A float .tflite file that no Keras model stands for, quantized as it is: by TensorFlow's own quantizer.

It chooses the ranges (the lowest and highest values on the samples) and knows none of the
other ways; what it made is measured like everything else. The calls are those that
TFLiteConverter makes with a representative data set, and private.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.quantization.conversion import InputType
from compress.tflite import floats, graph


def convert(content: bytes, samples: NDArray[np.float32], io: InputType = "int8") -> bytes:
    """The file with everything quantized that the quantizer has in 8 bits.

    Args:
        content: a float .tflite file with one input.
        samples: preprocessed calibration samples [n, ...].
        io: type of the result's input and output.

    Raises:
        StageError: the calibrator or the quantizer does not take it.
    """
    import tensorflow
    from tensorflow.lite.python import convert as converter
    from tensorflow.lite.python.optimize import calibrator

    given = graph.serialize(floats.plain(graph.parse(content)).graph)
    kind: Any = getattr(tensorflow, io)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            seen = calibrator.Calibrator(given).calibrate(lambda: ([sample[np.newaxis]] for sample in samples))
            made: bytes = converter.mlir_quantize(
                seen,
                input_data_type=kind,
                output_data_type=kind,
                fully_quantize=True,
                # The compiler of 2021 and the TF 2.5 interpreter take per-channel dense weights for per-tensor ones.
                disable_per_channel_for_dense_layers=True,
            )
    except (ValueError, RuntimeError, converter.ConverterError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(f"TensorFlow's quantizer does not take the file: {first[:300]}") from error
    return made
