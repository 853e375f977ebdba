"""The tools that benchmarks/quantization.py compares: each makes an int8 .tflite file of a Keras model and samples."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import quantization_subjects as subjects
from numpy.typing import NDArray

from compress.core.artifact import MODEL_TFLITE
from compress.learning.procedures.quantization import quantize
from compress.learning.procedures.settings import QuantizeSettings
from compress.learning.quantization import calibration, export
from compress.learning.quantization.calibration import CalibrationSplit
from compress.model.ir.tensorflow import keras
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.stages import working_model

Floats = NDArray[np.float32]
OURS = "coralline"
CONVERTER, CONVERTER_TENSORWISE = "TFLiteConverter", "TFLiteConverter, dense per tensor"
EDGE_QUANTIZER = "ai-edge-quantizer"


@dataclass(frozen=True)
class QuantizerInputs:
    """The inputs of a tool, without test data.

    Attributes:
        model: the float model.
        calibration: samples for ranges.
        held_out: further training samples; only our search uses them.
        seed: of the random numbers.
    """

    model: Any
    calibration: Floats
    held_out: Floats
    seed: int


@dataclass(frozen=True)
class QuantizedFile:
    """A file, and how long it took.

    Attributes:
        content: the .tflite file.
        seconds: from the model in memory to the file.
        notes: facts that the tool reports about it.
    """

    content: bytes
    seconds: float
    notes: Any = None


def drawn(subject: subjects.Subject) -> tuple[Floats, Floats]:
    """Return calibration samples and held-out samples, as the stage draws them from the training split."""
    stage = QuantizeSettings()
    samples = calibration.split(subject.data, stage.calibration_samples, stage.held_out_samples, subject.seed)
    return samples.calibration, samples.held_out


def ours(inputs: QuantizerInputs, **settings: Any) -> QuantizedFile:
    """Quantize by our procedure, with defaults except for `settings`: the result is that of a pipeline."""
    samples = CalibrationSplit(inputs.calibration, inputs.held_out)
    with tempfile.TemporaryDirectory() as folder:
        float_file = Path(folder) / MODEL_TFLITE
        float_file.write_bytes(export.convert_float(inputs.model))
        model = working_model.copied(inputs.model)
        nothing = (np.zeros(0, np.float32), np.zeros(0, np.int64))
        context = subjects.context(subjects.Arrays({"calibration": nothing}, 0), Path(folder), inputs.seed)
        keras(inputs.seed)
        started = time.perf_counter()
        result = quantize(model, float_file, QuantizeSettings(**settings), context, samples)
        seconds = time.perf_counter() - started
    notes = {name: result.facts[name] for name in ("tried", "not_tried", "ranges", "rewritten") if name in result.facts}
    return QuantizedFile(result.content, seconds, notes)


def converted(model: Any, samples: Floats, *, dense_per_tensor: bool) -> bytes:
    """Return the full-integer file of TFLiteConverter's fast path: that of `from_keras_model` in a tenth of the time.

    Args:
        model: of Keras 3 or tf-keras.
        samples: for ranges.
        dense_per_tensor: whether the weights of a dense layer have one scale.
    """
    import tensorflow

    signature = [tensorflow.TensorSpec((1, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    function = tensorflow.function(lambda x: model(x, training=False), input_signature=signature)
    converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()])
    converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([sample[np.newaxis]] for sample in samples)
    converter.target_spec.supported_ops = [tensorflow.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tensorflow.int8
    converter._experimental_disable_per_channel_quantization_for_dense_layers = dense_per_tensor
    content: bytes = converter.convert()
    return content


def by_edge_quantizer(model: Any, samples: Floats, *, dense_per_tensor: bool) -> bytes:
    """Return the file of ai-edge-quantizer: static int8, all other settings from its recipe.

    The tool calls a float .tflite file by a signature with named outputs. `dense_per_tensor`: as in `converted`.
    """
    import tensorflow
    from ai_edge_quantizer import qtyping, quantizer, recipe
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    signature = [tensorflow.TensorSpec((1, *tensor.shape[1:]), tensor.dtype, "sample") for tensor in model.inputs]
    function = tensorflow.function(lambda sample: model(sample, training=False), input_signature=signature)
    frozen = convert_variables_to_constants_v2(function.get_concrete_function())
    module = tensorflow.Module()

    def run(sample: Any) -> dict[str, Any]:
        return {f"output_{number}": value for number, value in enumerate(frozen(sample))}

    module.run = tensorflow.function(run, input_signature=signature)
    with tempfile.TemporaryDirectory() as folder:
        # The gradient of Keras' SiLU cannot be saved.
        options = tensorflow.saved_model.SaveOptions(experimental_custom_gradients=False)
        tensorflow.saved_model.save(module, folder, module.run.get_concrete_function(), options)
        content = tensorflow.lite.TFLiteConverter.from_saved_model(folder).convert()
    tool = quantizer.Quantizer(content, recipe.static_wi8_ai8())
    if dense_per_tensor:
        dense = qtyping.TFLOperationName.FULLY_CONNECTED
        tool.add_static_config(".*", dense, 8, 8, qtyping.QuantGranularity.TENSORWISE)
    feeds = [{"sample": sample[np.newaxis]} for sample in samples]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ranges = tool.calibrate({"serving_default": feeds}, num_threads=1)
        quantized = tool.quantize(ranges, enable_progress_report=False).quantized_model
    return bytes(quantized)


def _timed(make: Callable[[QuantizerInputs], bytes]) -> Callable[[QuantizerInputs], QuantizedFile]:
    def run(inputs: QuantizerInputs) -> QuantizedFile:
        started = time.perf_counter()
        content = make(inputs)
        return QuantizedFile(content, time.perf_counter() - started)

    return run


TOOLS: dict[str, Callable[[QuantizerInputs], QuantizedFile]] = {
    OURS: ours,
    CONVERTER: _timed(lambda inputs: converted(inputs.model, inputs.calibration, dense_per_tensor=False)),
    # One scale for each dense layer, which the Edge TPU's compiler needs.
    CONVERTER_TENSORWISE: _timed(lambda inputs: converted(inputs.model, inputs.calibration, dense_per_tensor=True)),
    EDGE_QUANTIZER: _timed(lambda inputs: by_edge_quantizer(inputs.model, inputs.calibration, dense_per_tensor=True)),
}


def scores(content: bytes, samples: Floats) -> Floats:
    """Return the outputs of a file in the runtime in which all files are measured: [n, outputs]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        return LoadedModel(path, reproducible=True).scores(samples)
