"""Malicious data files: `python benchmarks/hostile_data.py`.

Decompression bombs, paths out of the folder, pickles, headers with sizes that are too large: each file is opened as a
data set, and all of its samples are read. The read must end with samples or with an error message. A failure is another
exception, more time than SECONDS (and one second for each PER_SECOND bytes of the file), more memory than ROOM in
addition to that of the process and 10 times the file, or a file that is written to another folder. `benchmarks/fuzz.py`
damages sound files. Writes benchmarks/results/hostile_data.json.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import pickle
import re
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository

import numpy as np
from data_files import form, riff
from fuzz_targets import Y, data_seeds, prepare_data, saved, source_of

from compress.core.errors import CorallineError
from compress.data.dataset import Dataset
from compress.data.types import SPLITS
from deploy.contract.preprocessing import Preprocessing

SEEDS = {
    **{kind: data_seeds(kind)[0] for kind in ("npz", "npy", "csv", "table", "tfrecord", "wav", "tar")},
    "PNG": data_seeds("image")[0],
    "npy of labels": data_seeds("npy")[1],
    **{seed.name.removeprefix("d."): seed for seed in data_seeds("tar")},
}
RESULTS = repository.RESULTS / "hostile_data.json"
SECONDS, PER_SECOND = 20, 4 << 20
ROOM = 700 << 20
"""Bytes of memory: compressed content may unpack to 256 MiB, which is then parsed."""


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
        return (Path.write_text, (Path("/tmp/hostile-data-ran"), "ran"))


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


def made() -> dict[str, tuple[str, Callable[[], bytes]]]:
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
        "absolute name in tar": ("tar", lambda: member("/tmp/hostile-data-ran")),
        "link in tar": ("tar", lambda: member("a/0.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "device in tar": ("tar", lambda: member("a/0.png", type=tarfile.CHRTYPE)),
        "giant in tar": ("tar", lambda: member("a/0.png", size=1 << 60)),
        "million members": ("tar", lambda: b"".join(member(f"a/{i}.png")[:512] for i in range(300_000)) + bytes(1024)),
        "long names of long names": ("tar", lambda: member("x", type=tarfile.GNUTYPE_LONGNAME)[:512] * 20_000),
        "../ in a table": ("table", lambda: b"file,label\n../../etc/passwd,a\n"),
    }


def one(kind: str, content: bytes, folder: Path) -> tuple[str, float, int, str]:
    """Return the outcome of a file, the seconds, the bytes beyond 10 times the file, and the message."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seed = SEEDS[kind]
    prepare_data(folder, seed)
    (folder / seed.name).parent.mkdir(parents=True, exist_ok=True)
    (folder / seed.name).write_bytes(content)
    source, text = source_of(folder, seed), ""
    Path("/proc/self/clear_refs").write_text("5")
    idle = resident("VmRSS")
    signal.setitimer(
        signal.ITIMER_REAL, SECONDS + len(content) // PER_SECOND
    )  # its signal ends the process in any state
    began = time.perf_counter()
    try:
        data = Dataset(source, Preprocessing([{"resize": {"size": [8, 8]}}]), None)
        _ = data.digest
        [data.raw(split, np.arange(len(data.labels(split)))) for split in SPLITS]
        outcome = "answer"
    except CorallineError as error:
        outcome, text = "error" if str(error) else "exception", str(error)
    except Exception as error:  # noqa: BLE001 - any other exception is a finding
        outcome, text = "exception", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    beyond = resident("VmHWM") - idle - 10 * len(content)
    return "memory" if beyond > ROOM and outcome != "exception" else outcome, seconds, beyond, text[:300]


def resident(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def work(jobs: list[tuple[str, str, Any]], folder: Path, results: Any) -> None:
    """Run jobs one after the other, and send their outcomes through a queue."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for number, (name, kind, content) in enumerate(jobs):
        results.put((number, name, kind, None))
        results.put((number, name, kind, one(kind, content(), folder / "data")))
    results.put(None)


def run(jobs: list[tuple[str, str, Any]], folder: Path) -> list[tuple[str, str, str, float, int, str]]:
    """Return the outcome of every job; if the process dies, a new one continues after the job that ended it."""
    outcomes: list[Any] = []
    first = 0
    while first < len(jobs):
        results: Any = multiprocessing.SimpleQueue()
        process = multiprocessing.Process(target=work, args=(jobs[first:], folder, results))
        process.start()
        reader = results._reader
        doing = None
        while process.is_alive() or reader.poll():
            if not reader.poll(0.2):
                continue
            row = results.get()
            if row is None:
                break
            doing, name, kind, outcome = row
            if outcome:
                outcomes.append((name, kind, *outcome))
                doing = None
        process.join()
        if doing is not None:
            name, kind, _ = jobs[first + doing]
            outcomes.append((name, kind, "died", float(SECONDS), 0, f"exit code {process.exitcode}"))
        first = len(outcomes)
    return outcomes


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sound = [(f"sound {kind}", kind, (lambda content: lambda: content)(seed.content)) for kind, seed in SEEDS.items()]
    jobs: list[Any] = [*sound, *((name, kind, content) for name, (kind, content) in made().items())]
    ran = Path("/tmp/hostile-data-ran")
    with tempfile.TemporaryDirectory(prefix="hostile-data-") as folder:
        outcomes = run(jobs, Path(folder))
    failed = [row for row in outcomes if row[2] not in ("answer", "error")]
    failed += [row for row in outcomes[: len(sound)] if row[2] != "answer"]
    for row in failed:
        print("failed:", *row)
    if ran.exists():
        ran.unlink()
        sys.exit("a program in a file was run")
    rows = {
        name: {"outcome": outcome, "s": round(s, 2), "message": message}
        for name, _, outcome, s, _, message in outcomes[len(sound) :]
    }
    most = max(row[4] for row in outcomes)
    if not failed:
        RESULTS.write_text(json.dumps({"cases": rows, "most_bytes_beyond": most}, indent=1) + "\n")
    slowest = max(row[3] for row in outcomes)
    print(f"{len(rows)} cases, {len(failed)} failed; slowest {slowest:.1f} s, at most {most / 2**20:,.0f} MiB")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
