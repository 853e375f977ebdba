"""Programs for pycoral: the vendor's examples, the manual's example, and one on every Python that Coral hosts have.

The environment variable CORALLINE_PYCORAL_EXAMPLES names a folder with the vendor's example programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import devices
import numpy as np
import one_op
import pytest
import tiny
from flatbuffers import flexbuffers
from interpreters import executable, interpreters
from paths import ROOT
from PIL import Image

from compress.model.tflite import graph

PAIRS = ROOT.parent / "shared" / "edgetpu" / "pairs"
EXAMPLES = {
    "classify_image.py": ("mobilenet_v1_0.25_128_quant", "--model", "RESULTS"),
    "semantic_segmentation.py": ("deeplabv3_mnv2_dm05_pascal_quant", "--model", "Done."),
    "detect_image.py": ("", "--model", "score: "),
    "movenet_pose_estimation.py": ("movenet_single_pose_lightning_ptq", "--model", "Done."),
}
PROGRAM = """
import json
import numpy as np
from coralline_pycoral.adapters import classify, common, detect, segment
from coralline_pycoral.pipeline.pipelined_model_runner import PipelinedModelRunner
from coralline_pycoral.utils.dataset import read_label_file
from coralline_pycoral.utils.edgetpu import make_interpreter
interpreter = make_interpreter("model.tflite", device="cpu")
interpreter.allocate_tensors()
values = np.arange(16, dtype=np.int8).reshape(4, 4, 1)
common.set_input(interpreter, values)
interpreter.invoke()
best = [(int(c.id), round(float(c.score), 6)) for c in classify.get_classes(interpreter)]
runner = PipelinedModelRunner([interpreter])
runner.push({common.input_details(interpreter, "name"): values[None]})
runner.push({})
(result,) = runner.pop().values()
print(json.dumps([best, result.tolist()]))
"""


def run(python: str, arguments: list[str], folder: Path) -> str:
    command = [python, "-W", "error", *arguments]
    environment = devices.environment()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("interpreter", interpreters())
def test_every_python_gives_the_same(interpreter: str, tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier())
    expected = json.loads(run(sys.executable, ["-c", PROGRAM], tmp_path))
    assert len(expected[0]) == 3
    assert json.loads(run(executable(interpreter), ["-c", PROGRAM], tmp_path)) == expected


@pytest.mark.essential
def test_the_example_of_the_manual(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pycoral.md").read_text(), re.DOTALL)
    (tmp_path / "model.tflite").write_bytes(tiny.classifier(favourite=1))
    image = "import numpy as np\nimage = np.zeros((4, 4, 1), np.int8)\n"
    assert run(sys.executable, ["-c", image + example], tmp_path).split()[0] == "1"


def postprocessed() -> bytes:
    """A detector with TFLite_Detection_PostProcess whose outputs do not depend on its image."""
    cells = np.array([[y, x, 0.2, 0.4] for y in (0.25, 0.75) for x in (0.25, 0.75)], np.float32)
    shapes = {"image": (1, 8, 8, 3), "o0": (1, 10, 4), "o1": (1, 10), "o2": (1, 10), "o3": (1,)}
    constants = {"boxes": np.zeros((1, 4, 4)), "scores": np.linspace(0, 0.9, 12).reshape(1, 4, 3), "anchors": cells}
    dtypes = {"image": "UINT8"}
    tensors = {name: one_op.Tensor(shape, dtypes.get(name, "FLOAT32"), None, ()) for name, shape in shapes.items()}
    for name, values in constants.items():
        tensors[name] = one_op.Tensor(values.shape, "FLOAT32", values, ())
    outputs = ["o0", "o1", "o2", "o3"]
    operator = one_op.Op("TFLite_Detection_PostProcess", list(constants), outputs, custom=True)
    model = one_op.model(tensors, [operator], ["image"], outputs)
    options = {"max_detections": 10, "max_classes_per_detection": 1, "num_classes": 2, "nms_iou_threshold": 0.6}
    options |= {"nms_score_threshold": 0.1, "y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0}
    model.subgraphs[0].operators[0].customOptions = np.frombuffer(flexbuffers.Dumps(options), np.uint8)
    return graph.serialize(SimpleNamespace(source=model))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_vendors_examples(name: str, tmp_path: Path) -> None:
    folder = os.environ.get("CORALLINE_PYCORAL_EXAMPLES")
    if not folder:
        pytest.skip("CORALLINE_PYCORAL_EXAMPLES is not set")
    pair, option, expected = EXAMPLES[name]
    model = PAIRS / pair / "model.tflite"
    if not pair:
        model = tmp_path / "model.tflite"
        model.write_bytes(postprocessed())
    if not model.exists():
        pytest.skip(f"{model} is not there")
    program = (Path(folder) / name).read_text()
    (tmp_path / name).write_text(re.sub(r"\bpycoral\b", "coralline_pycoral", program))
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    assert expected in run(sys.executable, [name, option, str(model), "--input", "photo.png"], tmp_path)
