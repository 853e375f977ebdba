"""`make fuzz COVERAGE=1`: the targets of fuzz.py, guided by code coverage (atheris, libFuzzer).

Atheris is not a dependency: `make` installs it into .venv-fuzz. It counts the branches of our own modules. A file that
reaches new code is kept in build/fuzz/<target> and damaged further; a file that fails goes to tests/corpus/<target>.
`--merge` adds the smallest files that together reach all of that code to the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
from pathlib import Path

import repository

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["compress", "darwinn", "deploy"]):
    import fuzz_mutations
    import fuzz_targets
    from fuzz_targets import CORPUS, Seed

BUILD = repository.FOLDER.parent / "build" / "fuzz"
SECONDS, MEGABYTES, MAX_BYTES = 10, 2048, 100_000
"""Chosen limits of libFuzzer: time and memory of a file, and its size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tflite", choices=sorted(fuzz_targets.targets()))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--merge", action="store_true", help="copy a smallest set of files to tests/corpus instead")
    options = parser.parse_args()
    target = fuzz_targets.targets()[options.target]
    seed = target.seeds()[0]
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    target.prepare(place, seed)
    (place / seed.name).parent.mkdir(parents=True, exist_ok=True)

    def read(content: bytes) -> None:
        (place / seed.name).write_bytes(content)
        try:
            target.read(place, seed)
        except target.refusals:
            return
        except Exception:
            folder = CORPUS / target.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{hashlib.sha256(content).hexdigest()[:12]}{Path(seed.name).suffix}").write_bytes(content)
            raise

    def mutate(content: bytes, most: int, number: int) -> bytes:
        dice = random.Random(number)
        try:
            return target.mutate(Seed(seed.name, content, seed.kind), dice)[:most]
        except fuzz_targets.NOT_SOUND:
            return fuzz_mutations.byte_changes(content, dice)[:most]

    corpus = BUILD / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    for candidate in target.seeds():
        if candidate.name == seed.name and len(candidate.content) < MAX_BYTES:
            (corpus / hashlib.sha256(candidate.content).hexdigest()[:12]).write_bytes(candidate.content)
    limits = [
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={corpus}/",
    ]
    if options.merge:
        (CORPUS / target.name).mkdir(parents=True, exist_ok=True)
        arguments = ["-merge=1", *limits, str(CORPUS / target.name), str(corpus)]
    else:
        arguments = [f"-max_total_time={options.seconds}", *limits, str(corpus)]
    atheris.Setup([sys.argv[0], *arguments], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
