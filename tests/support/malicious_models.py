"""Keras files and SavedModel folders that are made to do harm."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from data_files import field

WITNESS = "coralline-was-here"
Case = Callable[[Path], Path]


def layer(kind: str, name: str, **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "module": "keras.layers", "registered_name": None, "config": {"name": name, **config}}


def sequential(*layers: Any, shape: tuple[Any, ...] = (4,)) -> dict[str, Any]:
    first = layer("InputLayer", "in", batch_input_shape=[None, *shape])
    config = {"name": "net", "layers": [first, *layers]}
    return {"class_name": "Sequential", "module": "keras", "registered_name": None, "config": config}


def weights(make: Callable[[Any], None] | None = None) -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file.create_group("layers")
        if make:
            make(file)
    return stream.getvalue()


def archive(
    config: Any, version: str = "3.15.1", content: bytes | None = None, others: Mapping[str, bytes] | None = None
) -> Case:
    def make(folder: Path) -> Path:
        text = config if isinstance(config, str) else json.dumps(config)
        text = text.replace("batch_input_shape", "batch_shape") if version.startswith("3") else text
        with zipfile.ZipFile(folder / "m.keras", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("metadata.json", json.dumps({"keras_version": version}))
            file.writestr("config.json", text)
            file.writestr("model.weights.h5", weights() if content is None else content)
            for name, value in (others or {}).items():
                file.writestr(name, value)
        return folder / "m.keras"

    return make


def hdf5(config: Any, make: Callable[[Any], None] | None = None, version: str = "2.4.0") -> Case:
    def write(folder: Path) -> Path:
        with h5py.File(folder / "m.h5", "w") as file:
            group = file.create_group("model_weights")
            group.attrs["layer_names"] = np.array([], "S1")
            file.attrs["model_config"] = config if isinstance(config, str) else json.dumps(config)
            file.attrs["keras_version"] = version
            if make:
                make(file)
        return folder / "m.h5"

    return write


def raw(name: str, content: bytes) -> Case:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def deep(levels: int) -> str:
    inner: Any = layer("Dense", "d", units=2)
    for _ in range(levels):
        inner = sequential(inner)
    return json.dumps(inner)


def doubling(levels: int) -> dict[str, Any]:
    """Return a model that calls a model ten times, which calls a model ten times, and so on."""
    model: dict[str, Any] = layer("Dense", "leaf", units=4)
    for level in range(levels):
        nodes = [[["in", 0, 0, {}]]] + [[[f"n{level}", at, 0, {}]] for at in range(9)]
        input_layer = layer("InputLayer", "in", batch_input_shape=[None, 4])
        inside = {**model, "name": f"n{level}", "inbound_nodes": nodes}
        inside["config"] = {**model["config"], "name": f"n{level}"}
        ends = {"input_layers": [["in", 0, 0]], "output_layers": [[f"n{level}", 9, 0]]}
        layers = [{**input_layer, "name": "in", "inbound_nodes": []}, inside]
        model = {"class_name": "Functional", "config": {"name": f"m{level}", "layers": layers, **ends}}
    return model


def many(count: int) -> dict[str, Any]:
    return sequential(*(layer("Activation", f"a{at}", activation="relu") for at in range(count)))


def chunked(file: Any) -> None:
    for at in range(40):
        file.create_dataset(f"model_weights/w{at}", (2**26,), "f4", chunks=(2**20,), compression="gzip")


def repeated(file: Any) -> None:
    file.create_dataset("model_weights/d/w", data=np.zeros(2**21, np.float32), compression="gzip")
    file["model_weights/d"].attrs["weight_names"] = np.array([b"w"] * 5000)
    file["model_weights"].attrs["layer_names"] = np.array([b"d"])


def cyclic(file: Any) -> None:
    file["model_weights/again"] = file["model_weights"]


def external(file: Any) -> None:
    file["model_weights/d"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft(file: Any) -> None:
    file["model_weights/d"] = h5py.SoftLink("/nowhere")


def references(file: Any) -> None:
    file.create_dataset("model_weights/r", data=[file.ref] * 3, dtype=h5py.ref_dtype)


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (4,))
    file.create_virtual_dataset("model_weights/v", layout)


def raw_external(file: Any) -> None:
    file.create_dataset("model_weights/e", (10,), "u1", external=[("/etc/passwd", 0, 10)])


def bomb(folder: Path) -> Path:
    path = archive(sequential(layer("Dense", "d", units=2)))(folder)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file, file.open("assets/zeros", "w") as stream:
        for _ in range(600):
            stream.write(bytes(2**20))
    return path


def lambda_config() -> dict[str, Any]:
    import base64
    import marshal

    code = marshal.dumps(compile(f"open({WITNESS!r}, 'w')", "x", "eval"))
    function = [base64.b64encode(code).decode(), None, None]
    return sequential(layer("Lambda", "code", function=function, function_type="lambda"))


def operations(function: str, **arguments: Any) -> dict[str, Any]:
    input_layer = {**layer("InputLayer", "in", batch_input_shape=[None, 4], dtype="float32"), "name": "in"}
    op = layer("TFOpLambda", "op", function=function, dtype="float32", trainable=True)
    layers = [{**input_layer, "inbound_nodes": []}, {**op, "name": "op", "inbound_nodes": [["in", 0, 0, arguments]]}]
    ends = {"input_layers": [["in", 0, 0]], "output_layers": [["op", 0, 0]]}
    return {"class_name": "Functional", "config": {"name": "m", "layers": layers, **ends}}


def folder_of(content: bytes, **others: bytes) -> Case:
    def write(folder: Path) -> Path:
        for name, value in {"saved_model.pb": content, **others}.items():
            (folder / "saved" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "saved" / name).write_bytes(value)
        return folder / "saved"

    return write


def described(config: Any) -> Case:
    """A SavedModel whose Keras metadata has this configuration."""
    metadata = json.dumps({"class_name": config["class_name"], "config": config["config"], "keras_version": "2.9.0"})
    node = field(4, b"_tf_keras_network") + field(5, metadata.encode())
    return folder_of(field(2, field(7, b"")), **{"keras_metadata.pb": field(1, node)})


def linked(folder: Path) -> Path:
    path = folder_of(field(2, b""))(folder)
    (path / "variables").symlink_to("/etc")
    return path


DENSE = sequential(layer("Dense", "d", units=2))
HUGE = {
    "filters of 1e12": sequential(layer("Conv2D", "c", filters=10**12, kernel_size=3), shape=(8, 8, 3)),
    "units of 1e9": sequential(layer("Dense", "d", units=10**9)),
    "units after a large image": sequential(
        layer("Flatten", "f"), layer("Dense", "d", units=60_000), shape=(4000, 4000, 3)
    ),
    "a huge image": sequential(layer("Dense", "d", units=2), shape=(60_000, 60_000, 3)),
    "a kernel of 1e5": sequential(layer("Conv2D", "c", filters=64, kernel_size=100_000), shape=(8, 8, 3)),
    "upsampling by 1e9": sequential(layer("UpSampling2D", "u", size=10**9), shape=(8, 8, 3)),
    "upsampling by 4000": sequential(layer("UpSampling2D", "u", size=4000), shape=(80, 80, 3)),
    "repeated 1e12 times": sequential(layer("RepeatVector", "r", n=10**12)),
    "padding of 1e10": sequential(layer("ZeroPadding2D", "z", padding=10**10), shape=(8, 8, 3)),
    "not a number": sequential(layer("Dense", "d", units=float("nan"))),
    "infinite": sequential(layer("Dense", "d", units=float("inf"))),
    "negative": sequential(layer("Dense", "d", units=-5)),
    "a vocabulary of 1e10": sequential(layer("Embedding", "e", input_dim=10**10, output_dim=100)),
    "names that lead out": sequential(layer("Dense", "../../../tmp/x", units=2)),
    "text for a number": sequential(layer("Dense", "d", units="2; import os")),
    "20,000 layers": many(20_000),
    "10 to the 9 calls": doubling(9),
    "100 levels": json.loads(deep(40)),
    "code": lambda_config(),
}
CASES: dict[str, Case] = {
    "empty": raw("m.keras", b""),
    "text": raw("m.h5", b"hello"),
    "pickle": raw("m.h5", b"\x80\x04\x95\x10\x00"),
    "only a magic number": raw("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "zip without an end": raw("m.keras", b"PK\x03\x04" + bytes(1000)),
    "brackets": archive("[" * 500_000),
    "deep": archive(deep(2000) if sys.getrecursionlimit() > 10_000 else "{" + '"a":{' * 3000 + "}" * 3001),
    "zip bomb": bomb,
    "not the weights": archive(DENSE, content=b"x" * 100),
    "pickle inside": archive(DENSE, others={"assets/x.pkl": b"\x80\x04."}),
    "path inside": archive(DENSE, others={"assets/../../../../tmp/" + WITNESS: b"x"}),
    "absolute path inside": archive(DENSE, others={"/tmp/" + WITNESS: b"x"}),
    "external link in the archive": archive(DENSE, content=weights(lambda file: external(file))),
    **{f"{name}, Keras 3": archive(config) for name, config in HUGE.items()},
    **{f"{name}, Keras 2": hdf5(config) for name, config in HUGE.items()},
    **{f"{name}, Keras 3 HDF5": hdf5(config, version="3.3.0") for name, config in list(HUGE.items())[:4]},
    **{
        f"{make.__name__} weights": hdf5(DENSE, make)
        for make in (chunked, repeated, cyclic, external, soft, references, virtual, raw_external)
    },
    "tf.io.write_file": hdf5(operations("io.write_file", contents="x")),
    "tf.numpy_function": hdf5(operations("numpy_function", func="os.system")),
    "tiled 1e9 times": hdf5(operations("tile", multiples=[1, 10**9])),
    "padded by 1e9": hdf5(operations("pad", paddings=[[0, 0], [10**9, 10**9]])),
    "SavedModel, empty": folder_of(b""),
    "SavedModel, noise": folder_of(bytes(range(256)) * 50),
    "SavedModel, only zeros": folder_of(bytes(10**6)),
    "SavedModel, a length beyond the end": folder_of(b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "SavedModel, a link": linked,
    "SavedModel, two graphs": folder_of(field(2, b"") * 2),
    **{f"SavedModel, {name}": described(config) for name, config in list(HUGE.items())},
}
