"""The C++ header: a compiler accepts it, and its values are those of the bundle."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_bundles
import tiny
from devices import packed

from compress.cli.main import main
from compress.errors import ModelError, PipelineError
from compress.exporters import cpp_header
from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing

NAMES = ["plain", 'quo"te', "back\\slash", "trigraph??/", "caf\u00e9 1", "new\nline"]
STEPS = [
    {"resize": {"size": [4, 4]}},
    {"scale": {"from": [0, 255], "to": [-1, 1]}},
    {"normalize": {"mean": [0.1, -0.2, 0.3], "std": [0.5, 0.6, 3]}},
]
PROGRAM = """
#include <cstdio>
#include "{0}"
#include "{0}"
namespace m = coralline::{1};
int main() {{
  std::printf("[[");
  for (int p = 0; p < 256; p++)
    for (int c = 0; c < m::kChannels; c++)
      std::printf("%s%d", p + c ? "," : "", static_cast<int>(m::Pixel(static_cast<float>(p), c)));
  std::printf("],[");
  for (int s = -128; s < 128; s++)
    std::printf("%s%.9g", s > -128 ? "," : "", m::Real(static_cast<std::int8_t>(s), m::kOutputs[0]));
  unsigned long sum = 0;
  for (std::size_t i = 0; i < m::kModelSize; i++) sum = sum * 31 % 1000003 + m::kModel[i];
  std::printf("],%lu,%d,[", sum, static_cast<int>(reinterpret_cast<std::uintptr_t>(m::kModel) % 16));
  for (int i = 0; i < m::kLabelCount; i++) {{
    std::printf("%s[", i ? "," : "");
    for (const char* c = m::kLabels[i]; *c; c++)
      std::printf("%s%d", c > m::kLabels[i] ? "," : "", static_cast<unsigned char>(*c));
    std::printf("]");
  }}
  std::printf("],[%d,%d,%d],%d]", m::kHeight, m::kWidth, m::kChannels, m::kInputs[0].zero_point);
}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = tiny.classifier((4, 4, 3))
    preprocessing = {"version": VERSION, "digest": Preprocessing(STEPS).digest, "steps": STEPS}
    content = packed({"int8": model}, size=(4, 4, 3), samples=0, preprocessing=preprocessing, labels=NAMES)
    (tmp_path / "b.coralline").write_bytes(content)
    return tmp_path / "b.coralline"


def compiler() -> str:
    executable = shutil.which("g++", path="/usr/bin:/usr/local/bin") or shutil.which(
        "c++", path="/usr/bin:/usr/local/bin"
    )
    if executable is None:
        pytest.skip("there is no C++ compiler")
    return executable


def test_a_compiler_takes_it(path: Path) -> None:
    out = path.with_name("model.h")
    assert cpp_header.export(path, out) == "int8"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-x", "c++"]
    done = subprocess.run([compiler(), *flags, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_numbers_are_those_of_the_bundle(path: Path, tmp_path: Path) -> None:
    cpp_header.export(path, path.with_name("model.h"))
    (tmp_path / "main.cpp").write_text(PROGRAM.format("model.h", "tiny"))
    command = [compiler(), "-std=c++17", "-Wall", "-Werror", "-o", tmp_path / "main", tmp_path / "main.cpp"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    inputs, scores, digest, aligned, labels, size, zero_point = json.loads(done.stdout)
    opened = bundle.read(str(path))
    model = opened.models["int8"]
    (input_tensor,), (output_tensor,) = model.inputs, model.outputs
    pixels = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 3, axis=2)
    real = Preprocessing(STEPS[1:])(pixels).ravel()
    expected = input_tensor.stored(real)
    off = np.abs(np.array(inputs) - expected)
    assert off.max() <= 1  # the combined steps round once where those of the bundle round twice
    assert (off == 0).mean() > 0.98
    stored = np.arange(-128, 128)
    assert np.array_equal(np.array(scores, np.float32), output_tensor.real(stored))
    total = 0
    for byte in opened.content("int8"):
        total = total * 31 % 1000003 + byte
    assert (digest, aligned, size, zero_point) == (total, 0, [4, 4, 3], input_tensor.zero_point)
    assert [bytes(label).decode() for label in labels] == NAMES


def test_the_compiled_model_comes_first(tmp_path: Path) -> None:
    (tmp_path / "b.coralline").write_bytes(packed(samples=0))
    assert cpp_header.export(tmp_path / "b.coralline", tmp_path / "m.h") == "compiled"
    assert cpp_header.export(tmp_path / "b.coralline", tmp_path / "m.h", "int8") == "int8"
    assert "NOT TESTED ON HARDWARE" in (tmp_path / "m.h").read_text()


def test_names_stay_names(tmp_path: Path) -> None:
    content = packed({"int8": tiny.classifier()}, samples=0, name="9 */ \\\n#error", labels=["a"])
    (tmp_path / "b.coralline").write_bytes(content)
    cpp_header.export(tmp_path / "b.coralline", tmp_path / "m.h")
    command = [compiler(), "-std=c++17", "-fsyntax-only", "-x", "c++", tmp_path / "m.h"]
    assert subprocess.run(command, check=False).returncode == 0
    assert "namespace coralline::m_9_error" in (tmp_path / "m.h").read_text()


def test_what_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(PipelineError, match="no compiled model"):
        cpp_header.export(path, tmp_path / "m.h", "compiled")
    with pytest.raises(ModelError, match="cannot be read"):
        cpp_header.export(tmp_path / "nowhere", tmp_path / "m.h")
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a bundle"):
        cpp_header.export(tmp_path / "x", tmp_path / "m.h")
    opened: Any = bundle.Bundle(packed(samples=0))
    with pytest.raises(ModelError, match="its input is looked up in a table"):
        cpp_header.text(bundle.Bundle(text_bundles.packed()), "int8")
    with pytest.raises(ModelError, match="input image is float32"):
        cpp_header.text(opened, "original")
    opened.manifest["preprocessing"]["steps"].append({"colour": {"to": "bgr"}})
    with pytest.raises(ModelError, match="has the step colour, which the header does not support"):
        cpp_header.text(opened, "int8")
    assert not (tmp_path / "m.h").exists()


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["header", str(path), "-o", str(path.with_name("m.h"))]) == 0
    assert "the int8 model of b.coralline; not tested on hardware" in capsys.readouterr().out
    assert main(["header", str(path), "-o", str(path.with_name("m.h")), "--role", "compiled"]) == 2
