"""Keras files and SavedModel folders that are made to do harm: `python benchmarks/hostile_models.py`.

Each case is made in a folder of its own and imported by the command `import` in a process of its own, within
SECONDS and BYTES of memory beyond what an import of a small model takes. It must be refused with exit code 4 and
one message, or, where the damage does no harm, imported. A crash, another exit code, a traceback, a file that a
case tries to write, or a limit reached is a failure. `benchmarks/fuzz.py` damages sound files. Writes
results/hostile_models.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import repository

import h5py
from malicious_models import CASES, DENSE, WITNESS, Case, hdf5

from compress.cli import import_model
from compress.cli import main as command_line

assert import_model, h5py.File  # here, so that no process does it, and is measured with it
RESULTS = repository.RESULTS / "hostile_models.json"
SECONDS, BYTES = 120, 2 << 30


def one(path: Path, folder: Path, stderr: Path) -> None:
    """The process of a case: the command itself, with its messages in a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    handle = os.open(stderr, os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = command_line.main(["import", str(path)])
    os.write(2, f"\nPEAK {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n".encode())
    os._exit(code)


def imported(case: Case, folder: Path) -> dict[str, Any]:
    """What `import` makes of a case: exit code, message, seconds, memory."""
    place, stderr = folder / "case", folder / "stderr"
    place.mkdir()
    path = case(place)
    process = multiprocessing.Process(target=one, args=(path, folder, stderr))
    began = time.monotonic()
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    error = stderr.read_text(errors="replace") if stderr.exists() else ""
    peak = int(error.rsplit("PEAK ", 1)[1]) if "PEAK " in error else 0
    told = next((line for line in error.splitlines() if line.startswith("coralline: ")), "")
    result: dict[str, Any] = {
        "exit_code": process.exitcode,
        "message": told[11:].replace(str(place), "")[:200],
        "peak_bytes": peak * 1024,
    }
    result |= {"seconds": round(time.monotonic() - began, 1), "traceback": "Traceback" in error}
    result["wrote"] = any(Path(at, WITNESS).exists() for at in (folder, "/tmp", place))
    shutil.rmtree(place)
    stderr.unlink(missing_ok=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases with this in their names")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hostile-models-"))
    idle = imported(hdf5(DENSE), folder)["peak_bytes"]
    rows, failed = {}, []
    for name, case in CASES.items():
        if options.only not in name:
            continue
        row = rows[name] = imported(case, folder)
        bad = row["exit_code"] not in (0, 4) or row["traceback"] or row["wrote"] or row["peak_bytes"] > idle + BYTES
        failed += [name] if bad else []
        shown = f"{row['exit_code']} {row['seconds']:6.1f} s {row['peak_bytes'] >> 20:5} MiB"
        print(f"{'FAILED ' if bad else ''}{name}: {shown} {row['message'][:150]}", flush=True)
    shutil.rmtree(folder)
    if not failed and not options.only:
        limit = f"{SECONDS} s, and {BYTES:,} bytes beyond an import of a small model ({idle:,} bytes)"
        content = {"limits": limit, "cases": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(rows)} cases, {len(failed)} failed: {failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
