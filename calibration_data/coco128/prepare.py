"""Sort photos by whether they show a person: `python prepare.py SOURCE data/person`.

SOURCE is a clone of lightly-ai/coco128_yolo (train2017 and val2017), a folder of the same layout with YOLO's text files
(class 0 is the person), or a .tar archive of it: images/SPLIT/*.jpg and object_detection/labels/SPLIT/*.txt.

As in the Visual Wake Words data (Chowdhery et al., 2019), a photo is of the class `person` if the box of a person
covers more than 0.5% of it, and otherwise of the class `no_person`. The photos of train2017 are for calibration, those
of val2017 for the test.

With `--boxes`, the photos are not sorted: train.json and test.json, in the format of COCO, have the boxes of road users
(OBJECTS). With `--unsorted`, all photos are written into one folder, without classes.
"""

import argparse
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

LEAST_AREA = 0.005
PERSON = "0"
OBJECTS = {"0": "person", "1": "bicycle", "2": "car", "3": "motorcycle", "5": "bus", "7": "truck"}
"""Numbers and names of the classes with `--boxes`, in the order of COCO."""
SPLITS = (("train2017", "train"), ("val2017", "test"))


def rows_of(file):
    """Return the rows of a text file: class, x and y of the centre, width, height; as fractions of the photo."""
    return [line.split() for line in file.read_text().splitlines() if line.strip()] if file.exists() else []


def label(file):
    """Return the class of a photo by its text file."""
    areas = [float(row[3]) * float(row[4]) for row in rows_of(file) if row[0] == PERSON]
    return "person" if max(areas, default=0) > LEAST_AREA else "no_person"


def sort_photos(source, out):
    """Copy the photos into folders of splits and classes, and return the number of each."""
    counts = {}
    for name, split in SPLITS:
        for photo in sorted((source / "images" / name).glob("*.jpg")):
            class_name = label(source / "object_detection" / "labels" / name / f"{photo.stem}.txt")
            counts[split, class_name] = counts.get((split, class_name), 0) + 1
            folder = out / split / class_name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photo, folder / photo.name)
    return counts


def write_boxes(source, out):
    """Copy the photos, write the boxes of OBJECTS for each split, and return the number of photos and boxes."""
    from PIL import Image

    counts = {}
    categories = [{"id": number, "name": name} for number, name in enumerate(OBJECTS.values(), 1)]
    for name, split in SPLITS:
        (out / split).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for photo in sorted((source / "images" / name).glob("*.jpg")):
            shutil.copyfile(photo, out / split / photo.name)
            with Image.open(photo) as image:
                width, height = image.size
            file = {"file_name": f"{split}/{photo.name}", "width": width, "height": height}
            images.append({"id": len(images) + 1, **file})
            for row in rows_of(source / "object_detection" / "labels" / name / f"{photo.stem}.txt"):
                if row[0] not in OBJECTS:
                    continue
                x, y, w, h = (float(cell) for cell in row[1:5])
                box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
                entry = {"id": len(annotations) + 1, "image_id": len(images), "bbox": box, "area": box[2] * box[3]}
                annotations.append({**entry, "category_id": [*OBJECTS].index(row[0]) + 1, "iscrowd": 0})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (out / f"{split}.json").write_text(json.dumps(content))
        if images:
            counts |= {(split, "photos"): len(images), (split, "boxes"): len(annotations)}
    return counts


def copy_photos(source, out):
    """Copy all photos into one folder, and return their number."""
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, _ in SPLITS:
        for photo in sorted((source / "images" / name).glob("*.jpg")):
            shutil.copyfile(photo, out / photo.name)
            count += 1
    return {("photos", "without classes"): count} if count else {}


def main():
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, folder or .tar archive")
    parser.add_argument("out", type=Path, help="the folder to write")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--unsorted", action="store_true", help="write all photos into one folder")
    way.add_argument("--boxes", action="store_true", help="write the boxes of road users")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.source
        if source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
            source = Path(folder)
        write = copy_photos if options.unsorted else write_boxes if options.boxes else sort_photos
        counts = write(source, options.out)
    if not counts:
        raise SystemExit(f"{options.source}: no photos in images/train2017; allowed: a clone of coco128_yolo")
    for (split, class_name), count in sorted(counts.items()):
        print(f"{split}: {count} {class_name}")


if __name__ == "__main__":
    main()
