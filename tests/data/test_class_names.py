"""Class names and their order: lists, labels files, and names that do not fit the data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pictures import flat, image, pipeline

from compress.core.errors import DataError
from compress.data.sources import Csv, ImageFolder, Npy, Npz, Voc
from compress.pipeline.schema import load
from compress.surface.cli.main import main


def test_a_labels_file_is_relative_to_the_pipeline_and_part_of_the_digest(tmp_path: Path) -> None:
    flat(tmp_path / "photos")
    (tmp_path / "model").mkdir()
    labels = tmp_path / "model" / "labels.txt"
    labels.write_text("0 dog\n1 cat\n")
    source = ImageFolder(path="photos", classes="model/labels.txt").with_paths_from(tmp_path)
    assert source.load().class_names == ("dog", "cat")
    assert source.files()["classes"] == labels
    seen = [source.fingerprint()]
    labels.write_text("0 cat\n1 dog\n")
    assert source.fingerprint() not in seen
    assert ImageFolder(path=str(tmp_path / "photos"), classes=("dog", "cat")).fingerprint() not in seen


def test_names_for_arrays(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("0 dog\n1 cat\n")
    x, y = np.zeros((4, 2, 2)), np.array(["cat", "dog", "dog", "cat"])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    npz = Npz(file="d.npz", classes="labels.txt").with_paths_from(tmp_path)
    npy = Npy(x="x.npy", y="y.npy", classes="labels.txt").with_paths_from(tmp_path)
    for source in (npz, npy):
        assert source.load().class_names == ("dog", "cat")
        assert source.load().labels.tolist() == [1, 0, 0, 1]
        assert source.files()["classes"] == tmp_path / "labels.txt"
    with pytest.raises(DataError, match=r"d\.npz: y\[0\]: unknown class 'cat'; allowed: dog, Cat; 'Cat' differs only"):
        Npz(file=str(tmp_path / "d.npz"), classes=("dog", "Cat")).load()


@pytest.mark.parametrize("similar", ["Golden_Retriever", "golden-retriever", "GOLDEN  RETRIEVER", "goldenretriever"])
def test_a_folder_that_differs_in_case_or_blanks(tmp_path: Path, similar: str) -> None:
    flat(tmp_path)
    image(tmp_path / similar / "1.png")
    message = (
        f"{similar}/1.png: unknown class '{similar}'; allowed: cat, dog, golden retriever; 'golden retriever' differs"
    )
    with pytest.raises(DataError, match=message):
        ImageFolder(path=str(tmp_path), classes=("cat", "dog", "golden retriever")).load()


def test_a_folder_that_is_not_in_the_list(tmp_path: Path) -> None:
    image(flat(tmp_path) / "zebra" / "1.png")
    with pytest.raises(DataError, match=r"zebra/1\.png: unknown class 'zebra'; allowed: cat, dog; correct the label"):
        ImageFolder(path=str(tmp_path), classes=("cat", "dog")).load()
    image(tmp_path / "aog" / "1.png")
    with pytest.raises(DataError, match=r"aog/1\.png: unknown class 'aog'; allowed: cat, dog; did you mean 'dog'\?"):
        ImageFolder(path=str(tmp_path), classes=("cat", "dog")).load()


@pytest.mark.parametrize("empty_folder", [False, True])
def test_classes_without_samples_are_allowed_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], empty_folder: bool
) -> None:
    flat(tmp_path / "photos" / "train")
    image(tmp_path / "photos" / "test" / "cat" / "1.png")
    if empty_folder:
        (tmp_path / "photos" / "train" / "bird").mkdir()
    path = pipeline(tmp_path, {"folder": {"path": "photos", "classes": ["bird", "cat", "dog"]}})
    assert main(["data", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["classes"] == ["bird", "cat", "dog"]
    assert facts["missing"] == ["bird"]
    assert facts["without_samples"] == {"train": ["bird"], "validation": ["bird"], "test": ["bird", "dog"]}
    assert main(["data", str(path)]) == 0
    text = capsys.readouterr().out
    assert "no training sample: bird" in text
    assert "no test sample: bird, dog" in text
    unlisted = ImageFolder(path=str(tmp_path / "photos"))
    if empty_folder:
        with pytest.raises(DataError, match=r"contains no samples.*; .* or list the class names with `classes: "):
            unlisted.load()
    else:
        assert unlisted.load().class_names == ("cat", "dog")


def test_tables_name_the_line_of_an_unknown_class(tmp_path: Path) -> None:
    for index in range(4):
        image(tmp_path / f"{index}.png")
    rows = "".join(f"{index}.png,{['cat', 'dog', 'Dog', 'cat'][index]}\n" for index in range(4))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    source = ImageFolder.model_validate(
        {"path": str(tmp_path), "labels": {"table": "labels.csv"}, "classes": ("cat", "dog")}
    )
    with pytest.raises(DataError, match=r"labels\.csv, line 4: unknown class 'Dog'; allowed: cat, dog; 'dog' differs"):
        source.load()
    (tmp_path / "labels.csv").write_text("file,label\n0.png,0\n1.png,1\n2.png,2\n")
    with pytest.raises(
        DataError, match=r"labels\.csv, line 4: the label 2 is out of range; allowed: 0 to 1 \(2 classes"
    ):
        source.load()


def test_time_series_name_the_line_of_an_unknown_class(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("v,kind\n1,rest\n2,rest\n\n3,walk\n4,walk\n")
    source = Csv(path=str(tmp_path), columns=("v",), window=2, label_column="kind", classes=("rest", "run"))
    with pytest.raises(DataError, match=r"a\.csv, line 5: unknown class 'walk'; allowed: rest, run"):
        source.load()
    (tmp_path / "a.csv").write_text("v,kind\n1,rest\n\n2,\n")
    with pytest.raises(DataError, match=r"a\.csv, line 4: has no label"):
        source.load()


def test_annotations_in_the_order_of_a_labels_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("0 ring\n1 block\n")
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>3</ymax></bndbox>"
    image(tmp_path / "voc" / "a.png")
    (tmp_path / "voc" / "a.xml").write_text(
        f"<annotation>\n<filename>a.png</filename>\n<object><name>block</name>{box}</object>\n</annotation>"
    )
    source = Voc(path="voc", classes="labels.txt").with_paths_from(tmp_path)
    samples = source.load()
    assert samples.class_names == ("ring", "block")
    assert samples.objects is not None
    assert samples.objects[0].classes.tolist() == [1]
    (tmp_path / "labels.txt").write_text("ring\nBlock\n")
    with pytest.raises(
        DataError, match=r"a\.xml, line 3: unknown class 'block'; allowed: ring, Block, as in .*; 'Block' differs"
    ):
        source.load()


def test_a_labels_file_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat(tmp_path / "photos")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "keras_model.h5").write_bytes(b"")
    model = "{file: export/keras_model.h5}"
    path = pipeline(tmp_path, {"folder": {"path": "photos"}}, model)
    assert read_names(path) == ("cat", "dog")
    (tmp_path / "export" / "labels.txt").write_text("0 dog\n1 cat\n")
    assert read_names(path) == ("dog", "cat")
    listed = pipeline(tmp_path, {"folder": {"path": "photos", "classes": ["cat", "dog"]}}, model)
    assert read_names(listed) == ("cat", "dog")
    unlabelled = pipeline(tmp_path, {"folder": {"path": "photos", "labels": "none"}}, model)
    assert read_names(unlabelled) == ()


def read_names(path: Path) -> tuple[str, ...]:
    return load(path).data.class_names
