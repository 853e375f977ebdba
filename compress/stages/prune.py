"""`prune`: removes channels, so that layers get smaller."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.artifact import MODEL_KERAS, Artifact, Facts, Kind
from compress.distillation.settings import Teaching
from compress.errors import ModelError, PipelineError, StageError
from compress.files import write_atomically
from compress.stage import Context, Need, Stage, Unfit, Use
from compress.targets.base import Target
from compress.training.loop import TrainingSettings, chosen_inputs

if TYPE_CHECKING:
    from compress.pruning.allocation import Allocation, Cut, Lost, PruningPlan
    from compress.pruning.importance import ImportanceSamples
    from compress.pruning.objective import Objective
    from compress.tasks.base import Quality
    from compress.training.loop import Loss

STATE = "state.json"
TRIED: tuple[Allocation, ...] = ("balanced", "uniform")


@dataclass(frozen=True)
class State:
    """How far the work is.

    Attributes:
        steps: facts of the finished ones.
        cut: facts of the next one, if its channels are removed and it is not trained yet.
    """

    steps: list[Facts]
    cut: Facts | None


class Prune(Stage, TrainingSettings):
    """Removes the channels that matter least, where most is saved for them; then trains what is left."""

    name: ClassVar[str] = "prune"
    version: ClassVar[int] = 7
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "original", "target"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    objective: Literal["macs", "parameters", "size", "compute", "latency", "cache"] = "macs"
    """What is to be smaller: macs, parameters, size (of the 8-bit file), compute (time of the Edge TPU's array alone),
    latency (predicted on a host), or cache: until all parameters stay on the chip."""
    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest share of the objective that may stay; 0.5 if nothing else is said."""
    at_most: Annotated[float, Field(gt=0)] | None = None
    """The same as a number: MACs, parameters, bytes or milliseconds."""
    keep_macs: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Short for `objective: macs` with `keep`."""
    host: str | None = None
    """Where latency is predicted: usb3 (by default), usb2, pcie or devboard for an Edge TPU; see `estimate`."""
    clock: str | None = None
    """Of an Edge TPU on USB: max (libedgetpu1-max, by default) or std (libedgetpu1-std)."""
    importance: Literal["taylor", "batch_norm", "l2", "l1"] = "taylor"
    """Which channels of a layer go first: taylor asks what the loss would do without each, on training samples;
    the others go by the size of weights: norms, or the L2 norm with the batch norm's scale in it."""
    allocation: Literal["tried", "balanced", "measured", "global", "uniform"] = "tried"
    """How much goes where: balanced keeps as much importance as it can of every layer, so that none gets too narrow;
    measured takes each layer's channels away by turns and looks at the answers; global adds up the importance; uniform
    keeps about the same share everywhere, and then what is free. tried trains balanced and uniform for one pass each,
    and keeps what is better on validation; without training it is balanced."""
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training samples that importance and answers are measured with."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """In so many steps, with training after each."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Passes over the training split after the last step; 0: none."""
    epochs_between: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Passes after each of the steps before."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Adam's learning rate at the start: what is left knows most already."""
    distill: Teaching | None = None
    """In training, the original as a teacher beside the labels; by default there is none."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.distill is not None:
            self.distill.goes_with(self)
        given = [name for name in ("keep", "at_most", "keep_macs") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} say the same: leave one out")
        if self.keep_macs is not None and self.objective != "macs":
            raise ValueError(f"keep_macs goes with objective: macs; say keep for {self.objective}")
        if self.objective == "cache" and given:
            raise ValueError(f"{given[0]} does not go with objective: cache, whose limit is the Edge TPU's memory")
        return self

    def run(self, given: Artifact, context: Context) -> Facts:
        """The smaller model, what was removed and where, and the history of each step."""
        from compress.ir.tensorflow import keras
        from compress.stages import working_model

        keras(context.seed)
        state, model = self._resumed(context)
        model = working_model.read(given, context) if model is None else model
        loss = self.loss(model, context)
        steps = state.steps
        while not (steps and steps[-1]["done"]):
            facts = state.cut
            if facts is None:
                model, facts = self._smaller(model, steps, loss, context)
                self._keep(model, State(steps, facts), context)
            if facts["layers"]:  # otherwise there is nothing to heal
                facts |= self._trained(model, loss, context, len(steps) + 1, last=facts["done"])
            steps.append(facts)
            state = State(steps, None)
            self._keep(model, state, context)
        working_model.write(model, context.folder)
        return {"objective": self._goal(context.target).to_json(), "steps": steps}

    def _goal(self, target: Target) -> Objective:
        from compress.pruning.objective import Objective

        keep = self.keep if self.keep_macs is None else self.keep_macs
        if keep is None and self.at_most is None and self.objective != "cache":
            keep = 0.5
        host, clock = target.cost.host(self.host), target.cost.clock(self.clock)
        return Objective(self.objective, keep, self.at_most, host, clock)

    def uses(self) -> tuple[Use, ...]:
        """Return the measure of importance, and the methods of the training and of its teacher."""
        uses: list[Use] = ["channel importance", *self.training_uses()]
        if self.allocation == "measured":
            uses.append("measured sensitivity")
        if self.distill is not None:
            uses.append("distillation")
            uses += ["decoupled"] if self.distill.decoupled else []
        return tuple(uses)

    def unfit_target(self, target: Target) -> Unfit | None:
        """Return which host or clock the target does not have."""
        try:
            if self.host is not None:
                target.cost.host(self.host)
            if self.clock is not None:
                target.cost.clock(self.clock)
        except PipelineError as error:
            return Unfit(error.what, error.allowed)
        return None

    def loss(self, model: Any, context: Context) -> Loss | None:
        """What is trained on: the labels and, as far as asked, the original's scores; None without training."""
        from compress.distillation import losses as distillation
        from compress.distillation import teachers
        from compress.stages import working_model
        from compress.training import loop as fit

        between = self.epochs_between if self.steps > 1 else 0
        if not self.epochs and not between:
            return None
        self._refuse_idle(between, context)
        head = fit.head_of(model, context.data)
        if self.distill is None:
            return fit.label_loss(head)
        original = teachers.of_model(working_model.read(context.original, context), context.data, "original")
        return distillation.loss_of(head, [original], self.distill, self, context)

    def _refuse_idle(self, epochs_between: int, context: Context) -> None:
        """Nothing, if weights change in the training between steps; what is too short after the last, `fit` refuses."""
        samples = len(context.data.labels("train"))
        samples = samples if self.subset is None else self.subset.count(samples)
        batches = self.batches_per_epoch(samples) * epochs_between
        if 0 < batches < self.gradient_accumulation:
            raise StageError(
                f"epochs_between: {epochs_between} has {batches} batches, and gradient_accumulation: "
                f"{self.gradient_accumulation} makes one step of more, so that nothing would be learnt between steps",
                todo="raise epochs_between, or lower gradient_accumulation; epochs_between: 0 does without",
            )

    def _smaller(self, model: Any, earlier: list[Facts], loss: Loss | None, context: Context) -> tuple[Any, Facts]:
        """The model after one step more, not yet trained, and what was decided."""
        from compress.ir import keras_graph
        from compress.pruning import allocation as pruning
        from compress.pruning import importance
        from compress.stages.draft import draft
        from compress.training.bn_recalibration import recalibrate_batch_norms

        inputs = chosen_inputs(context.data, self.samples, context.seed)[0]
        if not earlier:
            importance.refuse_constant(model, inputs)
        samples = self._samples(model, context)
        cut = pruning.prepare(keras_graph.read(model), context.target, self.importance, samples)
        files = draft(cut.network, inputs, context.target)
        cut = replace(cut, costs=cut.costs.anchored(cut.costs.everything, files))
        losses, facts = self._losses(cut, samples, context)
        goal, whole = self._goal(context.target), earlier[0]["cost"]["before"] if earlier else None
        if told := goal.reached(cut, whole):
            context.progress.note(told)
        left = self.steps - len(earlier)
        found = {
            way: goal.settled(cut, each, whole, left, lambda smaller: draft(smaller, inputs, context.target))
            for way, each in losses.items()
        }
        plans = {way: pruning.plan(cut, counts) for way, (_, counts) in found.items()}
        way = next(iter(plans))
        if len({plan.counts for plan in plans.values()}) > 1:
            quality = {each: self._tried(_pruned(cut, plans[each]), loss, context) for each in plans}
            facts["tried"] = {each: quality[each].value for each in plans}
            for each in plans:
                if quality[way].is_worse_than(quality[each]):
                    way = each
        pruned = _pruned(cut, plans[way])
        facts |= recalibrate_batch_norms(pruned, context) if plans[way].layers else {}
        facts |= {"importance": cut.importance, "allocation": way}
        facts |= {**goal.compared(cut, *found[way], whole), **plans[way].to_json()}
        missed = goal.missed(*found[way], whole or facts["cost"]["before"]) if left == 1 else ""
        facts["warnings"] = self._warned(cut, files.missing, missed, context)
        return pruned, {**facts, "done": facts["done"] or left == 1}

    def _warned(self, cut: Cut, missing: str, missed: str, context: Context) -> list[str]:
        """What is odd about the model, told at once and for the record."""
        from compress.ir import weight_sparsity
        from compress.pruning import importance
        from compress.quantization.export import LOOP

        zeros = weight_sparsity.empty(cut.network)
        found = [f"all weights are 0 in {', '.join(zeros)}: was the model trained?"] if zeros else []
        if cut.importance != self.importance:
            found.append(importance.instead(self.importance, cut.importance))
        if missing:
            loop = "; MACs leave out what works in a loop" if LOOP in missing else ""
            found.append(f"size, time and memory are of those layers alone that can be followed: {missing}{loop}")
        found += [missed] if missed else []
        for text in found:
            context.progress.note(f"prune: {text}")
        return found

    def _samples(self, model: Any, context: Context) -> ImportanceSamples | None:
        """Training samples, chosen at random, if anything is to be measured."""
        from compress.pruning.importance import ImportanceSamples
        from compress.training import loop as fit

        if self.importance != "taylor" and self.allocation != "measured":
            return None
        inputs, labels = chosen_inputs(context.data, self.samples, context.seed)
        return ImportanceSamples(inputs, labels, fit.head_of(model, context.data))

    def _losses(
        self, cut: Cut, samples: ImportanceSamples | None, context: Context
    ) -> tuple[dict[str, Lost | None], Facts]:
        """What is lost of each set, by the ways to allocate that are asked for."""
        from compress.pruning import allocation as pruning
        from compress.pruning import sensitivity

        if self.allocation == "measured":
            assert samples is not None
            curves = sensitivity.curves(cut, samples, context.progress.update)
            told = [curve.to_json() for curve in curves]
            return {"measured": [curve.lost() for curve in curves]}, {"sensitivity": told}
        if self.allocation != "tried":
            return {self.allocation: pruning.losses(cut, self.allocation)}, {}
        return {way: pruning.losses(cut, way) for way in (TRIED if self.epochs else TRIED[:1])}, {}

    def _tried(self, model: Any, loss: Loss | None, context: Context) -> Quality:
        """Validation quality after one pass of training, of which nothing is kept."""
        from compress.training import loop
        from compress.training.validation import validation_quality

        assert loss is not None  # nothing is tried without training
        changes = {"epochs": 1, "ema": None, "subset": None, "early_stopping": None, "warmup": 0.0}
        batches = self.batches_per_epoch(len(context.data.labels("train")))
        changes["gradient_accumulation"] = min(self.gradient_accumulation, batches)
        once = self.model_copy(update=changes)
        loop.fit(model, loss, once, replace(context, unfinished=None, logs=None))
        return validation_quality(model, context)

    def _trained(self, model: Any, loss: Loss | None, context: Context, step: int, *, last: bool) -> Facts:
        """Train what is left after a step; keep that where validation is no worse."""
        from compress.training import healing

        epochs = self.epochs if last else self.epochs_between
        if not epochs or loss is None:
            return {}
        unfinished, logs = (path / f"step-{step}" if path else None for path in (context.unfinished, context.logs))
        own = replace(context, unfinished=unfinished, logs=logs)
        return healing.heal(model, loss, self.model_copy(update={"epochs": epochs}), own)

    def _keep(self, model: Any, state: State, context: Context) -> None:
        """Leaves what the next try goes on with, if this one is interrupted."""
        from compress.stages import working_model

        if context.unfinished is not None:
            name = f"pruned-{len(state.steps)}-{'cut' if state.cut else 'trained'}.keras"
            working_model.write_keras(model, context.folder)
            write_atomically(context.unfinished / name, (context.folder / MODEL_KERAS).read_bytes())
            told = {"model": name, "steps": state.steps, "cut": state.cut}
            write_atomically(context.unfinished / STATE, json.dumps(told).encode())

    def _resumed(self, context: Context) -> tuple[State, Any]:
        """How far an interrupted try came, and its model; None if there is none, or it cannot be read."""
        from compress.importers.keras import keras_file

        if context.unfinished is None or not (context.unfinished / STATE).exists():
            return State([], None), None
        try:
            told = json.loads((context.unfinished / STATE).read_bytes())
            model = keras_file.load(context.unfinished / told["model"], trust=context.trust)
            state = State(list(told["steps"]), told["cut"])
        except (OSError, ValueError, KeyError, TypeError, ModelError) as error:
            context.progress.note(f"begins anew: what an interrupted try has left cannot be read ({error})")
            return State([], None), None
        context.progress.note(f"goes on after step {len(state.steps)} of {self.steps}")
        return state, model


def _pruned(cut: Cut, plan: PruningPlan) -> Any:
    """The Keras model without the channels that a plan removes."""
    from compress.ir import keras_graph
    from compress.pruning import allocation

    return keras_graph.build(allocation.without(cut, plan))
