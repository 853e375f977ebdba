"""`search_architecture`: train a network whose sub-networks share its weights, and keep the best one within limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.artifact import Artifact, Facts, Kind
from compress.execution import Execution
from compress.progress import Phase
from compress.stage import Context, Need, Refusal, Stage, Use, refused_host
from compress.targets.base import Target
from compress.training.loop import TrainingSettings, chosen_inputs

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.architecture_search.search import SearchOptions

Share = Annotated[float, Field(gt=0, lt=1)]
LIMITS = ("latency_ms", "size_bytes", "streamed_bytes")
PREDICTED = {"latency_ms": "latency", "streamed_bytes": "cache"}
"""The limits that a target must predict, with the name of its objective."""


class SearchArchitecture(Stage, TrainingSettings):
    """Search the architecture: find the most accurate smaller network within limits. The model is the largest network;
    all its sub-networks are trained together, with shared weights, and the best one is kept."""

    name: ClassVar[str] = "search_architecture"
    version: ClassVar[int] = 4
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.UNTRAINED, Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    latency_ms: Annotated[float, Field(gt=0)] | None = None
    """Limit of the predicted latency, in milliseconds. At least one limit is needed."""
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    """Limit of the 8-bit file, in bytes."""
    streamed_bytes: Annotated[int, Field(ge=0)] | None = None
    """Limit of the parameters that are sent to the Edge TPU at every inference, in bytes; 0: all stay in its memory."""
    host: str | None = None
    """Host that latency is predicted for: usb3 (default), usb2, pcie, devboard, pi4-usb3, pi5-usb3 or pi5-pcie for an
    Edge TPU; see `estimate`."""
    clock: str | None = None
    """Clock of an Edge TPU on USB: max (libedgetpu1-max, default) or std (libedgetpu1-std)."""
    widths: tuple[Share, ...] = (0.25, 0.5, 0.75)
    """Shares of the channels that each group of layers may keep, in addition to all of them."""
    multiple: Annotated[int, Field(ge=1, le=1024)] = 8
    """Numbers of channels are rounded up to multiples of this."""
    depth: bool = True
    """Whether residual blocks may be left out."""
    kernels: bool = True
    """Whether kernels of 5x5 and larger may be replaced by their centre, of 3x3 at the least."""
    random: Annotated[int, Field(ge=0, le=16)] = 2
    """Number of random sub-networks in each training step, in addition to the largest and the smallest network."""
    candidates: Annotated[int, Field(ge=1, le=100_000)] = 300
    """Number of sub-networks that are evaluated on validation."""
    population: Annotated[int, Field(ge=2, le=10_000)] = 50
    """Number of sub-networks in one generation of the evolution; a quarter as many have descendants, the best of all
    generations so far."""
    samples: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Number of training samples for the batch norm statistics of each sub-network; they are one batch."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 40
    """Number of passes over the training split; each step trains the largest network and `random` + 1 smaller ones."""
    precision: Literal["float32"] = "float32"
    """Sub-networks are trained in float32 only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if all(getattr(self, name) is None for name in LIMITS):
            raise ValueError(f"set at least one limit: {', '.join(LIMITS)}")
        if self.subset is not None:
            raise ValueError("subset is not supported; sub-networks are trained on all samples")
        if not (self.widths or self.depth or self.kernels):
            raise ValueError("nothing may be smaller: set widths, depth or kernels")
        return self

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the found model; return the facts of the search."""
        from compress.architecture_search.search import search
        from compress.ir.tensorflow import keras
        from compress.stages import working_model
        from compress.stages.trial_conversion import TrialConverter

        keras(context.seed)
        model = working_model.read(artifact, context)
        converter = TrialConverter(chosen_inputs(context.data, self.samples, context.seed)[0], context.target)
        searching = Phase("architecture search", 20 * working_model.WRITING.weight)
        context.progress.plan(searching, working_model.WRITING)
        with context.progress.phase(searching):
            result = search(model, self._options(), self, context, converter)
        working_model.write(result.model, context.folder, context.progress)
        return result.facts

    def _options(self) -> SearchOptions:
        from compress.architecture_search.search import Limits, SearchOptions

        return SearchOptions(
            limits=Limits(self.latency_ms, self.size_bytes, self.streamed_bytes),
            widths=self.widths,
            multiple=self.multiple,
            depth=self.depth,
            kernels=self.kernels,
            random=self.random,
            population=self.population,
            candidates=self.candidates,
            samples=self.samples,
            host=self.host,
            clock=self.clock,
        )

    def changes_cost(self) -> bool:
        """Return True."""
        return True

    def uses(self) -> tuple[Use, ...]:
        """Return the methods of the training: sub-networks learn from the outputs of the largest network."""
        return ("labels", "distillation", *self.training_uses())

    def refused_by_execution(self, execution: Execution) -> Refusal | None:
        """Return that it trains on one device."""
        if execution.strategy == "one":
            return None
        return Refusal(f"it trains on one device, and execution has `strategy: {execution.strategy}`", "strategy: one")

    def refused_by_target(self, target: Target) -> Refusal | None:
        """Return the limit, host or clock that the target does not have."""
        for name, objective in PREDICTED.items():
            if getattr(self, name) is not None and objective not in target.cost.objectives:
                known = [limit for limit in LIMITS if PREDICTED.get(limit, "") in (*target.cost.objectives, "")]
                return Refusal(f"{name} is not predicted for the target {target.name}", ", ".join(known))
        return refused_host(target, self.host, self.clock)
