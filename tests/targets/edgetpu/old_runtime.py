"""Run models in TensorFlow 2.5's TFLite interpreter: `python3.8 old_runtime.py FOLDER`.

For every NAME.tflite in the folder, with its inputs in NAME.npy ([n, ...]), write NAME.outputs.npy,
or NAME.refused with the message of the interpreter.
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def outputs(path):
    interpreter = tf.lite.Interpreter(str(path))
    interpreter.allocate_tensors()
    input_details, output_details = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for value in np.load(str(path.with_suffix(".npy"))):
        interpreter.set_tensor(input_details[0]["index"], value)
        interpreter.invoke()
        rows.append(np.concatenate([interpreter.get_tensor(detail["index"]).ravel() for detail in output_details]))
    return np.stack(rows)


for model in sorted(Path(sys.argv[1]).glob("*.tflite")):
    try:
        np.save(str(model.with_suffix(".outputs.npy")), outputs(model))
    except (ValueError, RuntimeError) as error:
        model.with_suffix(".refused").write_text(str(error))
