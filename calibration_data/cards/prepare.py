"""Write the boxes of the playing cards as COCO's files: `python prepare.py SOURCE data/cards`.

SOURCE is a clone of EdjeElectronics/TensorFlow-Object-Detection-API-Tutorial-Train-Multiple-Objects-Windows-10
(images/train, images/test, images/train_labels.csv, images/test_labels.csv), or a .tar archive with train/, test/ and
boxes.csv. The splits are those of the data.
"""

import argparse
import csv
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

SPLITS = ("train", "test")
SIDES = ("xmin", "ymin", "xmax", "ymax")


def rows_of(source):
    """Return the rows of the tables of boxes, and the folder of the photos of each split.

    Each row has file, split, width, height, class, xmin, ymin, xmax, ymax.
    """
    images = source / "images"
    if (source / "boxes.csv").exists():
        with (source / "boxes.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        return rows, source
    rows = []
    for split in SPLITS:
        table = images / f"{split}_labels.csv"
        if not table.exists():
            raise SystemExit(f"{table} does not exist; allowed: a clone of the data set, or its .tar archive")
        with table.open(newline="") as stream:
            rows += [{**row, "file": row["filename"], "split": split} for row in csv.DictReader(stream)]
    return rows, images


def coco(rows, names):
    """Return COCO's description of the photos of a split."""
    photos, annotations = {}, []
    for row in rows:
        size = {"width": int(row["width"]), "height": int(row["height"])}
        photo = photos.setdefault(row["file"], {"id": len(photos) + 1, "file_name": row["file"], **size})
        left, top, right, bottom = (float(row[side]) for side in SIDES)
        box = [left, top, right - left, bottom - top]
        entry = {"id": len(annotations) + 1, "image_id": photo["id"], "category_id": names.index(row["class"]) + 1}
        annotations.append({**entry, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    return {"images": list(photos.values()), "annotations": annotations, "categories": categories}


def main():
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, or the .tar archive")
    parser.add_argument("out", type=Path, help="the folder to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.source
        if source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
            source = Path(folder)
        rows, photos = rows_of(source)
        rows = [{**row, "file": Path(row["file"]).name} for row in rows]  # no folder names
        names = sorted({row["class"] for row in rows})
        for split in SPLITS:
            content = coco([row for row in rows if row["split"] == split], names)
            (options.out / split).mkdir(parents=True, exist_ok=True)
            for photo in content["images"]:
                shutil.copyfile(photos / split / photo["file_name"], options.out / split / photo["file_name"])
                photo["file_name"] = f"{split}/{photo['file_name']}"
            (options.out / f"{split}.json").write_text(json.dumps(content))
            print(f"{split}: {len(content['images'])} photos, {len(content['annotations'])} boxes")


if __name__ == "__main__":
    main()
