"""ai-edge-quantizer: static int8 with its own recipe, and dense layers and matrix products with one scale.

The Edge TPU and older runtimes need one scale for them. It quantizes float .tflite files: for Keras models that of
TFLiteConverter, for ONNX models that of onnx2tf.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from exchange import MODEL, Job, UnsupportedError, run_worker


def feeds(job: Job, runner: Any) -> list[dict[str, Any]]:
    """Return the calibration samples by the name of the input, in the layout of the file."""
    [(name, details)] = runner.get_input_details().items()
    samples = job.array("calibration")
    if tuple(details["shape"][1:]) != samples.shape[1:]:
        samples = job.channels_last(samples)
    return [{name: sample[np.newaxis]} for sample in samples]


def work(job: Job) -> dict[str, Any]:
    """Quantize the float file."""
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import qtyping, quantizer, recipe

    source = next((path for path in job.float_files if path.exists()), None)
    if source is None:
        raise UnsupportedError("reads float .tflite files only, and no tool made one of this model")
    interpreter = Interpreter(str(source))
    signatures = list(interpreter.get_signature_list())
    if not signatures:
        raise UnsupportedError("the float file has no signature, which its calibration needs")
    tool = quantizer.Quantizer(source.read_bytes(), recipe.static_wi8_ai8())
    for operator in (qtyping.TFLOperationName.FULLY_CONNECTED, qtyping.TFLOperationName.BATCH_MATMUL):
        tool.add_static_config(".*", operator, 8, 8, qtyping.QuantGranularity.TENSORWISE)
    samples = feeds(job, interpreter.get_signature_runner(signatures[0]))
    ranges = tool.calibrate({signatures[0]: samples}, num_threads=1)
    made = tool.quantize(ranges, enable_progress_report=False).quantized_model
    (job.folder / MODEL).write_bytes(bytes(made))
    return {"facts": {"float_file_of": source.parent.name}}


if __name__ == "__main__":
    run_worker(work)
