"""The examination of a complete data set before a run (`python -m compress data`)."""

from __future__ import annotations

from pathlib import Path

from compress.core.artifact import Facts
from compress.core.errors import DataError
from compress.core.progress import Progress
from compress.data import files, manifest
from compress.data.dataset import Dataset
from compress.data.types import SPLITS

SCHEMA_VERSION = 1


def examine(data: Dataset, progress: Progress) -> tuple[Facts, bool]:
    """Read and preprocess every sample as a run would, and summarize the data.

    Returns:
        Plain values: `classes`, the data's summary with everything that cannot be read, and `refused`: what else a run
        would refuse. And whether a run would refuse the data.

    Raises:
        DataError: the data is missing, or not what it should be.
    """
    tolerant = data.tolerant()
    tolerant.work_in(None, progress)
    refused = []
    for split in SPLITS:
        try:
            tolerant.try_out(split)
        except DataError as error:
            refused.append(str(error))
    summary = tolerant.summary()
    summary["notes"] += tolerant.observed
    report = {
        "schema_version": SCHEMA_VERSION,
        "source": data.source.name,
        "classes": list(tolerant.class_names),
        **summary,
        "refused": refused,
    }
    corrupt = bool(tolerant.corrupt) and getattr(data.source, "corrupt", "refuse") == "refuse"
    return report, corrupt or bool(refused)


def write_manifest(data: Dataset, path: Path) -> int:
    """Write the checksums of all files of a data set, and return the number of files.

    Raises:
        StoreError: the manifest cannot be written.
    """
    paths = data.source.files()
    if not paths:
        raise DataError("does not come from files", where=f"data.source.{data.source.name}")
    digests = files.digests(paths)
    manifest.write(path, {paths[name]: digest for name, digest in digests.items()})
    return len(digests)
