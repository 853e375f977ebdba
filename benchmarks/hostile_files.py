"""Malicious files: `python benchmarks/hostile_files.py models|data [--only NAME]`.

- models: Keras files and SavedModel folders of tests/support/malicious_models.py, imported by the command `import`. The
  file must be refused with exit code 4 and one message, or be imported if it is harmless.
- data: decompression bombs, paths out of the folder, pickles, headers with sizes that are too large. Each file is
  opened as a data set, and all of its samples are read. The read must end with samples or with an error message.

Each case has a separate process. A failure is a crash, another exception or exit code, a traceback, a file that the
case writes, more time than the limit, or more memory than the limit in addition to that of a sound file of the kind.
`benchmarks/fuzz.py` damages sound files. Writes benchmarks/results/hostile_models.json or hostile_data.json.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import os
import pickle
import re
import resource
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import repository

import h5py
import numpy as np
from data_files import form, riff
from fuzz_targets import Y, data_seeds, prepare_data, saved, source_of
from malicious_models import CASES, WITNESS, hdf5, many

from compress.core.errors import CorallineError
from compress.data.dataset import Dataset
from compress.data.types import SPLITS
from compress.surface.cli import import_model
from compress.surface.cli import main as command_line
from deploy.contract.preprocessing import Preprocessing

assert import_model, h5py.File  # imported here, so that the process of a case is measured without them
SEEDS = {
    **{kind: data_seeds(kind)[0] for kind in ("npz", "npy", "csv", "table", "tfrecord", "wav", "tar")},
    "PNG": data_seeds("image")[0],
    "npy of labels": data_seeds("npy")[1],
    **{seed.name.removeprefix("d."): seed for seed in data_seeds("tar")},
}
RAN = Path("/tmp/hostile-data-ran")
"""A file that a pickle writes if it is read as one."""
PER_SECOND = 4 << 20
"""Bytes of a file that prolong the limit of the time by one second."""
Case = Callable[[Path], Callable[[], int]]
"""Writes the files of a case into a folder, and returns the function that reads them; it returns an exit code."""


class Limits(NamedTuple):
    """Limits of a case: seconds, and bytes beyond a sound file of the kind and ten times the file."""

    seconds: float
    room: int


LIMITS = {
    "models": Limits(120, 2 << 30),
    "data": Limits(20, 700 << 20),  # compressed content may unpack to 256 MiB, which is then parsed
}


def png(width: int, height: int) -> bytes:
    """Return a black PNG image with these dimensions, in few bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width // 8 + 1)) for _ in range(min(height, 60_000))) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def member(name: str, **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


class Evil:
    """An object that writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (RAN, "ran"))


def npz_of(size: int) -> bytes:
    """Return a .npz file whose samples are about `size` bytes of zeros."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("y.npy", saved(np.save, Y))
        with packed.open("x.npy", "w", force_zip64=True) as inner:
            head = {"descr": "|u1", "fortran_order": False, "shape": (12, size // 12, 1)}
            np.lib.format.write_array_header_1_0(inner, head)
            for _ in range(size >> 20):
                inner.write(bytes(1 << 20))
    return stream.getvalue()


def data_files() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Return malicious files by name: the kind of data set of each, and a function that makes its content."""
    objects = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (12,), }".ljust(117)
    return {
        "zip bomb of 4 GiB": ("npz", lambda: npz_of(4 << 30)),
        "gzip bomb of 4 GiB": ("tar.gz", lambda: gzip.compress(bytes(1 << 30)) * 4),
        "bzip2 bomb": ("tar.bz2", lambda: bz2.compress(bytes(1 << 30))),
        "xz bomb": ("tar.xz", lambda: lzma.compress(bytes(1 << 30))),
        "PNG of 60,000 x 60,000": ("PNG", lambda: png(60_000, 60_000)),
        "PNG of 2,000,000,000 x 1": ("PNG", lambda: png(2_000_000_000, 1)),
        "PNG of 8,000 x 8,000": ("PNG", lambda: png(8_000, 8_000)),
        "pickle as .npy": ("npy", lambda: pickle.dumps(Evil())),
        "objects in .npy": ("npy", lambda: objects + b"\n" + pickle.dumps(Evil())),
        "objects in labels": ("npy of labels", lambda: objects + b"\n" + pickle.dumps(Evil())),
        "a million columns": ("csv", lambda: b"v,w,kind" + b",x" * 1_000_000 + b"\n"),
        "one line of 512 MiB": ("csv", lambda: b"v" * (512 << 20)),
        "a quote that stays open": ("csv", lambda: b'v,w,kind\n"1,2,a\n' + b"1,2,a\n" * 5_000_000),
        "a million labels": ("csv", lambda: b"v,w,kind\n" + b"".join(b"1,2,%d\n" % i for i in range(1_000_000))),
        "long labels": ("csv", lambda: b"v,w,kind\n" + (b"1,2," + b"x" * 100_000 + b"\n") * 1000),
        "WAV that promises 4 GiB": ("wav", lambda: riff(form(), b"data\xff\xff\xff\xff")),
        "WAV of 16 million chunks": ("wav", lambda: riff(b"junk\0\0\0\0" * 16_000_000)),
        "WAV of odd rate": ("wav", lambda: riff(form(rate=767_999), b"data" + struct.pack("<I", 2000) + bytes(2000))),
        "record of 2**62 bytes": ("tfrecord", lambda: struct.pack("<Q", 1 << 62) + bytes(99)),
        "../ in tar": ("tar", lambda: member("../../out.png")),
        "absolute name in tar": ("tar", lambda: member(str(RAN))),
        "link in tar": ("tar", lambda: member("a/0.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "device in tar": ("tar", lambda: member("a/0.png", type=tarfile.CHRTYPE)),
        "giant in tar": ("tar", lambda: member("a/0.png", size=1 << 60)),
        "million members": ("tar", lambda: b"".join(member(f"a/{i}.png")[:512] for i in range(300_000)) + bytes(1024)),
        "long names of long names": ("tar", lambda: member("x", type=tarfile.GNUTYPE_LONGNAME)[:512] * 20_000),
        "../ in a table": ("table", lambda: b"file,label\n../../etc/passwd,a\n"),
    }


def model_case(case: Callable[[Path], Path]) -> Case:
    """Return the case of a Keras file or SavedModel folder."""
    return lambda place: partial(command_line.main, ["import", str(case(place))])


def data_case(kind: str, content: Callable[[], bytes]) -> Case:
    """Return the case of a data file."""

    def write(place: Path) -> Callable[[], int]:
        seed = SEEDS[kind]
        prepare_data(place, seed)
        (place / seed.name).parent.mkdir(parents=True, exist_ok=True)
        (place / seed.name).write_bytes(content())
        return partial(read_data, place, seed)

    return write


def read_data(place: Path, seed: Any) -> int:
    """Read all samples of a data set; return 0, or 4 if it is refused."""
    warnings.simplefilter("ignore")
    try:
        data = Dataset(source_of(place, seed), Preprocessing([{"resize": {"size": [8, 8]}}]), None)
        _ = data.digest
        for split in SPLITS:
            data.raw(split, np.arange(len(data.labels(split))))
    except CorallineError as error:
        print(f"coralline: {error}", file=sys.stderr, flush=True)
        return 4
    return 0


def resident(name: str) -> int:
    """Return the resident bytes of this process: "VmRSS": now; "VmHWM": the maximum since the last reset."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def work(read: Callable[[], int], folder: Path) -> None:
    """Read the file of a case as its process, with the messages in a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    handle = os.open(folder / "messages", os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    idle = resident("VmRSS")
    try:
        code = read()
    except Exception:  # noqa: BLE001 - any other exception is a finding
        traceback.print_exc()
        code = 70
    (folder / "peak").write_text(str(resident("VmHWM") - idle))
    os._exit(code)


def ran(case: Case, limits: Limits) -> dict[str, Any]:
    """Run a case in a separate process, and return its outcome."""
    for witness in (RAN, Path("/tmp", WITNESS)):  # of an earlier case
        witness.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hostile-files-") as name:
        folder = Path(name)
        place = folder / "case"
        place.mkdir()
        read = case(place)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        process = multiprocessing.Process(target=work, args=(read, folder))
        began = time.monotonic()
        process.start()
        process.join(limits.seconds + size // PER_SECOND)
        if process.is_alive():
            process.kill()
            process.join()
        messages = (folder / "messages").read_text(errors="replace") if (folder / "messages").exists() else ""
        message = next((line for line in messages.splitlines() if line.startswith("coralline: ")), "")
        peak = folder / "peak"
        return {
            "exit_code": process.exitcode,
            "message": message[11:].replace(str(place), "")[:300],
            "peak_bytes": int(peak.read_text()) if peak.exists() else 0,
            "file_bytes": size,
            "seconds": round(time.monotonic() - began, 1),
            "traceback": "Traceback" in messages,
            "wrote": RAN.exists() or any(Path(at, WITNESS).exists() for at in (folder, "/tmp", place)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=LIMITS)
    parser.add_argument("--only", default="", help="cases with this in their names")
    options = parser.parse_args()
    limits = LIMITS[options.kind]
    cases: dict[str, tuple[str, Case]]
    """The kind of the file of each case, and the case."""
    if options.kind == "models":
        sound = {"": model_case(hdf5(many(1)))}
        cases = {name: ("", model_case(case)) for name, case in CASES.items()}
    else:
        sound = {kind: data_case(kind, partial(bytes, seed.content)) for kind, seed in SEEDS.items()}
        cases = {name: (kind, data_case(kind, content)) for name, (kind, content) in data_files().items()}
    idle: dict[str, int] = {}
    for kind, case in sound.items():
        row = ran(case, limits)
        if row["exit_code"] != 0:
            sys.exit(f"a sound file is refused: {kind} {row}")
        idle[kind] = row["peak_bytes"]
    rows, failed = {}, []
    for name, (kind, case) in cases.items():
        if options.only not in name:
            continue
        row = rows[name] = ran(case, limits)
        most = idle[kind] + limits.room + 10 * row["file_bytes"]
        bad = row["exit_code"] not in (0, 4) or row["traceback"] or row["wrote"] or row["peak_bytes"] > most
        bad = bad or (row["exit_code"] == 4 and not row["message"])
        failed += [name] if bad else []
        shown = f"{row['exit_code']} {row['seconds']:6.1f} s {row['peak_bytes'] >> 20:5} MiB"
        print(f"{'FAILED ' if bad else ''}{name}: {shown} {row['message'][:150]}", flush=True)
    if not failed and not options.only:
        result = {"limits": {"seconds": limits.seconds, "bytes_beyond": limits.room}, "cases": rows}
        (repository.RESULTS / f"hostile_{options.kind}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(rows)} cases, {len(failed)} failed: {failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
