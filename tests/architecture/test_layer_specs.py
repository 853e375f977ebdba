"""The table of layer kinds: no other module names Keras layer classes, and every consumer accepts every kind."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.learning.pruning import cost
from compress.learning.quantization import calibration, export, qat
from compress.model.ir import channel_groups, keras_graph
from compress.model.ir.layer_specs import LAYERS, LayerSpec, all_specs, spec_of, spec_of_live
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph
from compress.model.tflite import macs as arithmetic
from compress.targets import load
from compress.targets.edgetpu.legalize import legalize

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).parents[2] / "compress"
TARGET = load("edgetpu")
EXEMPT = ("model/importers", "learning/tfmot", "model/ir/layer_specs", "targets", "model/tflite/macs")
"""Importers create all kinds of layers; tfmot uses tf-keras; targets and macs name operators of TFLite."""
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "SeparableConv1D", "SeparableConv2D"), (8, 3)),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose"), (8, 3)),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), (3,)),
    **dict.fromkeys(("AveragePooling1D", "AveragePooling2D"), (2,)),
    **dict.fromkeys(("SpatialDropout1D", "SpatialDropout2D", "Dropout", "GaussianDropout", "GaussianNoise"), (0.1,)),
    "AlphaDropout": (0.1,),
    "Dense": (8,),
    "Activation": ("relu",),
    "Rescaling": (2.0, 0.5),
    "Resizing": (16, 16),
    "Reshape": ((16, -1),),
    "Permute": ((2, 1, 3),),
    "EinsumDense": ("abcd,de->abce", (8, 8, 8)),
    "GroupNormalization": (2,),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "PReLU": {"shared_axes": [1, 2]},
    "Normalization": {"mean": [0.1] * 8, "variance": [0.5] * 8},
}
NOT_IN_A_FILE = [
    spec.kind for spec in all_specs() if spec.reads_masks or spec.kind in ("InputLayer", "Masking", "Embedding")
]
"""Recurrent layers take sequences (test_unroll.py), cells need a layer, masks and indices are not images."""
KINDS = [spec.kind for spec in all_specs() if spec.kind not in NOT_IN_A_FILE and type(spec).__name__[:4] != "Augm"]


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield string literals that are not docstrings."""
    parents = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    texts = {id(expression) for expression in parents if isinstance(expression, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node


def test_no_other_module_names_a_layer_class(keras: Any) -> None:
    classes = {name for name, value in vars(keras.layers).items() if inspect.isclass(value)}
    mentions = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(EXEMPT):
            continue
        literals = _strings(ast.parse(path.read_text(encoding="utf-8")))
        mentions += [f"{name}:{node.lineno} {node.value}" for node in literals if node.value in classes]
    assert mentions == []


def test_every_kind_is_a_class_of_keras(keras: Any) -> None:
    assert [kind for kind in LAYERS if not hasattr(keras.layers, kind) and not kind.endswith("Cell")] == []


def test_a_custom_class_with_a_name_of_keras_is_unknown(keras: Any) -> None:
    custom = type("Flatten", (keras.layers.Layer,), {"__module__": "somewhere"})
    assert spec_of_live(custom()) == LayerSpec("Flatten")
    assert spec_of_live(keras.layers.Flatten()).keeps_values


def _model(keras: Any, kind: str) -> Any:
    """Return a model with the layer between two convolutions, or between a convolution and a dense layer."""
    spec, layers = LAYERS[kind], keras.layers
    around = layers.Conv1D if spec.rank == 1 else layers.Conv2D
    entrance = keras.Input((8, 3) if spec.rank == 1 else (8, 8, 3))
    x = around(8, 3, padding="same", name="first")(entrance)
    inputs = [x, around(8, 1, name="second")(x)] if spec.channels in ("combines", "concatenates") else x
    y = getattr(layers, kind)(*ARGUMENTS.get(kind, ()), **SETTINGS.get(kind, {}), name="looked_at")(inputs)
    end = layers.Dense(5) if len(y.shape) != len(entrance.shape) else around(5, 1)
    return keras.Model(entrance, end(y))


@pytest.mark.parametrize("kind", KINDS)
def test_every_consumer_takes_every_kind(keras: Any, kind: str) -> None:
    model, spec = _model(keras, kind), LAYERS[kind]
    network = keras_graph.read(model)
    samples = np.random.default_rng(0).random((12, *model.inputs[0].shape[1:]), np.float32)
    steps = canonical(network)
    plan = calibration.calibrate(steps, samples)
    content = export.convert(steps, plan)  # refuses operators that stay float
    if spec.output_range == "input":
        assert "QUANTIZE" not in [operator.name for operator in graph.parse(content).operators]
    assert np.isfinite(np.asarray(qat.simulated(steps, plan)(samples, training=False))).all()
    channels = channel_groups.find_groups(network)
    first = channels.layouts[keras_graph.LayerOutput("first")]
    assert channels.pinned[first].all() == (spec.channels == "unknown")
    everything = sum(_macs(operator) for operator in cost.operators(network, channels, TARGET.cost))
    if type(spec).__name__ != "DecomposedSpec":
        assert everything == arithmetic.total_macs(graph.parse(export.convert_float(model)))


def _macs(operator: cost.PrunableOperator) -> int:
    return operator.macs * len(operator.outputs) * (len(operator.inputs) if operator.mixes else 1)


@pytest.mark.parametrize("kind", [spec.kind for spec in all_specs() if spec.kernels and spec.rank])
def test_channels_of_every_convolution_are_removed_and_priced(keras: Any, kind: str) -> None:
    network = keras_graph.read(_model(keras, kind))
    channels = channel_groups.find_groups(network)
    kept = np.ones(len(channels.group), bool)
    kept[channels.layouts[keras_graph.LayerOutput("first")][:3]] = False
    kept = channels.with_coupled(kept)
    smaller = channel_groups.remove(network, channels, kept)
    built = keras_graph.build(smaller)
    assert built.get_layer("first").filters == 5
    again = channel_groups.find_groups(smaller)
    macs = sum(_macs(operator) for operator in cost.operators(smaller, again, TARGET.cost))
    assert macs == arithmetic.total_macs(graph.parse(export.convert_float(built)))
    arrays = cost.weight_arrays(smaller, again)
    parameters = sum(array.size * int(np.prod([len(layout) for layout in array.layouts])) for array in arrays)
    assert parameters == built.count_params()


def test_a_mean_that_is_an_operation_is_not_taken_for_the_layer_average(keras: Any) -> None:
    image = keras.Input((4, 4, 2))
    model = keras.Model(image, keras.ops.average(image, axis=1))
    network = keras_graph.read(model)
    (mean,) = (layer for layer in network.layers.values() if layer.calls)
    assert spec_of(mean) == LayerSpec(mean.kind)
    x = np.random.default_rng(0).random((2, 4, 4, 2), np.float32)
    np.testing.assert_allclose(keras_graph.build(canonical(network))(x), model(x), rtol=1e-6)


def _operators_between(keras: Any, function: str) -> list[str]:
    """Return the operators between two convolutions in the legalized file of a network with this activation."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3))
    x = keras.layers.Activation(function)(keras.layers.Conv2D(8, 3)(image))
    steps = canonical(keras_graph.read(keras.Model(image, keras.layers.Conv2D(8, 3)(x))))
    samples = np.random.default_rng(0).normal(size=(12, 8, 8, 3)).astype(np.float32)
    content = export.convert(steps, calibration.calibrate(steps, samples))
    feeds = [[sample[np.newaxis]] for sample in samples[:4]]
    rewritten = legalize(graph.parse(content), TARGET, feeds, io="INT8").graph
    return [operator.name for operator in rewritten.operators if operator.name != "CONV_2D"]


@pytest.mark.parametrize("function", ["sigmoid", "hard_sigmoid", "leaky_relu", "silu", "hard_silu", "gelu", "softsign"])
def test_operators_of_an_activation_are_those_of_the_legalized_file(keras: Any, function: str) -> None:
    assert len(_operators_between(keras, function)) == TARGET.cost.activation_operators(function)


@pytest.mark.parametrize("function", ["elu", "mish", "softplus"])
def test_a_fitted_activation_takes_no_more_operators_than_are_counted(keras: Any, function: str) -> None:
    operators = _operators_between(keras, function)
    assert 2 <= operators.count("TANH") <= 4  # the number depends on the range of the inputs
    assert len(operators) <= TARGET.cost.activation_operators(function) <= len(operators) + 10
