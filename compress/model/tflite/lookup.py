"""The lookup table of a .tflite file whose input is the rows of an embedding: it is in the metadata of the file.

So the file alone is complete: whoever runs it here finds the table, and every edit of the graph keeps it. Runtimes and
compilers ignore metadata that they do not know. The device gets the table from the bundle (`deploy.contract.tensors`).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import graph as graphs
from compress.model.tflite.graph import Graph
from deploy.contract.bundle import BundleError, array_bytes, read_array

NAME = "coralline_lookup"
"""The name of the metadata; the content is that of a .npy file."""


def with_table(graph: Graph, table: NDArray[Any]) -> Graph:
    """Return the graph with a lookup table [rows, width], in the dtype of the input."""
    from ai_edge_litert import schema_py_generated as schema

    buffer = schema.BufferT()
    buffer.data = np.frombuffer(array_bytes(table), np.uint8)
    entry = schema.MetadataT()
    entry.name = NAME.encode()
    entry.buffer = len(graph.source.buffers)
    source = copy.copy(graph.source)
    source.buffers = [*graph.source.buffers, buffer]
    source.metadata = [*(graph.source.metadata or []), entry]
    return graphs.from_source(source)


def table_of(graph: Graph) -> NDArray[Any] | None:
    """Return the lookup table; None for a file without one.

    Raises:
        ModelError: the metadata is not a table.
    """
    for entry in graph.source.metadata or []:
        if entry.name != NAME.encode():
            continue
        data = graph.source.buffers[entry.buffer].data
        try:
            table: NDArray[Any] = read_array(b"" if data is None else bytes(data), f"the metadata {NAME}")
        except BundleError as error:
            raise ModelError(str(error), hint="quantize the model again") from error
        if table.ndim != 2:
            what = f"the metadata {NAME} is an array of {table.ndim} axes"
            raise ModelError(what, allowed="an array of 2 axes: rows and their values", hint="quantize the model again")
        return table
    return None
