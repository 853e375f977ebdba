"""Checks of HDF5 files with the weights of a Keras model: data outside the file, and invalid sizes."""

from __future__ import annotations

from typing import Any

from compress.model.importers.keras.keras_config import shown

MAX_WEIGHTS_BYTES = 4 * 2**30
"""Seven times the weights of VGG19 (575 MB)."""
MOST_PACKED = 100
"""Largest ratio of unpacked to stored size: real weights compress less."""
ALWAYS_BYTES = 2**26
"""Unpacked size that is always allowed."""
MOST_OBJECTS = 200_000
"""A network has a few objects for each weight; an archive of millions would be walked for minutes."""
LISTS = ("layer_names", "weight_names")


def problem(file: Any) -> str | None:
    """Return what is wrong with an open HDF5 file: links and data outside of it, data that would fill the memory."""
    import h5py

    seen = 0

    def check_link(name: str, item: object) -> str | None:
        nonlocal seen
        seen += 1
        if seen > MOST_OBJECTS:
            return f"has more than {MOST_OBJECTS:,} objects"
        return None if isinstance(item, h5py.HardLink) else f"has a link in place of weights: {shown(name)}"

    return file.visititems_links(check_link) or _sizes(file)


def read_all(file: Any) -> None:
    """Read every dataset of an open HDF5 file in which `problem` found nothing."""
    import h5py

    def read(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            item[()]

    file.visititems(read)


def _sizes(file: Any) -> str | None:
    import h5py

    total = 0
    limit = min(MAX_WEIGHTS_BYTES, max(ALWAYS_BYTES, MOST_PACKED * file.id.get_filesize()))

    def check_item(name: str, item: Any) -> str | None:
        nonlocal total
        if not isinstance(item, h5py.Dataset):
            return _listed(name, item, limit)
        if item.external or item.is_virtual:
            return f"has weights that are in another file: {shown(name)}"
        if item.dtype.kind == "O" and not h5py.check_string_dtype(item.dtype):
            return f"has references or lists in place of weights: {shown(name)}"
        size, stored = item.nbytes or 0, item.id.get_storage_size()
        total += size
        if total > limit or size > max(ALWAYS_BYTES, MOST_PACKED * stored):
            return f"its weights {shown(name)} would unpack from {stored:,} to {size:,} bytes"
        return None

    return _listed("", file, limit) or file.visititems(check_item)


def _listed(name: str, group: Any, limit: int) -> str | None:
    """Return what is wrong with the weights that a group lists: repeated ones could fill the memory."""
    import h5py

    size = 0
    for key in group.attrs:
        if not key.startswith(LISTS):
            continue
        for entry in group.attrs[key]:
            values = group.get(entry)
            size += (values.nbytes or 0) if isinstance(values, h5py.Dataset) else 0
            if size > limit:
                return f"lists weights of more than {limit:,} bytes in {shown(name)}"
    return None
