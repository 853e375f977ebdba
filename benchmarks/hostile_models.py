"""Malicious Keras files and SavedModel folders: `python benchmarks/hostile_models.py`.

Each case is written into a separate folder, and imported by the command `import` in a separate process. The limits are
SECONDS, and BYTES of memory in addition to the import of a small model. The file must be refused with exit code 4 and
one message, or be imported if it is harmless. A failure is a crash, another exit code, a traceback, a file that the
case writes, or an exceeded limit. `benchmarks/fuzz.py` damages sound files. Writes
benchmarks/results/hostile_models.json.
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

from compress.surface.cli import import_model
from compress.surface.cli import main as command_line

assert import_model, h5py.File  # imported here, so that the process of a case is measured without them
RESULTS = repository.RESULTS / "hostile_models.json"
SECONDS, BYTES = 120, 2 << 30


def one(path: Path, folder: Path, stderr: Path) -> None:
    """Run the command `import` as the process of a case, with its messages in a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    handle = os.open(stderr, os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = command_line.main(["import", str(path)])
    os.write(2, f"\nPEAK {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n".encode())
    os._exit(code)


def imported(case: Case, folder: Path) -> dict[str, Any]:
    """Import a case in a separate process; return the exit code, the message, the seconds, the peak bytes and so on."""
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
    message = next((line for line in error.splitlines() if line.startswith("coralline: ")), "")
    result: dict[str, Any] = {
        "exit_code": process.exitcode,
        "message": message[11:].replace(str(place), "")[:200],
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
