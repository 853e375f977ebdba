"""TFLiteConverter: full-integer post-training quantization of Keras models, by its documented settings.

The variant "dense per tensor" sets a private flag of the converter: one scale for each dense layer, without which the
Edge TPU compiler rejects the file. The default also leaves the float file, which ai-edge-quantizer reads.
"""

from __future__ import annotations

from typing import Any

from exchange import FLOAT, MODEL, Job, run_worker


def loaded(job: Job) -> tuple[Any, str]:
    """Return the model, and the library that reads it: Keras 3, or else tf-keras."""
    import keras
    import tf_keras

    try:
        return keras.models.load_model(job.model, compile=False), "Keras 3"
    except Exception as error:  # noqa: BLE001 - every version fails in another way
        print(f"Keras 3 does not read it: {error}")
        return tf_keras.models.load_model(job.model, compile=False), "tf-keras (Keras 3 does not read the file)"


def work(job: Job) -> dict[str, Any]:
    """Convert the model."""
    job.refuse_unless("keras", "h5")
    import tensorflow

    model, library = loaded(job)
    if not job.variant:
        (job.folder / FLOAT).write_bytes(tensorflow.lite.TFLiteConverter.from_keras_model(model).convert())
    calibration = job.array("calibration")
    converter = tensorflow.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([sample[None]] for sample in calibration)
    converter.target_spec.supported_ops = [tensorflow.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tensorflow.int8
    if job.variant == "dense per tensor":
        converter._experimental_disable_per_channel_quantization_for_dense_layers = True
    (job.folder / MODEL).write_bytes(converter.convert())
    return {"facts": {"read_by": library}}


if __name__ == "__main__":
    run_worker(work)
