"""HDF5 files with the weights of a Keras model: what lies outside of them, and sizes that nobody stored."""

from __future__ import annotations

from typing import Any

from compress.importers.keras.keras_config import shown

MAX_WEIGHTS_BYTES = 4 * 2**30
MOST_PACKED = 100
"""How much larger than stored data may be: what compresses better was made to."""
ALWAYS_BYTES = 2**26
"""... except that so much is never too much."""
MOST_OBJECTS = 200_000
LISTS = ("layer_names", "weight_names")


def problem(file: Any) -> str | None:
    """Return what is wrong with an open HDF5 file: links and data outside of it, data that would fill the memory."""
    import h5py

    seen = 0

    def link(name: str, item: object) -> str | None:
        nonlocal seen
        seen += 1
        if seen > MOST_OBJECTS:
            return f"has more than {MOST_OBJECTS:,} objects"
        return None if isinstance(item, h5py.HardLink) else f"has a link in place of weights: {shown(name)}"

    return file.visititems_links(link) or _sizes(file)


def _sizes(file: Any) -> str | None:
    import h5py

    total, limit = 0, min(MAX_WEIGHTS_BYTES, max(ALWAYS_BYTES, MOST_PACKED * file.id.get_filesize()))

    def item(name: str, found: Any) -> str | None:
        nonlocal total
        if not isinstance(found, h5py.Dataset):
            return _listed(name, found, limit)
        if found.external or found.is_virtual:
            return f"has weights that are in another file: {shown(name)}"
        if found.dtype.kind == "O" and not h5py.check_string_dtype(found.dtype):
            return f"has references or lists in place of weights: {shown(name)}"
        size, stored = found.nbytes or 0, found.id.get_storage_size()
        total += size
        if total > limit or size > max(ALWAYS_BYTES, MOST_PACKED * stored):
            return f"its weights {shown(name)} would unpack from {stored:,} to {size:,} bytes"
        return None

    return _listed("", file, limit) or file.visititems(item)


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
