"""The network that a sub-network is, without the parts that it leaves out."""

from __future__ import annotations

from dataclasses import replace

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork
from compress.ir import channel_groups
from compress.ir.keras_graph import Layer, LayerOutput, Network, without_unused_calls


def structure(elastic: ElasticNetwork, sub_network: SubNetwork) -> Network:
    """Return the network with the blocks and kernels of a sub-network, and all channels."""
    cropped: dict[str, Layer | None] = {
        kernel.layer: _cropped(elastic.network.layers[kernel.layer], size)
        for kernel, size in zip(elastic.kernels, sub_network.kernels, strict=True)
    }
    moved = {
        LayerOutput(block.addition): block.start
        for block, stays in zip(elastic.blocks, sub_network.blocks, strict=True)
        if not stays
    }
    return without_unused_calls(elastic.network.edited(cropped, moved))


def extracted(elastic: ElasticNetwork, sub_network: SubNetwork) -> Network:
    """Return the network of a sub-network with the weights that it inherits."""
    kept = elastic.kept_channels(sub_network.widths)
    return channel_groups.remove(structure(elastic, sub_network), elastic.channels, kept)


def _cropped(layer: Layer, size: int) -> Layer:
    """Return a layer with the centre of its kernel."""
    kernel = layer.weights[0]
    margin = (kernel.shape[0] - size) // 2
    if not margin:
        return layer
    centre = kernel[margin:-margin, margin:-margin]
    return replace(layer, weights=(centre, *layer.weights[1:])).configured(kernel_size=[size, size])
