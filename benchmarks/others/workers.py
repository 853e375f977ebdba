"""The tools of benchmarks/other_tools.py: `python benchmarks/others/workers.py TOOL JOB_FOLDER`.

Each function gets a model and calibration samples (`exchange.Job`), writes a .tflite file, and returns facts about it.
It runs in the Python environment of its tool, so everything but numpy is imported late.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from exchange import FLOAT, MODEL, Job, UnsupportedError, run_worker

ROOT = Path(__file__).resolve().parents[2]
OTHERS = 8
"""Samples of the validation and of the test split, if only calibration samples are given: the pipeline needs both.
They are calibration samples, and the comparison with the float model in the report uses them."""
USABLE = (0, 7)
"""Exit codes of a complete run; 7: the verdict is "not usable", which the measurements show."""


def samples(job: Job) -> dict[str, Any]:
    """Return the arrays of the pipeline: x, part, and y if the samples have labels."""
    if job.variant == "qat":
        parts = ("train", "validation")
        xs = [job.array(f"{part}_x") for part in parts]
        ys = [job.array(f"{part}_y") for part in parts]
        xs, ys = [*xs, xs[-1][:OTHERS]], [*ys, ys[-1][:OTHERS]]
    else:
        calibration = job.channels_last(job.array("calibration"))
        xs = [calibration, calibration[:OTHERS], calibration[-OTHERS:]]
        ys = []
        if job.about["labelled"]:
            labels = job.array("calibration_y")
            ys = [labels, labels[:OTHERS], labels[-OTHERS:]]
    names = ("train", "validation", "test")
    part = np.concatenate([[name] * len(x) for name, x in zip(names, xs, strict=True)])
    return {"x": np.concatenate(xs), "part": part} | ({"y": np.concatenate(ys)} if ys else {})


def pipeline(job: Job) -> dict[str, Any]:
    """Return the pipeline file; JSON is YAML."""
    about = job.about
    source: dict[str, Any] = {"file": str(job.folder / "data.npz"), "split": "part", "y": None}
    data: dict[str, Any] = {"source": {"npz": source}, "task": "outputs"}
    if about["labelled"]:
        source |= {"y": "y", "classes": [str(number) for number in range(about["classes"])]}
        del data["task"]
    if about["layout"] == "series":
        data["preprocess"] = [{"squeeze": {}}]
    model: dict[str, Any] = {"file": str(job.model)}
    if about["detector"]:
        model["detector"] = about["detector"]
        data["task"] = "unlabelled_detection"
    quantize = {"method": "qat"} if job.variant == "qat" else {}
    return {
        "schema_version": 1,
        "name": about["name"],
        "seed": 0,
        "target": "edgetpu",
        "model": model,
        "data": data,
        "stages": [{"quantize": quantize}, {"compile": {}}],
        "measure": {"latency": {"runs": 5}},
    }


def coralline(job: Job) -> dict[str, Any]:
    """Coralline: `python -m compress pipeline.yaml`, as a user runs it."""
    np.savez(job.folder / "data.npz", **samples(job))
    path = job.folder / "pipeline.yaml"
    path.write_text(json.dumps(pipeline(job), indent=1))
    command = [sys.executable, "-m", "compress", str(path), "--out", str(job.folder / "runs"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=job.folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in USABLE:
        raise RuntimeError(f"exit code {done.returncode}")
    report = json.loads(done.stdout)
    shutil.copyfile(job.folder / "runs" / job.about["name"] / MODEL, job.folder / MODEL)
    stage = next(entry for entry in report["stages"] if entry["stage"] == "quantize")
    kept = ("method", "kept", "ranges", "tried", "separated_gates", "rewritten")
    return {"facts": {name: stage["facts"][name] for name in kept if name in stage["facts"]}}


def loaded(job: Job) -> tuple[Any, str]:
    """Return the model, and the library that reads it: Keras 3, or else tf-keras."""
    import keras
    import tf_keras

    try:
        return keras.models.load_model(job.model, compile=False), "Keras 3"
    except Exception as error:  # noqa: BLE001 - every version fails in another way
        print(f"Keras 3 does not read it: {error}")
        return tf_keras.models.load_model(job.model, compile=False), "tf-keras (Keras 3 does not read the file)"


def tflite_converter(job: Job) -> dict[str, Any]:
    """TFLiteConverter: full-integer post-training quantization of Keras models, by its documented settings.

    The variant "dense per tensor" sets a private flag of the converter: one scale for each dense layer, without which
    the Edge TPU compiler rejects the file. The default also leaves the float file, which ai-edge-quantizer reads.
    """
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


def with_one_sample(job: Job) -> Path:
    """Return the model with a batch of 1: the option -b leaves operators that it cannot quantize."""
    import onnx

    model = onnx.load(job.model)
    for tensor in (*model.graph.input, *model.graph.output):
        batch = tensor.type.tensor_type.shape.dim[0]
        if not batch.dim_value:
            batch.dim_value = 1
    path = job.folder / "model.onnx"
    onnx.save(model, path)
    return path


def onnx2tf(job: Job) -> dict[str, Any]:
    """onnx2tf: full-integer quantization by its own backend (`flatbuffer_direct`), which needs no TensorFlow.

    Weights are quantized per channel by default, and per tensor in the variant "per tensor". The default also leaves
    the float file, which ai-edge-quantizer reads.
    """
    job.refuse_unless("onnx")
    samples = job.folder / "calibration.npy"
    np.save(samples, job.channels_last(job.array("calibration")))
    out = job.folder / "out"
    command = ["onnx2tf", "-i", str(with_one_sample(job)), "-o", str(out)]
    command += ["-tb", "flatbuffer_direct", "-osd", "-oiqt", "-iqd", "int8", "-oqd", "int8"]
    command += ["-qt", "per-tensor"] if job.variant == "per tensor" else []
    command += ["-cind", job.about["input_name"], str(samples), "[[[[0.0]]]]", "[[[[1.0]]]]"]  # mean and deviation
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    for name, pattern in ((FLOAT, "*_float32.tflite"), (MODEL, "*_full_integer_quant.tflite")):
        found = next(iter(sorted(out.glob(pattern))), None)
        if found is not None:
            shutil.copyfile(found, job.folder / name)
    if not (job.folder / MODEL).exists():
        raise RuntimeError(f"no full-integer file: {cause(done.stdout)}")
    return {"facts": {"exit_code": done.returncode, "error": cause(done.stdout) if done.returncode else ""}}


def cause(output: str) -> str:
    """Return the first exception in the output, which is the cause of the others, without the list of tensors."""
    found = re.search(r"^\S*Error: .+$", output, re.MULTILINE)
    if found is None:
        return "no error in its output"
    return re.split(r"(?:Tensor|Node number) \d+", found.group().rpartition("quantization.")[2])[0].rstrip(". ")


def feeds(job: Job, runner: Any) -> list[dict[str, Any]]:
    """Return the calibration samples by the name of the input, in the layout of the file."""
    [(name, details)] = runner.get_input_details().items()
    samples = job.array("calibration")
    if tuple(details["shape"][1:]) != samples.shape[1:]:
        samples = job.channels_last(samples)
    return [{name: sample[np.newaxis]} for sample in samples]


def ai_edge_quantizer(job: Job) -> dict[str, Any]:
    """ai-edge-quantizer: static int8 with its own recipe, and dense layers and matrix products with one scale.

    The Edge TPU and older runtimes need one scale for them. It quantizes float .tflite files: for Keras models that of
    TFLiteConverter, for ONNX models that of onnx2tf.
    """
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


def built(weights: list[Any], count: int) -> Any:
    """Return `quantization_networks.separable` as a PyTorch module, from the weights in the order of Keras.

    Args:
        weights: of the Keras model: kernel, gamma, beta, mean and variance of each block, then the dense layer's.
        count: the number of convolutions.
    """
    import torch

    class Same(torch.nn.Module):  # type: ignore[misc]
        """A convolution with Keras' "same" padding, which is not symmetric for a stride of 2."""

        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            padding = []
            for side in (x.shape[3], x.shape[2]):
                size, stride = self.layer.kernel_size[0], self.layer.stride[0]
                total = max((-(-side // stride) - 1) * stride + size - side, 0)
                padding += [total // 2, total - total // 2]
            return self.layer(torch.nn.functional.pad(x, padding) if any(padding) else x)

    def tensor(values: Any) -> Any:
        return torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(values)))

    layers: list[Any] = []
    strides = iter(STRIDES[count])
    channels = weights[0].shape[2]
    for number in range(count):
        kernel, gamma, beta, mean, variance = weights[5 * number : 5 * number + 5]
        depthwise = number % 2 == 1
        outputs = channels if depthwise else kernel.shape[3]
        stride = next(strides) if depthwise or number == 0 else 1
        groups = channels if depthwise else 1
        layer = torch.nn.Conv2d(channels, outputs, kernel.shape[0], stride, groups=groups, bias=False)
        layer.weight = tensor(kernel.transpose(2, 3, 0, 1) if depthwise else kernel.transpose(3, 2, 0, 1))
        norm = torch.nn.BatchNorm2d(outputs, eps=0.001)
        norm.weight, norm.bias = tensor(gamma), tensor(beta)
        norm.running_mean, norm.running_var = torch.from_numpy(mean), torch.from_numpy(variance)
        layers += [Same(layer), norm, torch.nn.ReLU()]
        channels = outputs
    dense = torch.nn.Linear(channels, weights[-1].shape[0])
    dense.weight, dense.bias = tensor(weights[-2].T), tensor(weights[-1])
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), dense, torch.nn.Softmax(dim=1)]
    return torch.nn.Sequential(*layers).eval()


STRIDES = {13: (2, 1, 2, 1, 2, 1, 1), 9: (2, 2, 1, 2, 1)}
"""Of the first convolution and the depthwise ones, by the number of convolutions."""


def litert_torch(job: Job) -> dict[str, Any]:
    """litert-torch (earlier: ai-edge-torch): PyTorch models, quantized with the PT2E quantizer of the package.

    It gets the same network built in PyTorch with the same weights (weights.npz), for the depthwise-separable networks.
    """
    if job.about["network"] != "separable":
        raise UnsupportedError("does not read Keras or ONNX files; it reads PyTorch modules")
    import litert_torch
    import torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from litert_torch.quantize.quant_config import QuantConfig
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    with np.load(job.subject / "weights.npz") as stored:
        weights = [stored[name] for name in stored.files]
    module = built(weights, (len(weights) - 2) // 5)
    samples = torch.from_numpy(job.array("calibration").transpose(0, 3, 1, 2).copy())
    with np.load(job.subject / "reference.npz") as stored:
        expected = stored["arr_0"][:4]
    test = torch.from_numpy(job.array("test")[:4].transpose(0, 3, 1, 2).copy())
    difference = float(np.abs(module(test).detach().numpy() - expected).max())
    if difference > 1e-3:
        raise RuntimeError(f"the network built in PyTorch differs from the Keras model by {difference:.2g}")
    quantizer = PT2EQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    example = (samples[:1],)
    prepared = prepare_pt2e(torch.export.export(module, example).module(), quantizer)
    for sample in samples:
        prepared(sample[None])
    converted = convert_pt2e(prepared, fold_quantize=False)
    model = litert_torch.convert(converted, example, quant_config=QuantConfig(pt2e_quantizer=quantizer))
    model.export(str(job.folder / MODEL))
    return {"facts": {"model": "the network built again in PyTorch", "difference": difference}}


EPOCHS, BATCH_SIZE, LEARNING_RATE = 6, 64, 0.0005
"""The defaults of our stage."""


def tfmot(job: Job) -> dict[str, Any]:
    """tensorflow-model-optimization: quantization-aware training by `quantize_model`, as its guide describes it.

    It has no post-training quantization, and reads tf-keras models only. For a Keras 3 model it gets the same network
    built in tf-keras with the same weights (weights.npz). It trains as long as our `quantize: {method: qat}`: the same
    samples, epochs, batch size and learning rate; the epoch with the best validation accuracy is kept.
    """
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


WORKERS = (coralline, tflite_converter, onnx2tf, ai_edge_quantizer, litert_torch, tfmot)

if __name__ == "__main__":
    run_worker({worker.__name__: worker for worker in WORKERS}[sys.argv[1]], Path(sys.argv[2]))
