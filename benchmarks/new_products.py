"""New products from five photos: accuracy on them, and loss on the old ones (the grocery photos, 81 fine classes).

    python -m benchmarks.new_products [--model FILE.tflite | --bundle FILE.coralline] [--draws N] [--seeds N]

Ten products are held out. A linear head is trained on the embeddings of the training photos of the other 71, and its
temperature and its threshold for "unknown" are fitted on their validation photos, as `package` does. Then each held-out
product is added alone, with five of its training photos, as `runner.pyz learn` does; and all ten together. The test
photos are used for nothing else. `--draws` repeats it with other held-out products.

The default model is the vendor's quantized ImageNet extractor of embeddings (224 x 224), which has not seen these
photos; they are enlarged from 96 pixels. The model of a bundle may have been trained on the held-out products: then the
result is too good. Train the model without these products, which are listed in the result (`held_out`).

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). The embeddings of a model are kept in the
folder for temporary files.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from repository import RESULTS

import numpy as np
from paths import EDGETPU, SHARED
from PIL import Image
from sklearn.linear_model import LogisticRegression

from compress.model.tflite.embedding import OUTPUT
from deploy.contract import bundle, confidence
from deploy.contract.class_heads import LinearHead
from deploy.contract.embedding import References
from deploy.contract.preprocessing import Preprocessing
from deploy.learn import learning
from deploy.learn.learning import LearnSettings
from deploy.runner import runtime
from deploy.runner.runtime import InferenceSession, RuntimeOptions

EXTRACTOR = EDGETPU / "pairs" / "mobilenet_v1_1.0_224_quant_embedding_extractor" / "model.tflite"
HELD_OUT = 10
PHOTOS = 5
LEAST_TEST_PHOTOS = 20
REFERENCES = 5
FALSE_REJECT_RATE = 0.05
REGULARIZATION = 0.1


class Photos(NamedTuple):
    """The photos and their classes.

    Attributes:
        images: uint8 [height, width, 3] each.
        classes: fine classes.
        splits: "train", "val" or "test" of each.
        names: of the classes.
    """

    images: list[Any]
    classes: Any
    splits: Any
    names: dict[int, str]

    def where(self, split: str, products: Any) -> Any:
        """Return the indices of the photos of a split that show one of the products."""
        return np.flatnonzero((self.splits == split) & np.isin(self.classes, products))


class Embedder:
    """A model that gives embeddings, alone or next to scores.

    Attributes:
        digest: of the model and its preprocessing.
        name: of its file.
    """

    def __init__(self, content: bytes, name: str, preprocessing: Preprocessing | None, output: str | None) -> None:
        self.session = InferenceSession(runtime.find(), content, RuntimeOptions())
        self.name = name
        steps = "" if preprocessing is None else preprocessing.digest
        self.digest = hashlib.sha256(content + steps.encode()).hexdigest()
        self._preprocessing = preprocessing
        names = [tensor.name for tensor in self.session.outputs]
        places = [place for place, output_name in enumerate(names) if output_name in (output, OUTPUT)]
        self._place = places[0] if places else 0

    def __call__(self, image: Any) -> Any:
        """Return the embedding of a photo: float32 [values]."""
        tensor = self.session.inputs[0]
        if self._preprocessing is not None:
            stored = tensor.stored(self._preprocessing(image)).reshape(tensor.shape)
        else:
            size = (tensor.shape[2], tensor.shape[1])
            pixels = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
            stored = pixels[np.newaxis] if tensor.dtype == "uint8" else (pixels[np.newaxis] - 128.0).astype(np.int8)
        output = self.session.run_tensors([stored])[self._place]
        return self.session.outputs[self._place].real(output).ravel()


def photos() -> Photos:
    """Return the photos with their fine classes."""
    with tarfile.open(SHARED / "data" / "grocery96.tar") as archive:

        def read(name: str) -> bytes:
            stream = archive.extractfile(name)
            assert stream is not None
            return stream.read()

        table = list(csv.DictReader(read("labels.csv").decode().splitlines()))
        names = csv.DictReader(read("classes.csv").decode().splitlines())
        images = [np.asarray(Image.open(io.BytesIO(read(row["file"]))).convert("RGB")) for row in table]
        return Photos(
            images,
            np.array([int(row["fine_id"]) for row in table]),
            np.array([row["split"] for row in table]),
            {int(row["Class ID (int)"]): row["Class Name (str)"] for row in names},
        )


def embedded(embedder: Embedder, images: list[Any]) -> Any:
    """Return the embeddings of all photos: float32 [n, values]; they are computed once for each model."""
    folder = Path(tempfile.gettempdir()) / "coralline-embeddings"
    path = folder / f"{embedder.digest}.npy"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        rows = np.stack([embedder(image) for image in images])
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
            np.save(stream, rows)
        Path(stream.name).rename(path)
    return np.load(path)


class Shop(NamedTuple):
    """A classifier of the products that are not held out.

    Attributes:
        held: the held-out classes.
        known: the others.
        head: of the known classes.
        references: as in a bundle.
        calibration: as in a bundle.
        labels: the index in the head by class; -1 for held-out ones.
        embeddings: of all photos.
        data: the photos.
    """

    held: Any
    known: Any
    head: LinearHead
    references: dict[str, References]
    calibration: confidence.Confidence
    labels: Any
    embeddings: Any
    data: Photos


def shop(data: Photos, embeddings: Any, draw: int) -> Shop:
    """Return a classifier without ten products that are drawn at random."""
    counts = np.bincount(data.classes[data.splits == "test"])
    candidates = np.flatnonzero(counts >= LEAST_TEST_PHOTOS)
    held = np.sort(np.random.default_rng(draw).permutation(candidates)[:HELD_OUT])
    known = np.setdiff1d(np.arange(len(counts)), held)
    labels = np.full(len(counts), -1)
    labels[known] = np.arange(len(known))
    train, validation = data.where("train", known), data.where("val", known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of iterations
        fitted = LogisticRegression(C=REGULARIZATION, max_iter=300).fit(embeddings[train], labels[data.classes[train]])
    head = LinearHead(fitted.coef_.astype(np.float32), fitted.intercept_.astype(np.float32))
    first = np.concatenate([train[data.classes[train] == product][:REFERENCES] for product in known])
    references = {
        name: References(embeddings[rows], labels[data.classes[rows]])
        for name, rows in (("training", first), ("validation", validation))
    }
    logits = head.logits(embeddings[validation])
    temperature = confidence.fitted_temperature(logits, references["validation"].labels)
    likely = probabilities(logits, temperature).max(axis=1)
    threshold = confidence.rejection_threshold(likely, FALSE_REJECT_RATE)
    calibration = confidence.Confidence("head", temperature, threshold)
    return Shop(held, known, head, references, calibration, labels, embeddings, data)


def probabilities(logits: Any, temperature: float) -> Any:
    """Return calibrated probabilities."""
    return np.exp(confidence.log_softmax(logits, temperature))


def before(it: Shop) -> dict[str, Any]:
    """Return the figures of the classifier without new products."""
    test = it.data.where("test", it.known)
    logits = it.head.logits(it.embeddings[test])
    right = logits.argmax(axis=1) == it.labels[it.data.classes[test]]
    likely = probabilities(logits, it.calibration.temperature).max(axis=1)
    foreign = it.data.where("test", it.held)
    accepted = probabilities(it.head.logits(it.embeddings[foreign]), it.calibration.temperature).max(axis=1)
    threshold = it.calibration.threshold
    return {
        "accuracy": float(right.mean()),
        "temperature": it.calibration.temperature,
        "ece_before": confidence.calibration_error(probabilities(logits, 1.0).max(axis=1), right),
        "ece_after": confidence.calibration_error(likely, right),
        "false_reject": float((likely < threshold).mean()),
        "false_accept": float((accepted >= threshold).mean()),
        "test_photos": len(test),
        "photos_of_held_out_products": len(foreign),
    }


def added(it: Shop, products: Any, method: str, seed: int) -> list[dict[str, Any]]:
    """Add products together; return a row for each of them."""
    chosen = []
    for product in products:
        random = np.random.default_rng([seed, int(product)])
        chosen.append(random.permutation(it.data.where("train", product))[:PHOTOS])
    settings = LearnSettings(method)
    head = learning.new_head([it.embeddings[rows] for rows in chosen], it.head, it.references, settings)

    def logits(rows: Any) -> Any:
        vectors = it.embeddings[rows]
        return np.concatenate([it.head.logits(vectors), head.logits(vectors)], axis=1)

    test = it.data.where("test", it.known)
    labels = it.labels[it.data.classes[test]]
    right = it.head.logits(it.embeddings[test]).argmax(axis=1) == labels
    right_now = logits(test).argmax(axis=1) == labels
    loss = float(right.mean() - right_now.mean())
    result = []
    for place, product in enumerate(products):
        product_logits = logits(it.data.where("test", product))
        is_own = product_logits.argmax(axis=1) == len(it.head.biases) + place
        sure = probabilities(product_logits, it.calibration.temperature).max(axis=1) >= it.calibration.threshold
        result.append(
            {
                "product": it.data.names.get(int(product), str(product)),
                "seed": seed,
                "accuracy": float(is_own.mean()),
                "accuracy_without_unknown": float((is_own & sure).mean()),
                "loss": loss,
                "test_photos": len(product_logits),
            }
        )
    return result


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means, and the worst product (mean over the seeds)."""
    by_product: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_product.setdefault(row["product"], []).append(row)
    worst = [np.mean([row["accuracy"] for row in group]) for group in by_product.values()]
    most = [np.mean([row["loss"] for row in group]) for group in by_product.values()]
    return {
        "accuracy": float(np.mean([row["accuracy"] for row in rows])),
        "accuracy_without_unknown": float(np.mean([row["accuracy_without_unknown"] for row in rows])),
        "loss": float(np.mean([row["loss"] for row in rows])),
        "worst_accuracy": float(min(worst)),
        "largest_loss": float(max(most)),
    }


def of_draw(data: Photos, embeddings: Any, draw: int, seeds: int) -> dict[str, Any]:
    """Measure one choice of held-out products."""
    it = shop(data, embeddings, draw)
    result: dict[str, Any] = {"draw": draw, "before": before(it), "methods": {}}
    result["held_out"] = [data.names.get(int(product), str(product)) for product in it.held]
    for method in learning.METHODS:
        one = [row for seed in range(seeds) for product in it.held for row in added(it, [product], method, seed)]
        together = [row for seed in range(seeds) for row in added(it, it.held, method, seed)]
        result["methods"][method] = {"one": summary(one), "ten_together": summary(together), "rows": one}
        print(f"draw {draw} {method}: {json.dumps(result['methods'][method]['one'])}", flush=True)
        print(
            f"draw {draw} {method}, ten together: {json.dumps(result['methods'][method]['ten_together'])}", flush=True
        )
    print(f"draw {draw} before: {json.dumps(result['before'])}", flush=True)
    return result


def embedder_of(options: argparse.Namespace) -> Embedder:
    """Return the model that the command line names."""
    if options.bundle is None:
        return Embedder(options.model.read_bytes(), options.model.name, None, None)
    opened = bundle.read(str(options.bundle))
    output = None if opened.embedding is None else opened.models["int8"].output(opened.embedding.output)
    tensor = None if output is None else output.tensor
    return Embedder(opened.content("int8"), options.bundle.name, opened.preprocessing, tensor)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=EXTRACTOR, help="a .tflite file with an embedding")
    model.add_argument("--bundle", type=Path, help="a bundle with an embedding")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "new_products.json")
    options = parser.parse_args()
    if not SHARED.exists():
        print(f"skipped: {SHARED} is not there; CORALLINE_SHARED names the folder of shared files")
        return
    embedder = embedder_of(options)
    data = photos()
    embeddings = embedded(embedder, data.images)
    draws = [of_draw(data, embeddings, draw, options.seeds) for draw in range(options.draws)]
    result = {
        "model": embedder.name,
        "photos": PHOTOS,
        "seeds": options.seeds,
        "spread": learning.SPREAD,
        "loss_setting": LearnSettings().loss,
        "draws": draws,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
