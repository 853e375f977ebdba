"""The contents of the data and of a model file: samples and classes, sizes, operators with their placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.core.measurement import Measurement
from compress.data.types import SPLITS
from compress.learning.context import Context, Need
from compress.model.tflite import graph, lookup, macs
from compress.model.tflite.graph import read
from compress.pipeline.stage import Probe
from compress.report.placement import NODE_DATA_FILE, node_data
from compress.results.placement import PlacementRecord


class DataSummary(Probe):
    """Describes the data set."""

    name: ClassVar[str] = "data"
    version: ClassVar[int] = 4
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """`classes`, `input_shape`, `preprocess`, and the data's summary (`compress.data.summary`)."""
        data = context.data
        for split in SPLITS:  # the summary compares the splits that were decoded
            data.inputs(split)
        return {
            "classes": list(data.class_names),
            "input_shape": list(data.input_shape),
            "preprocess": data.preprocessing,
            **data.summary(),
        }


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


class OperatorGraph(Probe):
    """Write where the operators of a model run, for Model Explorer."""

    name: ClassVar[str] = "operator graph"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Need]] = frozenset({"target"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Write NODE_DATA_FILE. A compiled model has its actual placement, others the predicted one."""
        (model,) = subjects.values()
        graph = read(model.file(MODEL_TFLITE))
        placement = PlacementRecord.from_facts(model.facts) if "placement" in model.facts else None
        if placement is None or [op.op for op in placement.ops] != [op.name for op in graph.operators]:
            placement = PlacementRecord.from_facts(context.target.check(graph).to_json())
        (context.folder / NODE_DATA_FILE).write_text(node_data(graph, placement), encoding="utf-8")
        return {}
