"""Cut temperature series into windows: `python prepare.py SOURCE data/temperature.npz --series ambient`.

SOURCE is a clone of numenta/NAB, or an .npz file with the same series (ambient_time, ambient_value,
ambient_anomaly_window, and so on).

The file has the windows x [n, values] in degrees Fahrenheit, one for each hour, and for each of them:
    y             1 if the window overlaps an anomaly window of the data, otherwise 0
    split         by time: see `Series`
    hour          the number of the last value of the window; windows with a long gap in time are left out
    anomaly       the number of the anomaly window in which the last value is; -1 for none
"""

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VALIDATION = 0.15
"""The last part of the training range."""


@dataclass(frozen=True)
class Series:
    """The use of a series.

    Attributes:
        file: name of the series in NAB.
        average: values that are averaged to one hour.
        hours: length of a window: a week in an office, which has a weekly rhythm.
        first, last: the range of the training, as fractions of the series.
    """

    file: str
    average: int
    hours: int
    first: float
    last: float


SERIES = {
    "ambient": Series("ambient_temperature_system_failure", 1, 168, 0.0, 0.4),
    "machine": Series("machine_temperature_system_failure", 12, 48, 0.19, 0.55),
}


def read(source, name):
    """Return the times, values and anomaly marks of a series."""
    if source.suffix == ".npz":
        with np.load(source) as file:
            return file[f"{name}_time"], file[f"{name}_value"], file[f"{name}_anomaly_window"].astype(bool)
    key = f"realKnownCause/{SERIES[name].file}.csv"
    table, windows = source / "data" / key, source / "labels" / "combined_windows.json"
    if not table.exists() or not windows.exists():
        raise SystemExit(f"{table} or {windows} does not exist; allowed: a clone of NAB, or the .npz file")
    with table.open(newline="") as stream:
        rows = [(row["timestamp"], float(row["value"])) for row in csv.DictReader(stream)]
    times = np.array([np.datetime64(time.replace(" ", "T"), "s") for time, _ in rows])
    marks = np.zeros(len(rows), bool)
    for start, end in json.loads(windows.read_text())[key]:
        first, last = (np.datetime64(time.replace(" ", "T").partition(".")[0], "s") for time in (start, end))
        marks |= (times >= first) & (times <= last)
    return times, np.array([value for _, value in rows], np.float32), marks


def hourly(times, values, marks, average):
    """Return a series with one value for each hour; an hour is anomalous if one of its values is."""
    count = len(values) // average
    parts = (array[: count * average].reshape(count, average) for array in (times, values, marks))
    times, values, marks = parts
    return times[:, 0], values.mean(axis=1), marks.any(axis=1)


def windows(times, values, marks, series):
    """Return the arrays of the file."""
    ends = np.arange(series.hours, len(values) + 1)
    starts = ends - series.hours
    x = np.lib.stride_tricks.sliding_window_view(values, series.hours).astype(np.float32)
    anomalous = np.array([marks[start:end].any() for start, end in zip(starts, ends, strict=True)])
    duration = (times[ends - 1] - times[starts]).astype("timedelta64[s]").astype(int) / 3600
    # The series have gaps of up to a week: a window must not be a third longer than its values.
    complete = duration < series.hours * 4 / 3
    numbers = np.cumsum(marks & ~np.concatenate([[False], marks[:-1]])) - 1
    first, last = (round(len(values) * share) for share in (series.first, series.last))
    edge = last - round((last - first) * VALIDATION)
    in_range = (starts >= first) & (ends <= last)
    split = np.where(in_range & (ends <= edge), "train", np.where(in_range & (starts >= edge), "validation", "test"))
    # Normal windows across a border of the splits are left out. All anomalous windows are in the test split.
    crossing = ~in_range & (ends > first) & (starts < last) & (split == "test")
    crossing |= in_range & (ends > edge) & (starts < edge)
    kept = complete & ~(crossing & ~anomalous)
    arrays = {
        "x": x,
        "y": anomalous.astype(np.int64),
        "split": np.where(anomalous, "test", split),
        "hour": ends - 1,
        "anomaly": np.where(marks[ends - 1], numbers[ends - 1], -1),
    }
    return {name: array[kept] for name, array in arrays.items()}


def main():
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone, or the .npz file")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--series", choices=SERIES, default="ambient")
    options = parser.parse_args()
    series = SERIES[options.series]
    arrays = windows(*hourly(*read(options.source, options.series), series.average), series)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, **arrays)
    for split in ("train", "validation", "test"):
        chosen = arrays["split"] == split
        print(f"{split}: {chosen.sum()} windows, {arrays['y'][chosen].sum()} of them with an anomaly")
    training = arrays["x"][arrays["split"] == "train"]
    print(f"normalize: {{mean: [{training.mean():.1f}], std: [{training.std():.1f}]}}")


if __name__ == "__main__":
    main()
