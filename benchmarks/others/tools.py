"""The tools that benchmarks/other_tools.py compares."""

from __future__ import annotations

from dataclasses import dataclass

from environments import ENVIRONMENTS

OURS = "coralline"


@dataclass(frozen=True)
class Tool:
    """A tool with its settings.

    Attributes:
        name: of the column in the tables.
        worker: the function in workers.py that runs it.
        environment: its environment; "" for the project's own.
        package: the package that gives the version.
        variant: settings that its worker knows; "" for the default.
        float_files_of: tools whose float .tflite files it reads.
        labelled_only: whether it runs on models with labelled samples only: a training is compared by its accuracy.
    """

    name: str
    worker: str
    environment: str = ""
    package: str = ""
    variant: str = ""
    float_files_of: tuple[str, ...] = ()
    labelled_only: bool = False

    @property
    def version(self) -> str:
        """The version of the tool; that of Coralline is the commit in the results."""
        return ENVIRONMENTS[self.environment].version(self.package) if self.environment else ""


CONVERTER, ONNX2TF = "TFLiteConverter", "onnx2tf"
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(OURS, "coralline"),
        Tool(CONVERTER, "tflite_converter", "tensorflow", "tensorflow"),
        Tool(
            f"{CONVERTER}, dense per tensor",
            "tflite_converter",
            "tensorflow",
            "tensorflow",
            variant="dense per tensor",
        ),
        Tool(ONNX2TF, "onnx2tf", "onnx2tf", "onnx2tf"),
        Tool(f"{ONNX2TF}, per tensor", "onnx2tf", "onnx2tf", "onnx2tf", variant="per tensor"),
        Tool(
            "ai-edge-quantizer",
            "ai_edge_quantizer",
            "ai_edge_quantizer",
            "ai-edge-quantizer",
            float_files_of=(CONVERTER, ONNX2TF),
        ),
        Tool("litert-torch", "litert_torch", "litert_torch", "litert-torch"),
        Tool(f"{OURS}, QAT", "coralline", variant="qat", labelled_only=True),
        Tool("tfmot, QAT", "tfmot", "tfmot", "tensorflow-model-optimization"),
    )
}
"""In the order in which they run: those that read float files are after those that write them."""

UNSUITABLE = (
    (
        "onnxruntime",
        "1.31.1",
        "`quantize_static` writes ONNX files with QuantizeLinear nodes; it writes no .tflite file",
    ),
    ("nncf with openvino", "3.4.0, 2026.4.1", "writes OpenVINO or ONNX files; it writes no .tflite file (not run)"),
    ("nobuco", "0.17.0", "converts PyTorch modules to Keras 2 models; it does not quantize (not run)"),
    (
        "TinyNeuralNetwork",
        "",
        "is not in the package index, where `tinynn` is another project; it reads PyTorch modules (not run)",
    ),
)
"""Tools that were looked at and cannot take part: name, version, reason."""
