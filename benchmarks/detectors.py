"""Detector families from their file to the Edge TPU: `make bench-detectors [FILES="a.onnx b.tflite"]`.

    python benchmarks/detectors.py [FILE …] [--photos FOLDER] [--out FILE]

Each file goes through `python -m compress export` with photos without labels, and its bundle through `compress
frigate`. The table says whether the detector is recognized, how many operators of the int8 file would be mapped, its
average precision with the original's objects as labels, its predicted latency, the CPU time and memory of the export,
and whether Frigate can use it, or why not. Without files, the detectors of the shared files are taken, and without a
folder the 128 training photos of coco128: these need the shared files (CORALLINE_SHARED, or ../shared next to the
project). Writes benchmarks/results/detectors.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import repository

from common import commit, markdown
from paths import ROOT, SHARED

RESULTS = repository.RESULTS / "detectors.json"
FILES = ("yolox_nano.onnx", "yunet_s_320_320.onnx", "ultraface_version-RFB-320_simplified.onnx")
"""The detectors of the shared files."""
COLUMNS = (
    "file",
    "boxes",
    "mapped",
    "AP against the original (objects)",
    "latency, ms",
    "CPU, s",
    "memory, MB",
    "Frigate",
)


def ran(words: Sequence[str], log: Path) -> dict[str, Any]:
    """Run a command of Coralline; return its exit code, CPU time and memory, and its last line."""
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-m", "compress", *words], cwd=ROOT, stdout=stream, stderr=stream)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": process.returncode,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_mb": usage.ru_maxrss // 1024,
        "last_line": (log.read_text().strip().splitlines() or [""])[-1],
    }


def exported(file: Path, photos: Path, folder: Path) -> dict[str, Any]:
    """Export a file; return what the report says of it, and what the export cost."""
    done = ran(["export", str(file), "--calibrate", str(photos), "-o", str(folder)], folder.with_suffix(".log"))
    reports = list(folder.glob("*/report.json"))
    if done["exit_code"] or not reports:
        return done
    report = json.loads(reports[0].read_text())
    known = [(stage["facts"].get("specification") or {}).get("detector") for stage in report["stages"]]
    operators = report["placement"]["ops"]
    bundles = list(reports[0].parent.glob("*.coralline"))
    frigate = ran(["frigate", str(bundles[0]), "-o", str(folder / "frigate")], folder / "frigate.log")
    return {
        **done,
        "boxes": known[0]["code"] if known[0] else None,
        "mapped": sum(operator["placement"] == "tpu" for operator in operators),
        "operators": len(operators),
        "objects": sum(row["samples"] for row in report["comparison"]["per_class"]),
        "ap": report["models"]["result"]["measurements"].get("ap", {}).get("value"),
        "latency": report["latency"],
        "frigate": "" if frigate["exit_code"] == 0 else frigate["last_line"],
    }


def row(name: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the cells of a file."""
    cost = [f"{facts['cpu_s']:.0f}", f"{facts['peak_memory_mb']:,}"]
    if "mapped" not in facts:
        return [name, facts["last_line"], "", "", "", *cost, ""]
    return [
        name,
        facts["boxes"] or "not recognized",
        f"{facts['mapped']} of {facts['operators']}",
        "" if facts["ap"] is None else f"{facts['ap']:.3f} ({facts['objects']})",
        f"{facts['latency']['measurement']['value']:.3g} ({facts['latency']['host']})",
        *cost,
        facts["frigate"].rpartition(".coralline: ")[2] or "ready",
    ]


def main() -> int:
    """Export the files, write the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--photos", type=Path, help="a folder of photos")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not (options.files and options.photos) and repository.is_missing(SHARED):
        return 0
    files = [path.resolve() for path in options.files] or [SHARED / "models" / "onnx" / name for name in FILES]
    results: dict[str, Any] = {"commit": commit(), "files": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = options.photos
        if photos is None:
            with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
                archive.extractall(folder, filter="data")
            photos = folder / "images" / "train2017"
        for number, file in enumerate(files):
            print(f"{file.name} ...", file=sys.stderr, flush=True)
            results["files"][file.name] = exported(file, photos.resolve(), folder / str(number))
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(COLUMNS, [row(name, facts) for name, facts in results["files"].items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
