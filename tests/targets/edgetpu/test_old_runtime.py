"""Our models in TensorFlow 2.5, whose TFLite interpreter is as old as the Edge TPU compiler.

It refuses the files that the compiler cannot parse, and computes some newer forms wrongly without a message.
Not part of the default tests: `make test-night` installs it in a separate environment and runs them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networks
import numpy as np
import one_op
import pytest
import rewrite_models
from numpy.typing import NDArray
from paths import ROOT, SHARED

from compress.learning.quantization import calibration, export
from compress.model.importers.keras import keras_file
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import edit, graph
from compress.model.tflite.graph import Graph
from compress.targets import load
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.legalize import legalize
from compress.targets.edgetpu.placement import newer_than_boards, place

pytestmark = [pytest.mark.night, pytest.mark.timeout(1800)]

OLD = Path(os.environ.get("CORALLINE_TF25", ROOT / ".venv-tf25" / "bin" / "python"))
TARGET = load("edgetpu")
RANDOM = np.random.default_rng(0)
STEPS = 3
"""The allowed difference of an int8 model between the two runtimes, in steps: kernels round a little differently."""

STEP = {"FLOAT32": 1e-4}
"""The size of a step in a float model."""


def noise(tensor: graph.Tensor) -> NDArray[Any]:
    """Return a random input."""
    if tensor.dtype == "FLOAT32":
        return RANDOM.random(tensor.shape, np.float32)
    low, high = (-128, 128) if tensor.dtype == "INT8" else (0, 256)
    return RANDOM.integers(low, high, tensor.shape).astype(tensor.dtype.lower())


@pytest.fixture
def old(tmp_path: Path) -> Callable[[Mapping[str, Graph]], dict[str, int | str]]:
    """Return a function that runs models in both interpreters, and returns the difference in steps or the refusal."""
    if not OLD.is_file():
        pytest.skip(f"{OLD} is not there: `make test-night` sets it up")

    def run(models: Mapping[str, Graph]) -> dict[str, int | str]:
        feeds = {}
        for name, model in models.items():
            tensor = model.tensors[model.inputs[0]]
            feeds[name] = [noise(tensor) for _ in range(6)]
            (tmp_path / f"{name}.tflite").write_bytes(graph.serialize(model))
            np.save(tmp_path / f"{name}.npy", np.stack(feeds[name]))
        environment = {"PATH": os.environ["PATH"], "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        script = str(Path(__file__).with_name("old_runtime.py"))
        subprocess.run([str(OLD), script, str(tmp_path)], check=True, env=environment, capture_output=True)
        outcomes: dict[str, int | str] = {}
        for name, model in models.items():
            refused = tmp_path / f"{name}.refused"
            if refused.exists():
                outcomes[name] = refused.read_text()
                continue
            theirs = np.load(tmp_path / f"{name}.outputs.npy").astype(float)
            difference = np.abs(theirs - np.stack(rewrite_models.outputs(model, feeds[name]))).max()
            outcomes[name] = int(np.ceil(difference / STEP.get(model.tensors[model.inputs[0]].dtype, 1.0)))
        print(*(f"{name}: {answer}" for name, answer in outcomes.items()), sep="\n")
        return outcomes

    return run


def far(answers: Mapping[str, int | str], steps: int = STEPS) -> dict[str, int | str]:
    """Return the answers of the models that are refused or differ."""
    return {name: answer for name, answer in answers.items() if not isinstance(answer, int) or answer > steps}


def quantized(model: Any, samples: NDArray[np.float32], io: Any = "int8") -> Graph:
    """Return the legalized file that `quantize` makes of a Keras model."""
    folded = canonical(keras_graph.read(model))
    try:
        content = export.convert(folded, calibration.calibrate(folded, samples), io)
    except export.FloatOperatorsError:
        content = export.convert_calibrated(model, samples, io)
    return legalize(graph.parse(content), TARGET, [[sample[None]] for sample in samples[:8]], io=io.upper()).graph


def logits(model: Graph) -> Graph:
    """Return a model without its last SOFTMAX, which makes many steps of one if its input is coarse."""
    last = model.operators[-1]
    if last.name != "SOFTMAX":
        return model
    return edit.extract(model, range(last.index), model.inputs, last.inputs)


def images(*shape: int) -> NDArray[np.float32]:
    return RANDOM.random((24, *shape), np.float32)


def with_activation(keras: Any, activation: Any) -> Any:
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same")(image)
    x = layers.Conv2D(8, 3, strides=2)(activation(x))
    return networks.randomized(keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))))


def activations(keras: Any) -> dict[str, Any]:
    layers, functions = keras.layers, keras.activations
    operations = {
        name: getattr(functions, name) for name in ("elu", "gelu", "selu", "silu", "softplus", "hard_silu", "mish")
    }
    operations |= {"leaky": layers.LeakyReLU(0.1), "layer_norm": layers.LayerNormalization(), "prelu": layers.PReLU()}
    operations |= {
        "grouped": layers.Conv2D(8, 3, groups=4),
        "transposed": layers.Conv2DTranspose(8, 3, 2, activation="relu"),
    }
    operations |= {
        "dilated": layers.Conv2D(8, 3, dilation_rate=2),
        "upsampled": layers.UpSampling2D(interpolation="bilinear"),
    }
    return {
        name: layers.Activation(operation) if not isinstance(operation, layers.Layer) else operation
        for name, operation in operations.items()
    }


def test_every_network_that_quantize_makes(keras: Any, old: Callable[..., dict[str, int | str]]) -> None:
    models = {
        f"{builder.__name__}_{io}": quantized(networks.randomized(builder(keras)), images(12, 12, 3), io)
        for builder in networks.ALL
        for io in ("int8", "uint8")
    }
    assert far(old(models)) == {}


def test_every_activation(keras: Any, old: Callable[..., dict[str, int | str]]) -> None:
    models = {
        name: quantized(with_activation(keras, layer), images(12, 12, 3)) for name, layer in activations(keras).items()
    }
    assert far(old(models)) == {}


def test_float_originals_open_where_we_say(keras: Any, old: Callable[..., dict[str, int | str]]) -> None:
    models = {name: with_activation(keras, layer) for name, layer in activations(keras).items()}
    models |= {builder.__name__: networks.randomized(builder(keras)) for builder in networks.ALL}
    floats = {name: graph.parse(export.convert_float(model)) for name, model in models.items()}
    answers = old(floats)
    newer = {name for name, model in floats.items() if newer_than_boards(model)}
    assert newer == {"gelu", "grouped", "transposed"}
    assert newer == {name for name, answer in answers.items() if isinstance(answer, str)}
    assert far({name: answer for name, answer in answers.items() if name not in newer}) == {}


def test_the_shipped_builder(keras: Any, old: Callable[..., dict[str, int | str]]) -> None:
    from models import digits_cnn

    model = networks.randomized(digits_cnn.build((32, 32, 1), 10))
    assert far(old({"digits": quantized(model, images(32, 32, 1))})) == {}


def test_published_models(keras: Any, old: Callable[..., dict[str, int | str]]) -> None:
    folder = SHARED / "models" / "keras"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    models = {}
    for path in sorted(folder.glob("*.h*5")):
        model = keras_file.load(path, trust=False)
        models[path.stem.replace(".", "_")] = logits(quantized(model, images(*model.inputs[0].shape[1:])))
    assert far(old(models), steps=8) == {}  # dozens of layers, each rounding on its own, fed with noise


def test_every_rewrite(old: Callable[..., dict[str, int | str]]) -> None:
    results = {
        f"{i}_{name}": legalize(build(), TARGET).graph for i, (name, _, build) in enumerate(rewrite_models.CASES)
    }
    assert far(old(results)) == {}


def test_it_refuses_what_check_says_is_refused(old: Callable[..., dict[str, int | str]]) -> None:
    """Except versions that were added in the months between 2.5 and the compiler (ADD 4, ABS 4, MUL 5, PAD 4)."""
    models = {f"{i}_{name}": build() for i, (name, _, build) in enumerate(rewrite_models.CASES)}
    answers = old(models)
    for name, model in models.items():
        failure = place(model, TARGET).failure or ""
        unknown = "Didn't find op" in str(answers[name]) or "out of range" in str(answers[name])
        assert ("TFLite parser" in failure) == unknown or "older_version" in name, (name, failure, answers[name])


def test_it_computes_dense_layers_with_many_scales_wrongly(old: Callable[..., dict[str, int | str]]) -> None:
    """Without this difference, the tests above could not fail."""
    wrong = old({"dense": rewrite_models.dense(100.0)})["dense"]
    assert isinstance(wrong, int)
    assert wrong > 10
    assert isinstance(old({"right": legalize(rewrite_models.dense(100.0), TARGET).graph})["right"], int)


def test_it_knows_every_version_that_we_say_is_mapped(old: Callable[..., dict[str, int | str]]) -> None:
    image = one_op.Tensor((1, 4), "FLOAT64", scales=())  # a type that no kernel supports: the version is checked first
    models = {
        f"{name}_{known.max_version + more}": one_op.one(name, [image], image, known.max_version + more)
        for name, known in CONSTANTS.operators.items()
        for more in (0, 1)
    }
    unknown = {name for name, answer in old(models).items() if "Didn't find op" in str(answer)}
    assert unknown == set(list(models)[1::2])
