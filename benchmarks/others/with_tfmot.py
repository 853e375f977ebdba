"""tensorflow-model-optimization: quantization-aware training by `quantize_model`, as its guide describes it.

It has no post-training quantization, and reads tf-keras models only. For a Keras 3 model it gets the same network built
in tf-keras with the same weights (tf_keras.npz). It trains as long as our `quantize: {method: qat}`: the same samples,
epochs, batch size and learning rate; the epoch with the best validation accuracy is kept.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from exchange import MODEL, Job, UnsupportedError, run_worker

EPOCHS, BATCH_SIZE, LEARNING_RATE = 6, 64, 0.0005
"""The defaults of our stage."""


def work(job: Job) -> dict[str, Any]:
    """Train the model, and convert it."""
    if job.about["format"] == "onnx":
        raise UnsupportedError("does not read ONNX; it reads tf-keras models")
    if not job.about["labelled"]:
        raise UnsupportedError("has no post-training quantization; its training needs labelled samples")
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow
    import tensorflow_model_optimization as tfmot
    import tf_keras
    from networks_in_tf_keras import build

    tf_keras.utils.set_random_seed(0)
    model = build(job.about["network"], tf_keras, job.about["input_shape"], job.about["classes"])
    with np.load(job.subject / "weights.npz") as weights:
        model.set_weights([weights[name] for name in weights.files])
    aware = tfmot.quantization.keras.quantize_model(model)
    aware.compile(
        optimizer=tf_keras.optimizers.Adam(LEARNING_RATE), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    best = tf_keras.callbacks.ModelCheckpoint(
        str(job.folder / "best.weights.h5"), monitor="val_accuracy", save_best_only=True, save_weights_only=True
    )
    aware.fit(
        job.array("train_x"),
        job.array("train_y"),
        validation_data=(job.array("validation_x"), job.array("validation_y")),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        callbacks=[best],
        verbose=2,
    )
    aware.load_weights(str(job.folder / "best.weights.h5"))
    converter = tensorflow.lite.TFLiteConverter.from_keras_model(aware)
    converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
    converter.inference_input_type = converter.inference_output_type = tensorflow.int8
    (job.folder / MODEL).write_bytes(converter.convert())
    return {"facts": {"epochs": EPOCHS, "model": "the network built again in tf-keras"}}


if __name__ == "__main__":
    run_worker(work)
