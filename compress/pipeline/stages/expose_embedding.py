"""`expose_embedding`: the input of the last dense layer as a second output, so that devices can learn new classes."""

from __future__ import annotations

from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.learning.context import Context, Need
from compress.model.tflite import embedding, graph
from compress.pipeline.stage import Stage
from compress.tasks.base import Use


class ExposeEmbedding(Stage):
    """Add the input of the last dense layer to the outputs of a quantized classifier. With this embedding, the device
    learns new classes from a few photos, without compiling. The scores of the classes stay the first output."""

    name: ClassVar[str] = "expose_embedding"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    def uses(self) -> tuple[Use, ...]:
        """Return embedding: only classifiers have a last dense layer for classes."""
        return ("embedding",)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the file with two outputs; return the size of the embedding."""
        before = graph.read(artifact.file(MODEL_TFLITE))
        embedding.head_of(before)  # the bundle needs the weights
        after = embedding.exposed(before)
        (context.folder / MODEL_TFLITE).write_bytes(graph.serialize(after))
        tensor = after.tensors[after.outputs[1]]
        return {"values": tensor.elements, "shape": list(tensor.shape), "dtype": tensor.dtype.lower()}
