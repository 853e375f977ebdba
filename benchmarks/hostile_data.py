"""Damaged and hostile data files: `python benchmarks/hostile_data.py [--mutations 5000] [--seed 0]`.

A small sound data set of every kind is damaged: bits and bytes changed, cut, lengthened, parts repeated or moved,
numbers in it made as large as can be. Each is opened, and all of its samples read. Beside these, files are made to do
harm: bombs, names that lead out, pickles, headers that promise too much. All must end with samples or with an error in
words. Another exception, more than SECONDS (and one for each PER_SECOND bytes of the file), more memory than ROOM
beyond the process (and 10 times the file), or a file written elsewhere is a failure. Writes
benchmarks/results/hostile_data.json.
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
import random
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository

import numpy as np
from data_files import example, form, record, riff
from PIL import Image

from compress.data.dataset import Dataset
from compress.data.source import Source
from compress.data.sources import Csv, ImageFolder, Npy, Npz, TfRecord, Wav
from compress.data.types import SPLITS
from compress.errors import CorallineError
from deploy.contract.preprocessing import Preprocessing

RESULTS = repository.RESULTS / "hostile_data.json"
SECONDS, PER_SECOND = 20, 4 << 20
ROOM = 700 << 20
"""Bytes: what is compressed may unpack to 256 MiB, and is then looked at."""
DICE = np.random.default_rng(0)
X = DICE.integers(0, 256, (12, 8, 8), np.uint8)
Y = np.arange(12) % 2


def image(kind: str, side: int = 24) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.kron(X[0, :3, :3], np.ones((side // 3, side // 3), np.uint8))).convert("RGB").save(stream, kind)
    return stream.getvalue()


def saved(save: Callable[..., Any], *values: Any, **arrays: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *values, **arrays)
    return stream.getvalue()


def archive() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as packed:
        for index in range(8):
            info = tarfile.TarInfo(f"{'ab'[index % 2]}/{index}.png")
            info.size = len(PICTURE)
            packed.addfile(info, io.BytesIO(PICTURE))
    return stream.getvalue()


PICTURE = image("PNG")
SOUND = riff(form(), b"data" + struct.pack("<I", 1600) + DICE.bytes(1600))
TABLE = "\n".join(["t,v,w,kind", *(f"{row},{row / 3:.3f},{-row},{'ab'[row // 8 % 2]}" for row in range(96))]).encode()
GOOD: dict[str, tuple[str, bytes]] = {
    "npz": ("d.npz", saved(np.savez, x=X, y=Y)),
    "npz, compressed": ("d.npz", saved(np.savez_compressed, x=X, y=Y)),
    "npy": ("x.npy", saved(np.save, X)),
    "npy of labels": ("y.npy", saved(np.save, Y)),
    **{kind: (f"a/0.{kind.lower()}", image(kind)) for kind in ("PNG", "JPEG", "BMP", "WEBP")},
    "wav": ("a/0.wav", SOUND),
    "csv": ("t.csv", TABLE),
    "table": ("labels.csv", b"file,label,split\n" + b"".join(b"%d.png,%d,train\n" % (i, i % 2) for i in range(12))),
    "tfrecord": ("d.tfrecord", b"".join(record(example(image=PICTURE, label=int(y))) for y in Y)),
    "tar": ("d.tar", archive()),
    "tar.gz": ("d.tar.gz", gzip.compress(archive())),
    "tar.bz2": ("d.tar.bz2", bz2.compress(archive())),
    "tar.xz": ("d.tar.xz", lzma.compress(archive())),
}


def source(kind: str, folder: Path) -> Source:
    """A data set around the file of a kind, the rest of it sound."""
    from compress.data.label_tables import Labels

    path = str(folder)
    if kind.startswith("npz"):
        return Npz(file=f"{path}/d.npz")
    if kind.startswith("npy"):
        for name, array in (("x", X), ("y", Y)):
            if not (folder / f"{name}.npy").exists():
                np.save(folder / f"{name}.npy", array)
        return Npy(x=f"{path}/x.npy", y=f"{path}/y.npy")
    if kind == "csv":
        return Csv(path=f"{path}/t.csv", columns=("v", "w"), window=4, label_column="kind", divide="time")
    if kind == "tfrecord":
        return TfRecord(path=f"{path}/d.tfrecord", image="image", label="label")
    if kind.startswith("tar"):
        return ImageFolder(path=str(next(folder.glob("d.tar*"))))
    if kind == "table":
        for index in range(12):
            (folder / f"{index}.png").write_bytes(PICTURE)
        return ImageFolder(path=path, labels=Labels(table="labels.csv"))
    for name in ("a/1", "b/0", "b/1", "b/2", "a/2"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.{'wav' if kind == 'wav' else 'png'}").write_bytes(SOUND if kind == "wav" else PICTURE)
    return Wav(path=path, rate=8000, seconds=0.1, resample=True) if kind == "wav" else ImageFolder(path=path)


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Sound content, changed in one to three places."""
    changed = bytearray(content)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(max(len(changed), 1))
        if dice.random() < 0.5:  # headers are at the beginning
            place = min(place, dice.randrange(200))
        way = dice.randrange(7)
        if way == 0 and changed:
            changed[place] ^= 1 << dice.randrange(8)
        elif way == 1:
            changed[place : place + 1] = bytes([dice.randrange(256)])
        elif way == 2:
            changed[place : place + 4] = dice.choice(
                [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\0\0\0\x80"]
            )
        elif way == 3:
            del changed[place:]
        elif way == 4:
            changed[place:place] = dice.randbytes(dice.randrange(1, 600))
        elif way == 5:
            end = place + dice.randrange(1, 600)
            changed[place:place] = changed[place:end]
        else:
            changed[place : place + 8] = dice.choice([b"9999999999", b"-1,-1,-1", b'""""""""', b"\0" * 8, b"\n\n,,,\n"])
    return bytes(changed)


def png(width: int, height: int) -> bytes:
    """A picture of zeros, whatever its size, in few bytes."""

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
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("/tmp/hostile-data-ran"), "ran"))


def npz_of(size: int) -> bytes:
    """A .npz file with so many zeros."""
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
    """Files that are made to do harm: the kind of data set that they are in, and their content."""
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
    """What becomes of a file: outcome, seconds, bytes beyond, and what was told."""
    shutil.rmtree(folder, ignore_errors=True)
    name = GOOD[kind][0]
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(content)
    given, text = source(kind, folder), ""
    Path("/proc/self/clear_refs").write_text("5")
    idle = resident("VmRSS")
    signal.setitimer(
        signal.ITIMER_REAL, SECONDS + len(content) // PER_SECOND
    )  # its signal ends the process, whatever it does
    began = time.perf_counter()
    try:
        data = Dataset(given, Preprocessing([{"resize": {"size": [8, 8]}}]), None)
        _ = data.digest
        [data.raw(split, np.arange(len(data.labels(split)))) for split in SPLITS]
        outcome = "answer"
    except CorallineError as error:
        outcome, text = "error" if str(error) else "exception", str(error)
    except Exception as error:  # noqa: BLE001 - any other exception is what is looked for
        outcome, text = "exception", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    beyond = resident("VmHWM") - idle - 10 * len(content)
    return "memory" if beyond > ROOM and outcome != "exception" else outcome, seconds, beyond, text[:300]


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def work(jobs: list[tuple[str, str, Any]], folder: Path, results: Any) -> None:
    """All of some jobs, one after the other."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for number, (name, kind, content) in enumerate(jobs):
        made_of = content() if callable(content) else damaged(GOOD[kind][1], random.Random(content))
        results.put((number, name, kind, None))
        results.put((number, name, kind, one(kind, made_of, folder / "data")))
    results.put(None)


def run(jobs: list[tuple[str, str, Any]], folder: Path) -> list[tuple[str, str, str, float, int, str]]:
    """The outcome of every job; a process that dies is begun again behind what it died of."""
    found: list[Any] = []
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
                found.append((name, kind, *outcome))
                doing = None
        process.join()
        if doing is not None:
            name, kind, _ = jobs[first + doing]
            found.append((name, kind, "died", float(SECONDS), 0, f"exit code {process.exitcode}"))
        first = len(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = list(GOOD)
    sound = [(f"sound {kind}", kind, (lambda content: lambda: content)(GOOD[kind][1])) for kind in kinds]
    jobs: list[Any] = [*sound, *((name, kind, content) for name, (kind, content) in made().items())]
    jobs += [("damaged", kinds[i % len(kinds)], f"{options.seed}:{i}") for i in range(options.mutations)]
    ran = Path("/tmp/hostile-data-ran")
    with tempfile.TemporaryDirectory(prefix="hostile-data-") as folder:
        found = run(jobs, Path(folder))
    refused = [row for row in found[: len(sound)] if row[2] != "answer"]
    failed = [row for row in found if row[2] not in ("answer", "error")] + refused
    for row in failed:
        print("failed:", *row)
    if ran.exists():
        ran.unlink()
        sys.exit("a program in a file was run")
    result = {
        "mutations": options.mutations,
        "seed": options.seed,
        "outcomes": dict(Counter(row[2] for row in found)),
        "by_kind": {kind: dict(Counter(row[2] for row in found if row[1] == kind)) for kind in kinds},
        "made": {
            row[0]: {"outcome": row[2], "s": round(row[3], 2), "told": row[5]}
            for row in found
            if row[0] != "damaged" and not row[0].startswith("sound")
        },
        "slowest_s": round(max(row[3] for row in found), 2),
        "most_bytes_beyond": max(row[4] for row in found),
    }
    if not failed:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("| files | error | answer | failed | slowest | most memory beyond 10x the file |")
    print("|---|---|---|---|---|---|")
    outcomes = result["outcomes"]
    print(
        f"| {len(found):,} | {outcomes.get('error', 0):,} | {outcomes.get('answer', 0):,} | {len(failed)} "
        f"| {result['slowest_s']} s | {result['most_bytes_beyond'] / 2**20:,.0f} MiB |"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
