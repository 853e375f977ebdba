"""Write a table of labels for the groceries: `python prepare.py SOURCE data/groceries`.

SOURCE is a clone of marcusklasson/GroceryStoreDataset (dataset/train.txt, val.txt, test.txt, classes.csv), or a .tar
archive with labels.csv and classes.csv. The table has the numbers of both levels of classes, and their names: `product`
(fine) and `category` (coarse). The splits are those of the data. `--side` makes the photos smaller, which
saves time in every later run.
"""

import argparse
import csv
import shutil
import tarfile
from pathlib import Path

SPLITS = ("train", "val", "test")
COLUMNS = ("file", "split", "fine_id", "coarse_id", "product", "category")


def copy_photo(source, target, side):
    """Copy a photo, or write it with a shorter side of `side` pixels."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if side is None:
        shutil.copyfile(source, target)
        return
    from PIL import Image

    with Image.open(source) as image:
        factor = side / min(image.size)
        size = (round(image.width * factor), round(image.height * factor))
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(target, quality=95)


def from_clone(source, out, side):
    """Copy the photos that the lists of the splits name, and return the rows of the table."""
    dataset = source / "dataset" if (source / "dataset").is_dir() else source
    rows = []
    for split in SPLITS:
        listed = dataset / f"{split}.txt"
        if not listed.exists():
            raise SystemExit(f"{listed} does not exist; allowed: a clone of GroceryStoreDataset, or a .tar archive")
        for line in listed.read_text().splitlines():
            if line.strip():
                file, fine, coarse = (cell.strip() for cell in line.split(","))
                if not (out / file).resolve().is_relative_to(out.resolve()):
                    raise SystemExit(f"{listed}: {file!r} leads out of the folder")
                copy_photo(dataset / file, out / file, side)
                rows.append((file, split, fine, coarse))
    shutil.copyfile(dataset / "classes.csv", out / "classes.csv")
    return rows


def from_archive(source, out):
    """Unpack the archive, and return the rows of its table."""
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    with (out / "labels.csv").open(newline="") as stream:
        return [(row["file"], row["split"], row["fine_id"], row["coarse_id"]) for row in csv.DictReader(stream)]


def names(classes):
    """Return the names of product and category by the number of the product."""
    with classes.open(newline="") as stream:
        rows = csv.DictReader(stream)
        return {row["Class ID (int)"]: (row["Class Name (str)"], row["Coarse Class Name (str)"]) for row in rows}


def main():
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, or the .tar archive")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--side", type=int, help="pixels of the shorter side of the photos; by default unchanged")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.source.is_file():
        rows = from_archive(options.source, options.out)
    else:
        rows = from_clone(options.source, options.out, options.side)
    known = names(options.out / "classes.csv")
    with (options.out / "labels.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        writer.writerows((*row, *known[row[2]]) for row in rows)
    print(f"{options.out}: {len(rows)} photos")


if __name__ == "__main__":
    main()
