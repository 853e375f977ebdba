"""Shared helpers for the tests of the device side: bundles of tiny models, a stand-in for libedgetpu, fake hosts."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from paths import ROOT

from compress.bundling import runner_pyz
from compress.model.tflite import graph
from compress.model.tflite.interpreter import LoadedModel
from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing
from deploy.contract.tensors import TensorDescription

STEPS = [{"resize": {"size": [4, 4]}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]
LABELS = ["apple", "pear", "plum"]


def images(count: int, seed: int = 0, channels: int = 1) -> list[Any]:
    """Return random decoded images, uint8 [6, 5, channels]."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, 6, 5, channels), np.uint8))


def compiled(content: bytes) -> bytes:
    """Return an int8 model that ends with an `edgetpu-custom-op`, which the stand-in for libedgetpu runs as a copy."""
    from ai_edge_litert import schema_py_generated as schema

    parsed = graph.parse(content)
    main, source = parsed.source.subgraphs[0], parsed.source
    output = main.operators[-1].outputs[0]
    raw = schema.TensorT()
    raw.__dict__.update(main.tensors[output].__dict__)
    raw.name = b"on the Edge TPU"
    main.tensors.append(raw)
    main.operators[-1].outputs = [len(main.tensors) - 1]
    code, operator = schema.OperatorCodeT(), schema.OperatorT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode, code.version = b"edgetpu-custom-op", 1
    operator.opcodeIndex, operator.inputs, operator.outputs = (
        len(source.operatorCodes),
        [len(main.tensors) - 1],
        [output],
    )
    operator.customOptions = np.frombuffer(b"stand-in", np.uint8)
    source.operatorCodes.append(code)
    main.operators.append(operator)
    return graph.serialize(parsed)


def models(filters: int = 4) -> dict[str, bytes]:
    """Return the three models of a bundle, by role."""
    int8 = tiny.classifier(filters=filters)
    return {"original": tiny.classifier(int8=False, filters=filters), "int8": int8, "compiled": compiled(int8)}


def described(model: LoadedModel, file: str) -> dict[str, Any]:
    """Return the entry of a model in a manifest."""
    ends = {"inputs": model.inputs, "outputs": model.outputs}
    return {"file": file} | {
        end: [tensor.to_json() for tensor in TensorDescription.of(details)] for end, details in ends.items()
    }


def packed(
    contents: Mapping[str, bytes] | None = None,
    *,
    samples: int = 30,
    machine: str | None = None,
    size: tuple[int, int, int] = (4, 4, 1),
    more: Mapping[str, bytes] | None = None,
    **changes: Any,
) -> bytes:
    """Return a bundle of these models, with golden outputs as `package` makes them.

    Args:
        contents: models by role; all three if not given.
        samples: the size of the evaluation sample; 0: there is none.
        machine: the architecture that the manifest names for the golden outputs.
        size: the input size of the models: height, width, channels.
        more: further members, or others in place of those made here.
        changes: other keys of the manifest.
    """
    contents = models() if contents is None else contents
    steps = [{"resize": {"size": list(size[:2])}}, *STEPS[1:]]
    preprocessing, folder = Preprocessing(steps), Path(tempfile.mkdtemp())
    inputs = images(3, channels=size[2])
    members, entries, outputs = {}, {}, {}
    for role, content in contents.items():
        members[f"{role}.tflite"] = content
        if role == "compiled":
            continue
        (folder / "m.tflite").write_bytes(content)
        model = LoadedModel(folder / "m.tflite", reproducible=True)
        entries[role] = described(model, f"{role}.tflite")
        golden_output = np.concatenate([model.raw(model.feed(preprocessing(image))) for image in inputs])
        members[f"golden-output-{role}.npy"] = bundle.array_bytes(golden_output)
        outputs[role] = f"golden-output-{role}.npy"
    shutil.rmtree(folder)
    if "compiled" in contents:
        entries["compiled"] = {**entries["int8"], "file": "compiled.tflite"}
    golden: dict[str, Any] = {"inputs": [f"golden-input-{index}.npy" for index in range(3)], "outputs": outputs}
    if machine is not None:
        golden["machine"] = machine
    members.update({f"golden-input-{index}.npy": bundle.array_bytes(array) for index, array in enumerate(inputs)})
    manifest: dict[str, Any] = {
        "name": "tiny",
        "coralline": "0.0",
        "task": "classification",
        "labels": LABELS,
        "preprocessing": {"version": VERSION, "digest": preprocessing.digest, "steps": steps},
        "models": entries,
        "golden": golden,
    }
    if samples:
        members["evaluation-inputs-0.npy"] = bundle.array_bytes(np.stack(images(samples, 7, size[2])))
        members["evaluation-labels.npy"] = bundle.array_bytes(np.arange(samples) % 3)
        manifest["evaluation"] = {
            "split": "test",
            "inputs": ["evaluation-inputs-0.npy"],
            "labels": "evaluation-labels.npy",
            "outputs": {},
            "metrics": {},
        }
    return bundle.pack({**manifest, **changes}, {**members, **(more or {})})


@functools.cache
def stand_in() -> Path:
    """Compile the stand-in for libedgetpu.so.1; return its folder. Skip the test if there is no C compiler."""
    compiler = shutil.which("gcc", path="/usr/bin:/usr/local/bin") or shutil.which("cc", path="/usr/bin:/usr/local/bin")
    if compiler is None:
        pytest.skip("there is no C compiler to make the stand-in for libedgetpu")
    folder = Path(tempfile.mkdtemp(prefix="stand-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).with_name("edgetpu_stand_in.c")
    flags = ["-shared", "-fPIC", "-O1", "-w"]
    subprocess.run([compiler, *flags, "-o", folder / "libedgetpu.so.1", source], check=True)
    usb = folder / "libusb-1.0.so.0"
    empty = folder / "empty.c"
    empty.write_text("int usb_stand_in(void) { return 0; }\n")
    subprocess.run([compiler, *flags, f"-Wl,-soname,{usb.name}", "-o", usb, empty], check=True)
    (folder / "without-libusb").mkdir()
    linked = folder / "without-libusb" / "libedgetpu.so.1"
    subprocess.run([compiler, *flags, "-Wl,--no-as-needed", "-o", linked, source, usb], check=True)
    usb.unlink()
    return folder


def host(folder: Path, *, usb: bool = True, speed: str = "5000", node: bool = True) -> Path:
    """Write a fake root folder of a host with one Edge TPU, on USB or on PCIe; return the folder."""
    files = {"proc/loadavg": "0.10 0.20 0.30 1/200 4000", "proc/meminfo": "MemTotal:  1000 kB"}
    if usb:
        place = "sys/bus/usb/devices/1-2/"
        files.update({f"{place}idVendor": "18d1", f"{place}idProduct": "9302", f"{place}speed": speed})
        files.update({f"{place}busnum": "2", f"{place}devnum": "7"})
        path = "dev/bus/usb/002/007"
    else:
        place = "sys/bus/pci/devices/0000:01:00.0/"
        files.update({f"{place}vendor": "0x1ac1", f"{place}device": "0x089a"})
        files[f"{place}current_link_speed"] = "5.0 GT/s PCIe"
        path = "dev/apex_0"
        if node:
            files["sys/class/apex/apex_0/temp"] = "45500"
            link = folder / "sys/class/apex/apex_0/device"
            link.parent.mkdir(parents=True)
            link.symlink_to(folder / place)
    if node:
        files[path] = ""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")
    return folder


def environment(**more: object) -> dict[str, str]:
    """Return the environment of a process on a device: our code on PYTHONPATH, and the variables of a test."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: str(value) for name, value in more.items()},
    }


def runner(
    *arguments: object, python: str = sys.executable, pyz: Path | None = None, **more: object
) -> subprocess.CompletedProcess[str]:
    """Run the command line of the device side, or of this runner.pyz alone."""
    program = ["-m", "deploy"]
    if pyz is not None:
        program, more = [str(pyz)], {"PYTHONPATH": "", **more}
    command = [python, "-W", "error", *program, *map(str, arguments)]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False, timeout=120)


def crashing_runtime(folder: Path) -> Path:
    """Write an `ai_edge_litert` that dies of SIGILL when it loads a model, as on a processor that is too old."""
    package = folder / "ai_edge_litert"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9.9'\n")
    (package / "interpreter.py").write_text(
        "import os, signal\n\n\nclass Interpreter:\n    def __init__(self, model_content=None, **more):\n"
        "        os.kill(os.getpid(), signal.SIGILL)\n"
    )
    return folder


def pyz(path: Path) -> Path:
    """Write the device side as one file, as `package` does; return its path."""
    path.write_bytes(runner_pyz.content())
    return path


def pythons() -> list[str]:
    """Interpreters that have numpy and a TFLite runtime: this one, and those that CORALLINE_PYTHONS names."""
    named = os.environ.get("CORALLINE_PYTHONS", "").split(":")
    return [sys.executable, *(interpreter for interpreter in named if interpreter and _has_runtime(interpreter))]


@functools.cache
def _has_runtime(python: str) -> bool:
    code = "from deploy.runner import runtime; runtime.find()"
    return subprocess.run([python, "-c", code], env=environment(), capture_output=True, check=False).returncode == 0
