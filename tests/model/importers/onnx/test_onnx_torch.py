"""PyTorch models through their ONNX export; needs the extra `torch`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.model.importers.onnx import onnx_file

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

pytestmark = pytest.mark.tensorflow


def small(nn: Any) -> Any:
    """Convolutions with norms, a residual, a gate, a depthwise one, upsampling, adaptive pooling, a linear layer."""

    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
            self.norm = nn.BatchNorm2d(channels)
            self.point = nn.Conv2d(channels, channels, 1)
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Hardsigmoid())

        def forward(self, x: Any) -> Any:
            features = self.point(nn.functional.hardswish(self.norm(self.depthwise(x))))
            return x + features * self.gate(features)

    class Small(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU6(),
                nn.MaxPool2d(3, 2, 1),
            )
            self.body = Residual(8)
            self.up = nn.Upsample(scale_factor=2, mode="bilinear")
            self.act = nn.GELU()
            self.pool = nn.AdaptiveAvgPool2d((2, 2))
            self.head = nn.Linear(32, 5)

        def forward(self, x: Any) -> Any:
            x = self.pool(self.act(self.up(self.body(self.stem(x)))))
            return torch.softmax(self.head(x.flatten(1)), 1)

    return Small()


@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
@pytest.mark.parametrize("opset", [13, 18])
def test_a_pytorch_model_is_imported(tmp_path: Path, dynamo: bool, opset: int) -> None:
    if dynamo:
        pytest.importorskip("onnxscript", reason="the exporter of PyTorch 2 needs onnxscript")
        if opset < 18:
            pytest.skip("the exporter of PyTorch 2 begins with opset 18")
    torch.manual_seed(0)
    model = small(torch.nn).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    path = tmp_path / "small.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(1, 3, 32, 32),), path, opset_version=opset, dynamo=dynamo)
    file = onnx_file.read(path)
    assert file.problems == ()
    imported_model, parity = onnx_file.load(file)
    assert parity.max_rel < 1e-5
    kinds = [type(operation).__name__ for operation in imported_model.operations]
    assert "Permute" not in kinds
    assert {"DepthwiseConv2D", "Conv2D", "Dense", "Gelu"} <= set(kinds)
    samples = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(samples).numpy()
    np.testing.assert_allclose(np.asarray(imported_model(samples.numpy().transpose(0, 2, 3, 1))), expected, atol=1e-5)
