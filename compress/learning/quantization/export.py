"""Conversion of the working model to a .tflite file: float, or full-integer by a plan.

The fast path (`from_concrete_functions` without the model, batch 1) takes about a
second; `from_keras_model` takes twenty, for the same bytes. A plan reaches the file
through fake quantization after every fused operator and weights that are already on their
grid, so the converter needs no representative data.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError, StageError
from compress.learning.quantization import constant_biases, equalization, fake_quantization, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan, edited, gridded, restructured, unpacked
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build
from compress.model.ir.layer_specs import EMBEDDING, spec_of
from compress.model.ir.passes import separate_gates
from compress.model.ir.passes.decompose import reason_to_stay
from compress.model.ir.tensorflow import split_inputs
from compress.model.tflite.graph import parse

InputType = Literal["int8", "uint8"]


LOOP = "WHILE"
"""A loop, such as a recurrent layer that is not unrolled: it stays float, and the converter's own calibration
(TensorFlow 2.21) crashes the process."""
ATTEMPTS = 20
"""Conversions until no SPLIT is float. TensorFlow 2.21's quantizer leaves a SPLIT float in about every second run, at
random, if not all its outputs are used or it is in an unrolled GRU or LSTM. Files without a float SPLIT are equal."""


class FloatOperatorsError(StageError):
    """Some operators would stay float."""


def convert_float(model: Any) -> bytes:
    """Convert a model to a float32 .tflite file with batch 1.

    Raises:
        ModelError: TensorFlow Lite has no operator for a layer; the message names the layer.
    """
    return _convert(model, None)


def convert(network: Network, plan: QuantizationPlan, io: InputType = "int8") -> bytes:
    """Convert a network to a full-integer .tflite file.

    The network is in canonical form (`ir.passes.fold.canonical`), and the plan has a range for every point.

    Raises:
        FloatOperatorsError: an operator would stay float; the message names its layers.
        StageError: a layer is a loop, which has no 8-bit form.
    """
    changed = gridded(edited(network, plan), plan)
    quantized = fake_quantization.fixed(fake_quantization.insert(changed, quantizer_placement.find(changed), plan))
    return constant_biases.corrected(refuse_float(_quantized(build(quantized), io), changed))


def refuse_mismatch(network: Network, plan: QuantizationPlan) -> None:
    """Refuse a plan that does not fit a network.

    Raises:
        StageError: a range is missing, unknown or not the prescribed one, or an edit does not fit its layer or would
            have no effect.
    """
    # The converter makes one layer of two equal ones: a layer, and its copy for a gate.
    possible = separate_gates.find(network)
    copied = [possible[name].source for name in plan.separated_gates if name in possible]
    unchanged = [name for name in copied if name not in plan.factors]
    network = restructured(network, plan)
    points_by_tensor = quantizer_placement.find(network)
    points = set(points_by_tensor.values())
    wrong = [f"no range for {name}" for name in sorted(points - plan.ranges.keys())]
    wrong += [f"a range for {name}, which is not rounded" for name in sorted(plan.ranges.keys() - points)]
    wrong += [f"no factors for {name}, whose gate it separates" for name in unchanged]
    wrong += _misplaced_edits(network, plan)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise StageError(
            f"the plan is for another model: it has {', '.join(wrong[:3])}{more}",
            hint="quantize without `plan`, which makes a new one",
        )
    for name, prescribed in quantizer_placement.fixed(network, points_by_tensor).items():
        if not np.allclose(plan.ranges[name], prescribed, atol=1e-6):
            low, high = plan.ranges[name]
            raise StageError(
                f"the plan has the range {low:g} to {high:g} for {name}",
                allowed=f"{prescribed[0]:g} to {prescribed[1]:g}, which TensorFlow Lite requires",
            )
    equalization.applied(network, plan.factors)


def _misplaced_edits(network: Network, plan: QuantizationPlan) -> list[str]:
    """Describe the edits of a plan that do not fit the layers of a network."""
    kernels = {name: layer.weights[0].shape for name, layer in network.layers.items() if spec_of(layer).kernel}
    wrong = [f"factors for a layer {name}" for name in plan.factors if name not in network.layers]
    for name, values in plan.bias_shifts.items():
        if name not in kernels or len(values) != network.shapes[LayerOutput(name)][-1]:
            wrong.append(f"{len(values)} bias shifts for a layer {name}")
    for name, text in plan.rounding.items():
        try:
            unpacked(text, kernels[name])
        except (KeyError, ValueError):
            wrong.append(f"rounding for a layer {name}")
    return wrong


def refuse_float(content: bytes, network: Network | None = None) -> bytes:
    """Return the same .tflite file if all its operators are quantized.

    With the network that it was converted from, messages name its layers.

    Raises:
        FloatOperatorsError: some of its operators work on floats.
        StageError: some of its operators are in a loop, or look up rows: the converter's own calibration does not
            support either. (`ir.passes.cut_lookup` removes a lookup at the beginning of a model.)
    """
    left = float_operators(content)
    loops = [name for name, kind in left.items() if kind == LOOP]
    if left:
        layers: list[Layer] = []
        descriptions = []
        if network is not None:
            layers = _layers_of(loops or list(left), network)
            for layer in layers:
                reason = reason_to_stay(network, layer.name)  # of a recurrent layer
                descriptions.append(f"{layer.kind} {layer.name!r}" + (f" ({reason})" if reason else ""))
        inside = f" in {', '.join(descriptions)}" if descriptions else ""
        if loops:
            raise StageError(
                f"{LOOP}{inside} is a loop, which cannot be quantized to 8 bits",
                hint="save the model without masks and with at most 256 time steps, or replace the layers with a loop",
            )
        if any(spec_of(layer) == EMBEDDING for layer in layers):
            raise StageError(
                f"the lookup{inside} takes indices, which cannot be quantized to 8 bits",
                hint="`quantize` cuts off a lookup of the model's only input, without mask_zero; remove any other one: "
                "look up the vectors in your program, and give them to the model as its input",
            )
        shown = "; ".join(f"{kind} ({name})" for name, kind in list(left.items())[:5])
        raise FloatOperatorsError(
            f"{len(left)} operators would stay float{inside}: {shown}",
            hint="replace these layers",
        )
    return content


def _layers_of(tensors: list[str], network: Network) -> list[Layer]:
    """Return the layers that compute some tensors. TensorFlow appends a number to names."""
    parts = [part for name in tensors for path in name.split(";") for part in path.split("/")]
    named = [short if (short := re.sub(r"_\d+$", "", part)) in network.layers else part for part in parts]
    return [network.layers[name] for name in dict.fromkeys(named) if name in network.layers]


def convert_calibrated(model: Any, samples: NDArray[np.float32], io: InputType = "int8") -> bytes:
    """Convert a model to a full-integer .tflite file as the converter alone does it, with ranges that it chooses.

    For models with a layer that consists of several operators (a scaling, some activations), whose inner tensors are
    not in a plan. Operators without an 8-bit form stay float. The samples [n, ...] are preprocessed.
    """
    return _quantized(model, io, samples)


def _quantized(model: Any, io: InputType, samples: NDArray[np.float32] | None = None) -> bytes:
    """Convert a model to 8 bits; repeat the conversion if only a split stayed float."""
    content = _convert(model, io, samples)
    for _ in range(ATTEMPTS - 1):
        left = set(float_operators(content).values())
        if "SPLIT" not in left or left - {"SPLIT", "QUANTIZE", "DEQUANTIZE"}:
            break
        content = _convert(model, io, samples)
    return content


def float_operators(content: bytes) -> Mapping[str, str]:
    """Return the operators of a .tflite file that work on floats: kind by name of the output."""
    graph = parse(content)
    return {
        graph.output_tensors(operator)[0].name: operator.name
        for operator in graph.operators
        if any(
            tensor.dtype.startswith("FLOAT")
            for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator))
        )
    }


def _convert(model: Any, io: InputType | None, samples: NDArray[np.float32] | None = None) -> bytes:
    import tensorflow
    from tensorflow.lite.python.convert_phase import ConverterError

    signature = [tensorflow.TensorSpec((1, *tensor.shape[1:]), tensor.dtype, tensor.name) for tensor in model.inputs]
    function = tensorflow.function(
        lambda *inputs: model(list(inputs) if len(inputs) > 1 else inputs[0], training=False),
        input_signature=signature,
    )
    converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()])
    if io is not None:
        converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
        converter.inference_input_type = converter.inference_output_type = getattr(tensorflow, io)
        # The compiler of 2021 and the TF 2.5 interpreter treat per-channel dense weights as per-tensor ones.
        converter._experimental_disable_per_channel_quantization_for_dense_layers = True
    if samples is not None:
        converter.representative_dataset = lambda: (
            [np.asarray(tensor) for tensor in split_inputs(model.inputs, sample[np.newaxis])] for sample in samples
        )
        converter.target_spec.supported_ops = [tensorflow.lite.OpsSet.TFLITE_BUILTINS_INT8]
    with warnings.catch_warnings():
        # "Statistics for quantized inputs were expected": they are in the graph, as fake quantization.
        warnings.filterwarnings("ignore", message="Statistics for quantized inputs", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        try:
            content: bytes = converter.convert()
        except ConverterError as error:
            raise _unconverted(model, signature, str(error)) from error
    return content


def _unconverted(model: Any, signature: list[Any], said: str) -> ModelError:
    """Return the error for a model that the converter refuses: the operators, and the layers that use them."""
    import tensorflow

    operators = sorted(set(re.findall(r"'tf\.(\w+)' op is neither", said)))
    if not operators:
        return ModelError(f"TensorFlow Lite's converter refuses the model: {' '.join(said.split())[:300]}")
    layers: dict[str, None] = {}

    def watched(layer: Any) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            graph = tensorflow.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            output = layer(*values, **named)
            if any(operation.type in operators for operation in graph.get_operations()[before:]):
                layers[f"{type(layer).__name__} {layer.name!r}"] = None
            return output

        return call

    functional = getattr(model, "_functional", model)  # of a sequential model
    tensorflow.function(
        lambda *inputs: functional._run_through_graph(inputs, operation_fn=watched), autograph=False
    ).get_concrete_function(*signature)
    inside = f" of {', '.join(layers)}" if layers else ""
    return ModelError(f"TensorFlow Lite has no {', '.join(operators)}{inside}", hint="replace these layers")
