"""Where a quantized model rounds: the tensors that get a range, and which of them share one.

The model is in canonical form (`training.folding`). TFLite fuses a ReLU into the layer
before it, so only its output is rounded; pooling, reshaping and the like hand on the
range they are given; all parts of a concatenation share one. Integers and truth values
are not rounded.
"""

from __future__ import annotations

from compress.ir.keras_graph import Layer, Network, Tensor, observed, tensors_in
from compress.quantization.plan import FIXED

FUSING = {
    *("Conv1D", "Conv2D", "Conv1DTranspose", "Conv2DTranspose", "DepthwiseConv1D", "DepthwiseConv2D", "Dense"),
    *("Add", "Subtract", "Multiply"),
}
FUSED = {"relu", "relu6"}
HANDING_ON = {
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D", "GlobalMaxPooling2D"),
    *("Flatten", "Reshape", "Permute", "Identity", "Dropout", "SpatialDropout2D", "GaussianNoise", "GaussianDropout"),
    *("ZeroPadding1D", "ZeroPadding2D", "Cropping1D", "Cropping2D", "UpSampling2D"),
    *("GetItem", "Take", "Split", "Unstack", "SpaceToDepth", "DepthToSpace", "Resize"),
}


def activation_of(layer: Layer) -> str | None:
    """The activation that a layer applies and nothing else, by Keras' name; None for other layers."""
    if layer.kind == "Activation":
        activation = layer.config["activation"]
        return activation if isinstance(activation, str) else None
    if layer.kind == "ReLU" and not layer.config.get("negative_slope") and not layer.config.get("threshold"):
        limit = layer.config.get("max_value")
        return {None: "relu", 6.0: "relu6"}.get(limit)
    return {"Softmax": "softmax", "Relu": "relu", "Relu6": "relu6", "Sigmoid": "sigmoid", "Tanh": "tanh"}.get(
        layer.kind
    )


def find(network: Network) -> dict[Tensor, str]:
    """The name of the point of every tensor that is rounded; tensors that share a range share a name."""
    consumers, made = network.consumers(), network.made()
    shown = set(tensors_in(network.outputs))
    source: dict[Tensor, Tensor] = {}  # the tensor whose range this one has
    order = [(layer, call) for layer, call in network.in_order()]
    for layer, call in order:
        for tensor in made[layer.name, call]:
            takers = consumers.get(tensor, [])
            if tensor.output in layer.integers or (tensor.output and not takers and tensor not in shown):
                continue
            followed = [activation_of(network.layers[name]) for name, _ in takers]
            if layer.kind in HANDING_ON:
                source[tensor] = source.get(layer.given(call)[0], tensor)
            elif layer.kind in FUSING and len(takers) == 1 and followed[0] in FUSED and tensor not in shown:
                source[tensor] = Tensor(takers[0][0], takers[0][1])
            else:
                source[tensor] = tensor
    shared = _shared(order, source)
    return {tensor: _name(shared.get(point, point)) for tensor, point in source.items() if point == tensor}


def _shared(order: list[tuple[Layer, int]], source: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """For points that meet in a concatenation: the point that stands for all of them."""
    leader: dict[Tensor, Tensor] = {}

    def lead(tensor: Tensor) -> Tensor:
        while leader.get(tensor, tensor) != tensor:
            tensor = leader[tensor]
        return tensor

    for layer, call in order:
        if layer.kind == "Concatenate":
            joined = [tensor for tensor in (*layer.given(call), Tensor(layer.name, call)) if tensor in source]
            for tensor in joined:
                leader[lead(source[tensor])] = lead(source[joined[-1]])
    return {tensor: lead(tensor) for tensor in leader}


def fixed(network: Network, points: dict[Tensor, str]) -> dict[str, tuple[float, float]]:
    """The points whose range TFLite prescribes: the same for all parts, where a concatenation shares one."""
    found: dict[str, set[tuple[float, float] | None]] = {}
    for tensor, name in points.items():
        layer = network.layers[tensor.layer]
        if layer.kind != "Concatenate":
            found.setdefault(name, set()).add(FIXED.get(activation_of(layer) or ""))
    return {name: one for name, (one, *others) in found.items() if one is not None and not others}


def _name(tensor: Tensor) -> str:
    if tensor.output:
        return f"{tensor.layer}:{tensor.call}:{tensor.output}"
    return tensor.layer if tensor.call == 0 else f"{tensor.layer}:{tensor.call}"


def without_softmax(network: Network) -> Network:
    """The network up to its logits: a softmax or sigmoid at the end hides differences where it is sure."""
    outputs = list(tensors_in(network.outputs))
    ends = [network.layers[tensor.layer] for tensor in outputs]
    given = [end.given(tensor.call)[0] if end.calls else tensor for end, tensor in zip(ends, outputs, strict=True)]
    cut = [
        before if activation_of(end) in ("softmax", "sigmoid") else tensor
        for end, before, tensor in zip(ends, given, outputs, strict=True)
    ]
    return network if cut == outputs else observed(network, cut)
