"""File size, parameters and multiply-accumulates of a .tflite file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.core.measurement import Measurement
from compress.learning.context import Context
from compress.model.tflite import graph, lookup, macs
from compress.pipeline.stage import Probe


class Size(Probe):
    """The size of a model."""

    name: ClassVar[str] = "size"
    version: ClassVar[int] = 3

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """`size_bytes`, `compressed_bytes`, `parameters` and `macs` of each subject."""
        del context
        return {name: self._measure(artifact) for name, artifact in subjects.items()}

    @staticmethod
    def _measure(artifact: Artifact) -> Facts:
        path = artifact.file(MODEL_TFLITE)
        parsed = graph.read(path)
        table = lookup.table_of(parsed)
        looked_up = 0 if table is None else table.size
        counted = "counted in the .tflite graph, batch norm folded"
        with_table = counted if table is None else f"{counted}; {looked_up:,} of them in the table of the lookup"
        measurements = {
            "size_bytes": Measurement(path.stat().st_size, "bytes", "measured", note="size of the .tflite file"),
            "compressed_bytes": Measurement(
                macs.compressed_bytes(path.read_bytes()), "bytes", "measured", note="the file by zlib at level 9"
            ),
            "parameters": Measurement(macs.parameters(parsed) + looked_up, "parameters", "measured", note=with_table),
            "macs": Measurement(macs.total_macs(parsed), "MACs", "measured", note=counted),
        }
        return {name: measurement.to_json() for name, measurement in measurements.items()}
