"""`prune`: removes channels, so that layers get smaller."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from compress.stage import MODEL_KERAS, Artifact, Context, Facts, Kind, Need, Stage
from compress.store import write_atomically
from compress.training.fit import TrainingSettings
from compress.training.teaching import Teaching

if TYPE_CHECKING:
    from compress.training.cost import Counts
    from compress.training.importance import Samples
    from compress.training.network import Network
    from compress.training.objective import Objective
    from compress.training.pruning import Allocation, Cut, Lost, PruningPlan

MODEL, STEPS = "pruned-{}.keras", "steps.json"
"""What interrupted work leaves: the model after so many steps, and what is known of them."""
TRIED: tuple[Allocation, ...] = ("balanced", "uniform")


class Prune(Stage, TrainingSettings):
    """Removes the channels that matter least, where most is saved for them; then trains what is left."""

    name: ClassVar[str] = "prune"
    version: ClassVar[int] = 2
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
    host: Literal["usb3", "usb2", "pcie", "devboard"] = "usb3"
    """Where latency is predicted: see `python -m compress estimate`."""
    clock: Literal["max", "std"] = "max"
    """Of an Edge TPU on USB: libedgetpu1-max or libedgetpu1-std."""
    importance: Literal["taylor", "batch_norm", "l2", "l1"] = "taylor"
    """Which channels of a layer go first: taylor asks what the loss would do without each, on training samples;
    the others go by the size of weights: norms, or the L2 norm with the batch norm's scale in it."""
    allocation: Literal["tried", "balanced", "measured", "global", "uniform"] = "tried"
    """How much goes where: balanced keeps as much importance as it can of every layer, so that none gets too narrow;
    measured takes each layer's channels away by turns and looks at the answers; global adds up the importance; uniform
    keeps the same share everywhere. tried trains balanced and uniform for one pass each, and keeps the better one."""
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training samples that importance and answers are measured with."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """In so many steps, with training after each."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Passes over the training split after the last step; 0: none."""
    epochs_between: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Passes after each of the steps before."""
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
        from compress.training import network, working_model
        from compress.training.tensorflow import keras

        keras(context.seed)
        steps, model = self._resumed(context)
        model = working_model.read(given, context) if model is None else model
        while len(steps) < self.steps:
            smaller, facts = self._smaller(model, steps, context)
            epochs = self.epochs if len(steps) + 1 == self.steps else self.epochs_between
            if facts["layers"]:  # otherwise there is nothing to heal
                model = network.build(smaller)
                facts |= self._trained(model, epochs, context, len(steps))
            steps.append(facts)
            self._keep(model, steps, context)
        working_model.write(model, context.folder)
        return {"objective": self._goal().to_json(), "steps": steps}

    def _goal(self) -> Objective:
        from compress.training.objective import Objective

        keep = self.keep if self.keep_macs is None else self.keep_macs
        if keep is None and self.at_most is None and self.objective != "cache":
            keep = 0.5
        return Objective(self.objective, keep, self.at_most, self.host, self.clock)

    def _smaller(self, model: Any, earlier: list[Facts], context: Context) -> tuple[Network, Facts]:
        """The network after one step more, not yet trained, and what was decided."""
        from compress.training import network, pruning

        samples = self._samples(model, context)
        cut = pruning.prepare(network.read(model), context.target, self.importance, samples)
        losses, facts = self._losses(cut, samples, context)
        goal, whole = self._goal(), earlier[0]["cost"]["before"] if earlier else None
        left = self.steps - len(earlier)
        if told := goal.reached(cut.costs, whole):
            context.progress.note(told)
        plans = {way: pruning.plan(cut, goal.chosen(cut.costs, each, whole, left)) for way, each in losses.items()}
        made = {way: self._settled(cut, plan, model, context) for way, plan in plans.items()}
        way = self._best(made, {way: plan.counts for way, plan in plans.items()}, facts, context)
        facts |= {"allocation": way, **goal.compared(cut.costs, plans[way].counts), **plans[way].to_json()}
        return made[way], facts

    def _settled(self, cut: Cut, plan: PruningPlan, model: Any, context: Context) -> Network:
        """The network with fewer channels, its batch norms measured anew where it answers more like before then."""
        from compress.training import norms, pruning

        inputs = context.data.inputs("train")
        order = np.sort(np.random.default_rng(context.seed).permutation(len(inputs))[: self.samples])
        return norms.settled(pruning.without(cut, plan), model, inputs[order])

    def _samples(self, model: Any, context: Context) -> Samples | None:
        """Training samples, chosen at random, if anything is to be measured."""
        from compress.training import fit
        from compress.training.importance import Samples

        if self.importance != "taylor" and self.allocation != "measured":
            return None
        inputs, labels = context.data.inputs("train"), context.data.labels("train")
        order = np.sort(np.random.default_rng(context.seed).permutation(len(inputs))[: self.samples])
        return Samples(inputs[order], labels[order], fit.head_of(model, context.data))

    def _losses(self, cut: Cut, samples: Samples | None, context: Context) -> tuple[dict[str, Lost | None], Facts]:
        """What is lost of each set, by the ways to allocate that are asked for."""
        from compress.training import pruning, sensitivity

        ways = TRIED if self.allocation == "tried" else (self.allocation,)
        if samples is None or "measured" not in ways:
            return {way: pruning.losses(cut, way) for way in ways}, {}
        curves = sensitivity.curves(cut.network, cut.channels, cut.sets, samples, context.progress.update)
        measured = [curve.lost() for curve in curves]
        facts = {"sensitivity": [curve.to_json() for curve in curves]}
        return {way: measured if way == "measured" else pruning.losses(cut, way) for way in ways}, facts

    def _best(self, made: dict[str, Network], counts: dict[str, Counts], facts: Facts, context: Context) -> str:
        """Which of several networks is the most accurate on validation after one pass of training."""
        from compress.training import network

        if len(set(counts.values())) == 1:
            return next(iter(made))
        accuracy = dict[str, float]()
        for way, each in made.items():
            same = next((other for other in accuracy if counts[other] == counts[way]), None)
            if same is None:
                history = self._trained(network.build(each), 1, context)["history"]
                accuracy[way] = history[-1]["val_accuracy"] or 0.0
            else:
                accuracy[way] = accuracy[same]
        facts["tried"] = accuracy
        return max(accuracy, key=lambda way: accuracy[way])

    def _trained(self, model: Any, epochs: int, context: Context, step: int | None = None) -> Facts:
        """Trains what is left, on the labels and as far as asked on the original's scores."""
        from compress.training import distillation, fit, teachers, working_model

        if not epochs:
            return {}
        head = fit.head_of(model, context.data)
        loss = fit.label_loss(head)
        if self.distill is not None:
            original = teachers.of_model(working_model.read(context.original, context), context.data, "original")
            loss = distillation.loss_of(head, [original], self.distill, self, context)
        name = None if step is None else f"step-{step + 1}"  # None: to try it out, of which nothing is kept
        unfinished, logs = (path / name if path and name else None for path in (context.unfinished, context.logs))
        own = replace(context, unfinished=unfinished, logs=logs)
        return fit.fit(model, loss, self.model_copy(update={"epochs": epochs}), own)

    def _keep(self, model: Any, steps: list[Facts], context: Context) -> None:
        """Leaves what the next try goes on with, if this one is interrupted."""
        from compress.training import working_model

        if context.unfinished is not None and len(steps) < self.steps:
            name = MODEL.format(len(steps))
            working_model.write_keras(model, context.folder)
            write_atomically(context.unfinished / name, (context.folder / MODEL_KERAS).read_bytes())
            write_atomically(context.unfinished / STEPS, json.dumps(steps).encode())

    def _resumed(self, context: Context) -> tuple[list[Facts], Any]:
        """The steps that an interrupted try has finished, and the model after them; None if there is none."""
        from compress.importers import keras_file

        if context.unfinished is None or not (context.unfinished / STEPS).exists():
            return [], None
        steps = json.loads((context.unfinished / STEPS).read_bytes())
        context.progress.note(f"goes on after step {len(steps)} of {self.steps}")
        return steps, keras_file.load(context.unfinished / MODEL.format(len(steps)), trust=context.trust)
