"""Write the gestures as one .npz file: `python prepare.py SOURCE data/gestures.npz`.

SOURCE is a clone of petewarden/magic_wand_digit_data (petewarden_0.json to petewarden_9.json), or an .npz file with the
same strokes in the same order (x, y, length).

A stroke is the path of the wand's tip: x and y over time. Its length varies, so it is filled up with zeros at the end.
The file has two arrays with splits; both have 70, 10 and 20 strokes of each digit:
    time_split    in the order of recording: the last strokes of each digit are the test split
    random_split  at random: neighbours in time are in different splits, so the result is optimistic
"""

import argparse
import json
from pathlib import Path

import numpy as np

STEPS = 160
"""Length of the series; the longest stroke has 145 steps."""
SHARES = (("train", 70), ("validation", 10), ("test", 20))
"""Strokes of each digit in each split."""


def strokes(source):
    """Return the strokes, arrays [steps, 2], and their digits, in the order of recording."""
    if source.suffix == ".npz":
        with np.load(source) as file:
            x = [stroke[:length] for stroke, length in zip(file["x"], file["length"], strict=True)]
            return x, file["y"].astype(np.int64)
    files = sorted(source.glob("*_[0-9].json"))
    if not files:
        raise SystemExit(f"{source}: no files *_0.json to *_9.json; allowed: a clone of magic_wand_digit_data")
    arrays, digits = [], []
    for file in files:
        for stroke in json.loads(file.read_text())["strokes"]:
            points = [(point["x"], point["y"]) for point in stroke["strokePoints"]]
            arrays.append(np.array(points, np.float32))
            digits.append(int(stroke["label"]))
    return arrays, np.array(digits)


def splits(digits, order):
    """Return the split of each stroke: SHARES of every digit, in the given order."""
    result = np.empty(len(digits), "<U10")
    bounds = np.cumsum([0, *(share for _, share in SHARES)]) / sum(share for _, share in SHARES)
    for digit in np.unique(digits):
        members = order[digits[order] == digit]
        edges = np.round(bounds * len(members)).astype(int)
        for (name, _), first, last in zip(SHARES, edges[:-1], edges[1:], strict=True):
            result[members[first:last]] = name
    return result


def main():
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, or the .npz file")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    options = parser.parse_args()
    series, digits = strokes(options.source)
    x = np.zeros((len(series), STEPS, 2), np.float32)
    for row, stroke in zip(x, series, strict=True):
        row[: len(stroke)] = stroke[:STEPS]
    order = np.arange(len(digits))
    by_time, at_random = splits(digits, order), splits(digits, np.random.default_rng(0).permutation(order))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, x=x, y=digits, time_split=by_time, random_split=at_random)
    print(f"{options.out}: {len(x)} strokes of {len(np.unique(digits))} digits")


if __name__ == "__main__":
    main()
