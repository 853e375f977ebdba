"""Sort photos by whether they show a person: `python prepare.py SOURCE data/person`.

SOURCE is a clone of lightly-ai/coco128_yolo (train2017 and val2017), a folder of the same layout with YOLO's text files
(class 0 is the person), or a .tar archive of it: images/SPLIT/*.jpg and object_detection/labels/SPLIT/*.txt.

As in the Visual Wake Words data (Chowdhery et al., 2019), a photo is of the class `person` if the box of a person
covers more than 0.5% of it, and otherwise of the class `no_person`. The photos of train2017 are for calibration, those
of val2017 for the test. With `--unsorted`, all photos are written into one folder, without classes.
"""

import argparse
import shutil
import tarfile
import tempfile
from pathlib import Path

LEAST_AREA = 0.005
PERSON = "0"
SPLITS = (("train2017", "train"), ("val2017", "test"))


def label(file):
    """Return the class of a photo by its text file."""
    rows = [row.split() for row in file.read_text().splitlines()] if file.exists() else []
    areas = [float(row[3]) * float(row[4]) for row in rows if row and row[0] == PERSON]
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
    parser.add_argument("--unsorted", action="store_true", help="write all photos into one folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.source
        if source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
            source = Path(folder)
        counts = (copy_photos if options.unsorted else sort_photos)(source, options.out)
    if not counts:
        raise SystemExit(f"{options.source}: no photos in images/train2017; allowed: a clone of coco128_yolo")
    for (split, class_name), count in sorted(counts.items()):
        print(f"{split}: {count} {class_name}")


if __name__ == "__main__":
    main()
