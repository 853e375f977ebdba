"""The stages, one file each, by their name in pipeline.yaml."""

from compress.stage import Stage
from compress.stages.cluster import Cluster
from compress.stages.compile import Compile
from compress.stages.distill import Distill
from compress.stages.expose_embedding import ExposeEmbedding
from compress.stages.package import Package
from compress.stages.prune import Prune
from compress.stages.quantize import Quantize
from compress.stages.replace_activations import ReplaceActivations
from compress.stages.sparsify import Sparsify
from compress.stages.train import Train

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
