"""The stages by their name in pipeline.yaml."""

from compress.pipeline.stage import Stage
from compress.pipeline.stages.compile import Compile
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.expose_embedding import ExposeEmbedding
from compress.pipeline.stages.package import Package
from compress.pipeline.stages.prune import Prune
from compress.pipeline.stages.quantize import Quantize
from compress.pipeline.stages.replace_activations import ReplaceActivations
from compress.pipeline.stages.sparsify import Cluster, Sparsify
from compress.pipeline.stages.train import Train

STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (
        Train,
        Prune,
        ReplaceActivations,
        Distill,
        Sparsify,
        Cluster,
        Quantize,
        ExposeEmbedding,
        Compile,
        Package,
    )
}
