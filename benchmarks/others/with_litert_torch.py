"""litert-torch (earlier: ai-edge-torch): PyTorch models, quantized with the PT2E quantizer of the package.

It gets the same network built in PyTorch with the same weights (weights.npz), for the depthwise-separable networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from exchange import MODEL, Job, UnsupportedError, run_worker


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


def work(job: Job) -> dict[str, Any]:
    """Quantize and convert the module."""
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


if __name__ == "__main__":
    run_worker(work)
