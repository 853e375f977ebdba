"""Count alarms of an autoencoder: `python alarms.py data/temperature.npz runs/temperature/temperature.coralline`.

The error of a window is the mean squared difference between the preprocessed window and the model's output. The
threshold is the largest error of the normal training windows, times `--margin`; no other windows are used for it. Each
model of the bundle gets its own threshold.

Windows above the threshold are one alarm until a day has passed without one. An anomaly is found if a window is above
the threshold that ends in it. A false alarm begins in a test window without an anomaly. Windows that overlap an anomaly
but do not end in it are not counted.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from deploy import Model

HOURS_PER_WEEK = 168
QUIET = 24
"""Hours below the threshold after which the next window above it is a new alarm."""


def errors(model, windows):
    """Return the mean squared error of each window."""
    result = []
    for window in windows:
        expected = np.asarray(model.bundle.preprocessing(window), np.float64).ravel()
        actual = np.asarray(model(window).first, np.float64).ravel()
        result.append(((actual - expected) ** 2).mean())
    return np.array(result)


def count(error, arrays, margin):
    """Return the threshold, the anomalies that are found, and the false alarms.

    Args:
        error: of each window.
        arrays: split, y, hour and anomaly of each window, in the order of time.
        margin: factor of the largest error of the training.
    """
    threshold = error[arrays["split"] == "train"].max() * margin
    above = error > threshold
    hours = arrays["hour"][above]
    begins = np.zeros(len(above), bool)
    begins[np.flatnonzero(above)[np.diff(hours, prepend=-np.inf) > QUIET]] = True
    normal = (arrays["split"] == "test") & (arrays["y"] == 0)
    anomalies = [number for number in np.unique(arrays["anomaly"]) if number >= 0]
    weeks = normal.sum() / HOURS_PER_WEEK
    return {
        "threshold": float(threshold),
        "found": [bool(above[arrays["anomaly"] == number].any()) for number in anomalies],
        "false_alarms": int((begins & normal).sum()),
        "weeks": round(float(weeks), 1),
        "false_alarms_per_week": round(float((begins & normal).sum() / weeks), 2),
    }


def main():
    """Print the counts of the original and of the int8 model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the .npz file of prepare.py")
    parser.add_argument("bundle", type=Path, help="the .coralline file")
    parser.add_argument("--margin", type=float, default=1.0, help="factor of the threshold: larger, fewer alarms")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with np.load(options.data) as file:
        arrays = {name: file[name] for name in file.files}
    results = {}
    for role in ("original", "int8"):
        with Model(options.bundle, role=role, device="cpu") as model:
            results[role] = count(errors(model, arrays["x"]), arrays, options.margin)
    if options.json:
        print(json.dumps(results))
        return
    for role, counts in results.items():
        named = ", ".join(
            f"{number + 1}: {'found' if is_found else 'missed'}" for number, is_found in enumerate(counts["found"])
        )
        print(
            f"{role}: anomalies {named}; {counts['false_alarms']} false alarms in {counts['weeks']} weeks "
            f"({counts['false_alarms_per_week']} per week); threshold {counts['threshold']:.4g}"
        )


if __name__ == "__main__":
    main()
