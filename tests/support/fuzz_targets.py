"""The formats that `make fuzz` attacks: valid files, functions that damage and read them, and the allowed results.

Each target reads a file as the program does. The read must end with a result, or with one of the target's allowed
errors. `benchmarks/fuzz.py` adds limits of time and memory.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import struct
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_mutations as change
import malicious_models
import mutations
import numpy as np
import scenes
import tiny
from data_files import example, form, record, riff
from inspection_text import DifferentError, inspection_text
from paths import ROOT, SHARED
from PIL import Image
from sparse_files import content, encoded, sparse_values

from compress.core.errors import CorallineError

CORPUS = ROOT / "tests" / "corpus"
"""Findings, and inputs that reach new code, one folder for each target. `tests/benchmarks/test_fuzz.py` reads all."""
NOT_SOUND = (
    CorallineError,
    TypeError,
    AttributeError,
    ValueError,
    LookupError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    RuntimeError,
)
DICE = np.random.default_rng(0)
X = DICE.integers(0, 256, (12, 8, 8), np.uint8)
Y = np.arange(12) % 2


@dataclass(frozen=True)
class Seed:
    """A valid file.

    Attributes:
        name: its path in the folder of its data set.
        content: its bytes.
        kind: the kind of data source; empty for other targets.
        is_ours: whether it may be stored in this repository; shared models may not.
    """

    name: str
    content: bytes
    kind: str = ""
    is_ours: bool = True


@dataclass(frozen=True)
class Target:
    """A format.

    Attributes:
        name: its name for `make fuzz TARGET=…`.
        seeds: returns the valid files.
        mutate: returns a damaged file.
        read: reads the file in a folder, and checks the result.
        refusals: the errors with which a read may end.
        share: its part of all mutations.
        prepare: writes the other files that the valid file needs, once for each folder.
        sound: the number of seeds before those of the corpus; each of them must be read without an error.
        native: whether it calls C or C++ code that the program runs in a child process: a crash is contained then.
    """

    name: str
    seeds: Callable[[], Sequence[Seed]]
    mutate: Callable[[Seed, random.Random], bytes]
    read: Callable[[Path, Seed], object]
    refusals: tuple[type[Exception], ...] = (CorallineError,)
    share: float = 1.0
    prepare: Callable[[Path, Seed], object] = field(default=lambda folder, seed: None)
    sound: int = 1
    native: bool = False


def by(mutate: change.Change) -> Callable[[Seed, random.Random], bytes]:
    return lambda seed, dice: mutate(seed.content, dice)


def corpus(target: str, name: str) -> list[Seed]:
    """Return the corpus files of a target as seeds with the given file name."""
    return [Seed(name, path.read_bytes()) for path in sorted((CORPUS / target).glob("*"))]


# ---- models ----


@cache
def tflite_seeds() -> Sequence[Seed]:
    return [
        Seed("m.tflite", tiny.classifier()),
        Seed("m.tflite", tiny.classifier(int8=False)),
        Seed("m.tflite", content(*encoded(sparse_values(), (0, 1, 2), {1: 4}, {1}, "Uint8Vector"), densify=True)),
        *(Seed("m.tflite", path.read_bytes(), is_ours=False) for path in small_real_models()),
        *corpus("tflite", "m.tflite"),
    ]


def small_real_models() -> list[Path]:
    """Return the paths of the small real models in the shared folder, if there are any."""
    paths = sorted(SHARED.glob("**/*.tflite"), key=lambda path: path.stat().st_size)
    return [path for path in paths if path.stat().st_size < 300_000]


@cache
def tflite_model(content: bytes) -> mutations.Model:
    return mutations.Model("seed", content)


@cache
def sound_answer(content: bytes) -> str:
    return inspection_text(content)


def tflite_mutation(seed: Seed, dice: random.Random) -> bytes:
    return mutations.mutate(dice.choice(list(mutations.MUTATORS)), tflite_model(seed.content), dice)


def read_tflite(folder: Path, seed: Seed) -> None:
    """Check, estimate, inspect, write and read again. If only weights differ, the report must equal the seed's."""
    content = (folder / seed.name).read_bytes()
    answer = inspection_text(content)
    explain_if_compiled(content)
    same_size = len(content) == len(seed.content)
    if same_size and only_weights_differ(content, seed) and answer != sound_answer(seed.content):
        raise DifferentError("other weights change what is reported of the structure")


def explain_if_compiled(content: bytes) -> None:
    """Explain a compiled model, as JSON and as a page. Do nothing if the file is not a compiled model."""
    from compress.surface import explanation_page
    from darwinn import compiled_file, explainer

    try:
        file = compiled_file.parse(content)
    except CorallineError:
        return
    result = explainer.explain(file, "compiled")
    json.dumps(result.to_json(), allow_nan=False)
    explanation_page.page(result)


def only_weights_differ(content: bytes, seed: Seed) -> bool:
    try:
        weights = tflite_model(seed.content).weights
    except CorallineError:
        return False
    changed = np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(seed.content, np.uint8))
    return all(any(start <= place < end for start, end in weights) for place in changed.tolist())


def run_tflite(folder: Path, seed: Seed) -> None:
    """Legalize the model, which runs it in the process of the runtime, and read the written file."""
    from compress.model.tflite import graph
    from compress.surface import api

    out = folder / "out.tflite"
    out.unlink(missing_ok=True)
    api.legalize(folder / seed.name, out)
    graph.read(out)


def onnx_seeds() -> Sequence[Seed]:
    from one_node import Model, constant, floats, node, number, whole

    image = {"x": [1, 3, 8, 8]}
    models = [
        Model(
            [
                node("Conv", ["x", floats(4, 3, 3, 3), floats(4)], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]),
                node("BatchNormalization", ["c", floats(4), floats(4), floats(4), floats(4, low=0.1)], ["n"]),
                node("Clip", ["n", number(0), number(6)], ["r"]),
                node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
                node("Flatten", ["p"], ["f"]),
                node("Gemm", ["f", floats(16, 5), floats(5)], ["g"]),
                node("Softmax", ["g"], ["y"], axis=1),
            ],
            image,
            ["y"],
        ),
        Model(
            [
                node("Shape", ["x"], ["s"]),
                node("Gather", ["s", whole(0)], ["b"]),
                node("Concat", ["b", whole(-1)], ["t"], axis=0),
                node("Reshape", ["x", "t"], ["f"]),
                node("Slice", ["f", whole(0), whole(64), whole(1)], ["y"]),
            ],
            image,
            ["y"],
        ),
        Model(
            [
                node("Resize", ["x", "", constant([1.0, 1.0, 2.0, 2.0])], ["u"], mode="nearest"),
                node("Transpose", ["u"], ["t"], perm=[0, 2, 3, 1]),
                node("Pad", ["t", whole(0, 1, 1, 0, 0, 1, 1, 0)], ["p"]),
                node("ReduceMean", ["p"], ["y"], axes=[1, 2], keepdims=0),
            ],
            image,
            ["y"],
        ),
    ]
    return [Seed("m.onnx", model.proto().SerializeToString()) for model in models] + corpus("onnx", "m.onnx")


def read_onnx(folder: Path, seed: Seed) -> None:
    from compress.model.importers.onnx import onnx_graph
    from compress.model.importers.onnx.network import build_network
    from compress.model.importers.onnx.ops.rules import RULES

    graph = onnx_graph.read(folder / seed.name, RULES)
    if not (graph.refused and not graph.nodes):
        build_network(graph, RULES)


def keras_seeds() -> Sequence[Seed]:
    layer = malicious_models.layer
    config = malicious_models.sequential(
        layer("Conv2D", "c", filters=4, kernel_size=[3, 3], strides=[1, 1], padding="same", activation="relu"),
        layer("BatchNormalization", "n", axis=-1, momentum=0.9),
        layer("MaxPooling2D", "p", pool_size=[2, 2]),
        layer("Flatten", "f"),
        layer("Dense", "d", units=3, activation="softmax"),
        shape=(8, 8, 3),
    )
    seeds = []
    for name, case in (("m.keras", malicious_models.archive), ("m.h5", malicious_models.hdf5)):
        with tempfile.TemporaryDirectory() as folder:
            seeds.append(Seed(name, case(config, **weights_of(name))(Path(folder)).read_bytes()))
    return seeds + corpus("keras", "m.keras") + corpus("h5", "m.h5")


def weights_of(name: str) -> dict[str, Any]:
    def make(file: Any) -> None:
        for layer, shape in (("c", (3, 3, 3, 4)), ("d", (64, 3))):
            file.create_dataset(f"model_weights/{layer}/kernel", data=np.zeros(shape, np.float32))

    return {"make": make} if name.endswith("h5") else {"content": malicious_models.weights()}


def keras_mutation(seed: Seed, dice: random.Random) -> bytes:
    if seed.name.endswith(".keras"):
        return change.zip_changes(seed.content, dice)
    if dice.random() < 0.5:
        return change.byte_changes(seed.content, dice)
    start = seed.content.index(b'{"class_name"')
    size = json.JSONDecoder().raw_decode(seed.content[start:].decode("latin-1"))[1]
    config = change.json_changes(seed.content[start : start + size], dice)
    return seed.content[:start] + config[:size].ljust(size) + seed.content[start + size :]


def read_keras(folder: Path, seed: Seed) -> None:
    from compress.model.importers.keras import keras_file

    keras_file.scan(folder / seed.name)


def import_seeds() -> Sequence[Seed]:
    """Return files of Keras (with weights), ONNX and TFLite."""
    from compress.model.ir import tensorflow

    keras = tensorflow.keras()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(2, activation="softmax")]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    seeds = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Keras about numpy 2 and about the old format .h5
        for name in ("m.keras", "m.h5"):
            model.save(Path(folder) / name)
            seeds.append(Seed(name, (Path(folder) / name).read_bytes()))
    return [*seeds, *onnx_seeds(), Seed("m.tflite", tiny.classifier(int8=False))]


def import_mutation(seed: Seed, dice: random.Random) -> bytes:
    if seed.name.endswith(".onnx"):
        return change.protobuf_changes(seed.content, dice)
    return tflite_mutation(seed, dice) if seed.name.endswith(".tflite") else keras_mutation(seed, dice)


def import_tensorflow(folder: Path, seed: Seed) -> None:
    """Import TensorFlow before the first file, so that its time does not count for that file."""
    from compress.model.ir import tensorflow

    tensorflow.keras()


def import_model(folder: Path, seed: Seed) -> None:
    """Import the file as the command does, with TensorFlow and the runtimes."""
    from compress.model.importers import model_file

    file = model_file.read(folder / seed.name)
    if not file.refused:
        model_file.load(file)


def saved_model_seeds() -> Sequence[Seed]:
    from malicious_models import described, sequential

    with tempfile.TemporaryDirectory() as folder:
        path = described(sequential(malicious_models.layer("Dense", "d", units=2)))(Path(folder))
        seeds = [Seed(f"saved/{name}", (path / name).read_bytes()) for name in ("saved_model.pb", "keras_metadata.pb")]
    return seeds + corpus("saved_model", "saved/saved_model.pb")


def prepare_saved_model(folder: Path, seed: Seed) -> None:
    for model_file in saved_model_seeds()[:2]:
        (folder / model_file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / model_file.name).write_bytes(model_file.content)


def read_saved_model(folder: Path, seed: Seed) -> None:
    from compress.model.importers.saved_model import saved_model_folder

    saved_model_folder.read(folder / "saved")


# ---- bundles, pipeline files, requests ----


def bundle_seeds() -> Sequence[Seed]:
    import bundles

    return [Seed("m.coralline", bundles.packed())]


def bundle_mutation(seed: Seed, dice: random.Random) -> bytes:
    """Change the manifest, or a member together with its checksum; or change the bundle's bytes."""
    from deploy.contract import bundle

    if dice.random() < 0.3:
        return change.byte_changes(seed.content, dice)
    opened = bundle.Bundle(seed.content)
    manifest, members = opened.manifest, dict(opened.members)
    if dice.random() < 0.6:
        manifest = json.loads(change.json_changes(json.dumps(manifest).encode(), dice))
    else:
        name = dice.choice(list(members))
        members[name] = change.byte_changes(members[name], dice)
        for entry in manifest["members"]:
            entry["sha256"], entry["size"] = (
                hashlib.sha256(members[entry["name"]]).hexdigest(),
                len(members[entry["name"]]),
            )
    text = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
    return bundle.archive_of({bundle.MANIFEST: text, **members})


def read_bundle(folder: Path, seed: Seed) -> None:
    from deploy.contract import bundle

    content = (folder / seed.name).read_bytes()
    opened = bundle.Bundle(content)
    if opened.manifest["models"].keys() != {"int8"} and content == seed.content:
        raise DifferentError("the sound bundle has other models")


def bundle_refusals() -> tuple[type[Exception], ...]:
    from deploy.contract import bundle

    return (bundle.BundleError,)


def yaml_seeds() -> Sequence[Seed]:
    paths = [ROOT / "pipeline.yaml", *sorted((ROOT / "models").glob("*.yaml"))[:3]]
    return [Seed("p.yaml", path.read_bytes()) for path in paths] + corpus("yaml", "p.yaml")


def read_yaml(folder: Path, seed: Seed) -> None:
    """Read the file, compare its values with those of another loader, and check it against the schema."""
    from ruamel.yaml import YAML

    from compress.pipeline import schema, yaml_file

    path = folder / seed.name
    document = yaml_file.read(path)
    expected = YAML(typ="safe", pure=True).load(path.read_bytes().decode())
    equal = document.value == json.loads(json.dumps(expected, default=str)) or str(document.value) == str(expected)
    if not equal and not dates_in(expected):
        raise DifferentError(f"{document.value!r:.300} instead of {expected!r:.300}")
    schema.load(path)


def dates_in(value: Any) -> bool:
    """Return whether a value is or contains a date, which we read as text, or a key that is not a string."""
    if isinstance(value, dict):
        return any(not isinstance(key, str) for key in value) or any(map(dates_in, value.values()))
    return any(map(dates_in, value)) if isinstance(value, list) else type(value).__module__ == "datetime"


def http_seeds() -> Sequence[Seed]:
    post = (
        b"POST /v1/predict?top=3 HTTP/1.1\r\nHost: localhost:8080\r\nContent-Type: application/x-npz\r\n"
        b"Content-Length: 1234\r\nX-Request-Id: a-1\r\nX-Shape: 1,8,8,3\r\nExpect: 100-continue"
    )
    get = b"GET /metrics HTTP/1.0\r\nConnection: keep-alive\r\nAuthorization: Bearer abc"
    return [Seed("head", post), Seed("head", get), *corpus("http", "head")]


def read_http(folder: Path, seed: Seed) -> None:
    from types import SimpleNamespace

    from waitress.adjustments import Adjustments

    from deploy.service.admission import Admission, RequestError, ServiceLimits
    from deploy.service.connection import Request

    def unexpected(error: Exception) -> None:
        raise error

    admission = Admission(ServiceLimits())
    server = SimpleNamespace(
        settings=ServiceLimits(),
        admit=lambda head, address: admission.check(head, False, address),
        unexpected=unexpected,
    )
    request = Request(server, "127.0.0.1", Adjustments())
    request.received((folder / seed.name).read_bytes() + b"\r\n\r\n")
    if request.error is not None:
        raise RequestError(400, str(request.error))
    if request.head is not None and not 0 <= request.head.length <= ServiceLimits().body_bytes:
        raise DifferentError(f"a body of {request.head.length} bytes")


def http_refusals() -> tuple[type[Exception], ...]:
    from deploy.service.admission import RequestError

    return (RequestError,)


# ---- data ----


def picture(kind: str = "PNG", side: int = 24) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.kron(X[0, :3, :3], np.ones((side // 3, side // 3), np.uint8))).convert("RGB").save(stream, kind)
    return stream.getvalue()


def saved(save: Callable[..., Any], *values: Any, **arrays: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *values, **arrays)
    return stream.getvalue()


def archive() -> bytes:
    stream, image = io.BytesIO(), picture()
    with tarfile.open(fileobj=stream, mode="w") as packed:
        for index in range(8):
            info = tarfile.TarInfo(f"{'ab'[index % 2]}/{index}.png")
            info.size = len(image)
            packed.addfile(info, io.BytesIO(image))
    return stream.getvalue()


SOUND = riff(form(), b"data" + struct.pack("<I", 1600) + DICE.bytes(1600))
TABLE = "\n".join(["t,v,w,kind", *(f"{row},{row / 3:.3f},{-row},{'ab'[row // 8 % 2]}" for row in range(96))]).encode()


def data_seeds(kind: str) -> Sequence[Seed]:
    builders: dict[str, Callable[[], list[Seed]]] = {
        "image": lambda: [
            Seed(f"a/0.{image_format.lower()}", picture(image_format), kind)
            for image_format in ("PNG", "JPEG", "BMP", "WEBP")
        ],
        "wav": lambda: [Seed("a/0.wav", SOUND, kind)],
        "csv": lambda: [Seed("t.csv", TABLE, kind)],
        "table": lambda: [
            Seed(
                "labels.csv",
                b"file,label,split\n" + b"".join(b"%d.png,%d,train\n" % (i, i % 2) for i in range(12)),
                kind,
            )
        ],
        "tfrecord": lambda: [
            Seed("d.tfrecord", b"".join(record(example(image=picture(), label=int(y))) for y in Y), kind)
        ],
        "npz": lambda: [
            Seed("d.npz", saved(np.savez, x=X, y=Y), kind),
            Seed("d.npz", saved(np.savez_compressed, x=X, y=Y), kind),
        ],
        "npy": lambda: [Seed("x.npy", saved(np.save, X), kind), Seed("y.npy", saved(np.save, Y), kind)],
        "tar": lambda: [
            Seed("d.tar", archive(), kind),
            Seed("d.tar.gz", gzip.compress(archive()), kind),
            Seed("d.tar.bz2", bz2.compress(archive()), kind),
            Seed("d.tar.xz", lzma.compress(archive()), kind),
        ],
        "voc": lambda: [
            Seed("Annotations/0000.xml", scenes.annotation("0000.png", scenes.scenes(1)[0][1]).encode(), kind),
            Seed("ImageSets/Main/train.txt", b"0000\n0001\n", kind),
        ],
        "coco": lambda: [
            Seed(
                "train.json",
                json.dumps(
                    scenes.coco([(f"{at:04}.png", objects) for at, (_, objects) in enumerate(scenes.scenes(6))])
                ).encode(),
                kind,
            )
        ],
        "yolo": lambda: [
            Seed(
                "data.yaml",
                b"path: .\ntrain: images/train\nval: images/val\ntest: images/test\nnames: [block, ring]\n",
                kind,
            ),
            Seed("labels/train/0.txt", b"0 0.5 0.5 0.2 0.3\n1 0.2 0.2 0.1 0.1\n", kind),
        ],
    }
    seeds = builders[kind]()
    return seeds + [Seed(seeds[0].name, seed.content, kind) for seed in corpus(kind, seeds[0].name)]


def prepare_data(folder: Path, seed: Seed) -> None:
    """Write the rest of the data set."""
    if seed.kind == "wav":
        import scipy.signal  # noqa: F401 - resampling imports it, which would count as time of the first file
    kind, image = seed.kind, picture()
    files: dict[str, bytes] = {}
    if kind == "npy":
        files = {"x.npy": saved(np.save, X), "y.npy": saved(np.save, Y)}
    elif kind == "table":
        files = {f"{index}.png": image for index in range(12)}
    elif kind in ("image", "wav"):
        end, content = ("wav", SOUND) if kind == "wav" else ("png", image)
        files = {f"{name}.{end}": content for name in ("a/1", "a/2", "b/0", "b/1", "b/2")}
    elif kind == "voc":
        scenes.as_voc(folder, 4)
    elif kind == "coco":
        scenes.as_coco(folder, (6, 4))
    elif kind == "yolo":
        files = {yolo_seed.name: yolo_seed.content for yolo_seed in data_seeds("yolo")[:2]}
        files |= {f"images/{split}/0.png": image for split in ("train", "val", "test")}
        files |= {f"labels/{split}/0.txt": b"0 0.5 0.5 0.2 0.3\n" for split in ("val", "test")}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def source_of(folder: Path, seed: Seed) -> Any:
    from compress.data import sources
    from compress.data.label_tables import Labels

    path = str(folder)
    factories: dict[str, Callable[[], Any]] = {
        "npz": lambda: sources.Npz(file=f"{path}/d.npz"),
        "npy": lambda: sources.Npy(x=f"{path}/x.npy", y=f"{path}/y.npy"),
        "csv": lambda: sources.Csv(
            path=f"{path}/t.csv", columns=("v", "w"), window=4, label_column="kind", divide="time"
        ),
        "tfrecord": lambda: sources.TfRecord(path=f"{path}/d.tfrecord", image="image", label="label"),
        "tar": lambda: sources.ImageFolder(path=f"{path}/{seed.name}"),
        "table": lambda: sources.ImageFolder(path=path, labels=Labels(table="labels.csv")),
        "image": lambda: sources.ImageFolder(path=path),
        "wav": lambda: sources.Wav(path=path, rate=8000, seconds=0.1, resample=True),
        "voc": lambda: sources.Voc(path=path),
        "coco": lambda: sources.Coco(file=f"{path}/train.json"),
        "yolo": lambda: sources.Yolo(file=f"{path}/data.yaml"),
    }
    return factories[seed.kind]()


def read_data(folder: Path, seed: Seed) -> None:
    """Open the data set, and read all of its samples."""
    from compress.data.dataset import Dataset
    from compress.data.types import SPLITS
    from deploy.contract.preprocessing import Preprocessing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = Dataset(source_of(folder, seed), Preprocessing([{"resize": {"size": [8, 8]}}]), None)
        _ = data.digest
        for split in SPLITS:
            data.raw(split, np.arange(len(data.labels(split))))


def data_target(kind: str, mutate: change.Change, share: float) -> Target:
    return Target(kind, cache(lambda: data_seeds(kind)), by(mutate), read_data, share=share, prepare=prepare_data)


# ---- names and labels ----


def name_seeds() -> Sequence[Seed]:
    return [Seed("labels", "\n".join(["block", "ring", *change.HOSTILE_TEXT]).encode("utf-8", "replace"))]


def read_names(folder: Path, seed: Seed) -> None:
    """Write a text as a message, as output and as a line of the log; no unprintable character may be left."""
    from compress.surface.cli import output
    from deploy.contract import printable

    text = (folder / seed.name).read_bytes().decode("utf-8", "surrogateescape")
    shown = io.StringIO()
    with redirect_stderr(shown), redirect_stdout(shown):
        output.note(f"coralline: {CorallineError(text, where=text, hint=text)}")
        output.write(text)
    if any(printable.UNPRINTABLE.search(line.replace("\t", "")) for line in shown.getvalue().split("\n")):
        raise DifferentError(f"{shown.getvalue()!r:.300} reaches the terminal")
    if printable.UNPRINTABLE.search(printable.line(text)):
        raise DifferentError(f"{printable.line(text)!r:.300} reaches the log")


def targets() -> dict[str, Target]:
    all_targets = [
        Target("http", http_seeds, by(change.http_changes), read_http, http_refusals(), share=34),
        Target("names", name_seeds, by(change.text_changes), read_names, share=8),
        Target("tflite", tflite_seeds, tflite_mutation, read_tflite, share=10),
        Target("tflite_run", tflite_seeds, tflite_mutation, run_tflite, share=0.2),
        Target("import", cache(import_seeds), import_mutation, import_model, share=0.02, prepare=import_tensorflow),
        Target("onnx", cache(onnx_seeds), by(change.protobuf_changes), read_onnx, share=2, native=True),
        Target("keras", cache(keras_seeds), keras_mutation, read_keras, share=4, native=True),
        Target(
            "saved_model",
            cache(saved_model_seeds),
            by(change.protobuf_changes),
            read_saved_model,
            share=6,
            prepare=prepare_saved_model,
        ),
        Target("bundle", cache(bundle_seeds), bundle_mutation, read_bundle, bundle_refusals(), share=12),
        Target("yaml", cache(yaml_seeds), by(change.text_changes), read_yaml, share=1),
        data_target("tfrecord", change.record_changes, 3),
        data_target("wav", change.wav_changes, 4),
        data_target("image", change.png_changes, 4),
        data_target("csv", change.text_changes, 3),
        data_target("table", change.text_changes, 1),
        data_target("npz", change.zip_changes, 3),
        data_target("npy", change.byte_changes, 3),
        data_target("tar", change.byte_changes, 1),
        data_target("voc", change.text_changes, 1),
        data_target("coco", change.json_changes, 1),
        data_target("yolo", change.text_changes, 1),
    ]
    return {target.name: target for target in all_targets}


def damaged(target: Target, seed: int, number: int) -> tuple[Seed, bytes]:
    """Return a valid seed of a target and a damaged file made from it. The same arguments give the same result."""
    dice = random.Random(f"{target.name}:{seed}:{number}")
    chosen = dice.choice(target.seeds())
    try:
        return chosen, target.mutate(chosen, dice)
    except NOT_SOUND:  # a file of the corpus does not have the structure that this damage needs
        return chosen, change.byte_changes(chosen.content, dice)
