"""Cut the head off a trained model: what remains ends with its last feature map.

The last feature map is the last tensor that has several positions and that every path to an output crosses. The head
follows it: the pooling and the dense layers of a classifier. In a network without such tensors, the head is the last
layer with weights. A head depends on the old classes and often on the size of the input; other layers usually do not.
"""

from __future__ import annotations

from math import prod

from compress.core.errors import ModelError, nearest
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, subnetwork, tensors_in
from compress.model.ir.layer_specs import spec_of


def without_head(network: Network, last: str | None = None) -> Network:
    """Return the layers of a model up to its last feature map, or to the layer `last`: it becomes the only output.

    Raises:
        ModelError: the model has no layer `last`, or no tensor that all paths to its outputs cross.
    """
    return subnetwork(network, [feature_map(network, last)])


def feature_map(network: Network, last: str | None = None) -> LayerOutput:
    """Return the tensor with the features that a head reads; for arguments and errors see `without_head`."""
    if last is not None:
        if last not in network.layers:
            raise ModelError(
                f"the model has no layer {last!r}",
                allowed="the name of a layer",
                hint=nearest(last, network.layers) or "`python -m compress import MODEL --layers` lists them",
            )
        return LayerOutput(last, max(len(network.layers[last].calls) - 1, 0))
    crossed = _crossed_by_all_paths(network)
    for tensor in reversed(crossed):
        # An open dimension counts as 2, because it can have several positions.
        positions = prod(2 if size is None else size for size in network.shapes[tensor][:-1])
        if positions > 1 and _computes_features(network.layers[tensor.layer]):
            return tensor
    weighted = [index for index, tensor in enumerate(crossed) if network.layers[tensor.layer].weights]
    if not weighted or weighted[-1] == 0 or not network.layers[crossed[weighted[-1] - 1].layer].calls:
        raise ModelError(
            "the features of the model are not found: no layer with weights comes before the last one on all paths",
            hint="name a layer with `model: {head: {after: LAYER}}`",
        )
    return crossed[weighted[-1] - 1]


def _computes_features(layer: Layer) -> bool:
    """Whether features can end with a layer: not with an input, padding, a reshape, dropout or a softmax."""
    spec = spec_of(layer)
    passes_on = spec.pads or spec.random_in_training or spec.keeps_values
    return bool(layer.calls) and not passes_on and spec.activation(layer) != "softmax"


def _crossed_by_all_paths(network: Network) -> list[LayerOutput]:
    """Return the tensors that every path from the inputs to an output crosses, in order of computation.

    Calls are visited in order. A tensor is crossed by all paths when it is the only computed tensor that a later call
    or an output still reads.
    """
    order = [(layer, call) for layer, call in network.in_order()]
    ends = list(tensors_in(network.outputs))
    last_reader = {tensor: len(order) for tensor in ends}
    for position, (layer, call) in enumerate(order):
        for tensor in layer.inputs(call):
            last_reader[tensor] = max(last_reader.get(tensor, -1), position)
    entrances = len(list(tensors_in(network.inputs)))
    by_call = network.outputs_by_call()
    open_tensors: set[LayerOutput] = set()
    inputs_seen = 0
    crossed = []
    for position, (layer, call) in enumerate(order):
        inputs_seen += not layer.calls
        open_tensors.update(tensor for tensor in by_call[layer.name, call] if tensor in last_reader)
        open_tensors = {tensor for tensor in open_tensors if last_reader[tensor] > position}
        if len(open_tensors) == 1 and inputs_seen == entrances:
            crossed.append(next(iter(open_tensors)))
    return crossed
