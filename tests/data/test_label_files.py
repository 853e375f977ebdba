"""Label files in the forms that models are published with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.core.errors import DataError
from compress.data import label_files

ANIMALS = {0: "cat", 1: "dog", 2: "bird"}
PBTXT = """
# comment
item {
  name: "/m/01g317"
  id: 1
  display_name: "person"
}
item { id: 3 name: 'car' }
"""


def read(content: bytes | str, name: str = "labels.txt") -> label_files.LabelFile:
    return label_files.parsed(content.encode() if isinstance(content, str) else content, name)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("cat\ndog\nbird\n", "labels.txt"),
        ("cat\r\ndog\r\nbird", "labels.txt"),
        ("\ufeffcat\ndog\nbird\n", "labels.txt"),
        ("cat,\ndog,\nbird,\n", "labels.txt"),
        ('"cat",\n"dog",\n"bird"\n', "labels.txt"),
        ("'cat'\n'dog'\n'bird'\n", "labels.txt"),
        ("cat\n\ndog\n\nbird\n\n", "labels.txt"),
        ("\ufeff0  cat\n1  dog\n2  bird\n", "labels.txt"),
        ("0: cat\n1: dog\n2: bird\n", "labels.txt"),
        ("0:cat\n1:dog\n2:bird\n", "labels.txt"),
        ("0,cat\n1,dog\n2,bird\n", "labels.txt"),
        ("0\tcat\n1\tdog\n2\tbird\n", "labels.txt"),
        ('0: "cat",\n1: "dog",\n2: "bird",\n', "labels.txt"),
        ("1 cat\n2 dog\n3 bird\n", "labels.txt"),
        ("2 bird\n0 cat\n1 dog\n", "labels.txt"),
        ("names: [cat, dog, bird]\n", "data.yaml"),
        ("path: x\nnames:\n  0: cat\n  1: dog\n  2: bird\n", "data.yaml"),
        ("nc: 3\nnames:\n- cat\n- dog\n- bird\n", "data.yml"),
        ("names:\n  0: cat\n  1: dog\n  2: bird\n", "labels.txt"),
        ("item { id: 1 name: 'cat' }\nitem { id: 2 name: 'dog' }\nitem { id: 3 name: 'bird' }", "map.pbtxt"),
        ("index,name\n0,cat\n1,dog\n2,bird\n", "labels.csv"),
        ("index,mid,display_name\n0,/m/1,cat\n1,/m/2,dog\n2,/m/3,bird\n", "map.csv"),
        ("name,id\nbird,2\ncat,0\ndog,1\n", "labels.csv"),
        ("cat,0\ndog,1\nbird,2\n", "labels.csv"),
        ("0,cat\n1,dog\n2,bird\n", "labels.csv"),
        ("name\ncat\ndog\nbird\n", "labels.csv"),
        ("cat\ndog\nbird\n", "labels.csv"),
        ("cat,\ndog,\nbird,\n", "labels.csv"),
    ],
)
def test_every_form(content: str, name: str) -> None:
    found = read(content, name)
    assert found.names(3) == ANIMALS
    assert found.unique() == tuple(ANIMALS.values())


def test_names_that_the_forms_leave_as_they_are() -> None:
    assert read("tench, Tinca tinca\n3D printer\n4x4").listed(3) == ("tench, Tinca tinca", "3D printer", "4x4")
    assert read("tench, Tinca tinca\ngoldfish\n", "l.csv").listed(2) == ("tench, Tinca tinca", "goldfish")
    assert read("100 meter dash\n200 meter dash\n").listed(2) == ("100 meter dash", "200 meter dash")
    assert read("Pâté\nBŒUF\n".encode("cp1252")).listed(2) == ("Pâté", "BŒUF")
    assert read("0 golden retriever\n1 cat, black").unique() == ("golden retriever", "cat, black")
    assert read("dog\ncat\n0 \n").unique() == ("dog", "cat", "0")
    assert read("0 cat\n2 dog\n").unique() == ("cat", "1", "dog")


def test_two_classes_of_one_name_as_in_the_labels_of_imagenet() -> None:
    names = [f"bird {index}" for index in range(1001)]
    names[135] = names[518] = "crane"
    found = read("\n".join(f"{index}  {name}" for index, name in enumerate(names)))
    assert found.listed(1001) == tuple(names)
    assert [found.unique()[index] for index in (135, 518)] == ["crane (135)", "crane (518)"]


@pytest.mark.parametrize("unnamed", ["n/a", "N/A", "???", ""])
def test_classes_without_a_name_as_in_the_labels_of_coco(unnamed: str) -> None:
    found = read(f"0  person\n1  {unnamed}\n2  car\n3  {unnamed}\n4  dog\n")
    assert found.names(5) == {0: "person", 2: "car", 4: "dog"}
    assert found.listed(5) == ("person", "1", "car", "3", "dog")


def test_gaps_are_classes_without_a_name() -> None:
    found = read("0  person\n2  car\n5  dog\n")
    assert found.names(6) == {0: "person", 2: "car", 5: "dog"}
    assert found.listed(8) == ("person", "1", "car", "3", "4", "dog", "6", "7")
    with pytest.raises(DataError, match="names 6 classes, and the model has 4"):
        found.names(4)
    assert read("person\n\ncar\n").names(3) == {0: "person", 2: "car"}
    assert read("person\n\ncar\n").names(2) == {0: "person", 1: "car"}


def test_numbers_from_1_belong_to_the_outputs_that_the_model_has() -> None:
    found = read("1 cat\n2 dog\n3 bird\n")
    assert found.listed(3) == ("cat", "dog", "bird")
    assert found.listed(4) == ("0", "cat", "dog", "bird")  # a background comes first
    label_map = read(PBTXT, "label_map.pbtxt")
    assert label_map.names(3) == {0: "person", 2: "car"}
    assert label_map.names(4) == {1: "person", 3: "car"}


def test_a_background_is_named_in_the_message() -> None:
    with pytest.raises(
        DataError, match=r"names 3 classes, and the model has 4; .*insert 'background' as the first name"
    ):
        read("cat\ndog\nbird\n").names(4)
    with pytest.raises(DataError, match=r"names 4 classes, and the model has 3; .*background class.*remove that line"):
        read("background\ncat\ndog\nbird\n").names(3)
    with pytest.raises(DataError, match="choose the label file of this model"):
        read("cat\ndog\nbird\n").names(80)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "l.txt", "names 0 classes"),
        (b"\n\n", "l.txt", "names 0 classes"),
        (b"names: []\n", "l.yaml", "is not a list of names"),
        (b"other: 1\n", "l.yaml", "has no key names"),
        (b"a\nb\0c\n", "l.txt", "line 2: has a NUL byte"),
        ("cat\n".encode("utf-16"), "l.txt", "NUL byte"),
        (b"0: cat\n0: dog\n", "l.txt", "class 0 has two names: 'cat' and 'dog'"),
        (b"item { name: 'cat' }", "l.pbtxt", "an item has no id"),
        (b"index,name\nzero,cat\n", "l.csv", "'zero' is not a class index"),
        (b'a,"b\n', "l.csv", "not a readable CSV file"),
        (b"cat\n" + b"x" * 300, "l.txt", "line 2: has a label of 300 letters"),
    ],
)
def test_what_is_no_label_file(content: bytes, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(content, name)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "l.txt").open("wb") as file:
        file.truncate(label_files.MAX_BYTES + 1)
    with pytest.raises(DataError, match=r"has 4,194,305 bytes; allowed: 4,194,304 bytes"):
        label_files.read(tmp_path / "l.txt")


@given(st.dictionaries(st.integers(0, 30), st.text("abc xyz'é-", min_size=1).map(str.strip).filter(bool), min_size=1))
def test_what_the_writer_writes_is_read_again(names: dict[int, str]) -> None:
    written = label_files.label_map(names)
    plain = {index: label_files._plain(" ".join(name.split())) for index, name in names.items()}
    found = read(written)
    assert dict(found.names(max(names) + 1)) == {index: name for index, name in plain.items() if name}


@given(st.binary(max_size=300), st.sampled_from([".txt", ".csv", ".yaml", ".pbtxt"]))
def test_any_bytes_are_names_or_a_message(content: bytes, suffix: str) -> None:
    try:
        found = label_files.parsed(content, f"labels{suffix}")
    except DataError:
        return
    assert found.listed()
