"""The search space: which settings of a pipeline file are varied, and the file with chosen values.

Every end of a range and every choice is checked before any trial, by checking the pipeline with it.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from compress.core.errors import CorallineError, PipelineError, listing, nearest, shown
from compress.model.importers import builder as builders
from compress.pipeline.schema import ModelSettings
from compress.pipeline.yaml_file import Document, DocumentNode, Location

if TYPE_CHECKING:
    from optuna.trial import Trial

STAGES = "stages"
BUILDER = ("model", "builder")
BUILDER_KEY = "model.builder"
ARGUMENTS = ("model", "arguments")
RANGE_KEYS = ("from", "to", "step", "log")
MAX_CHOICES = 1000
"""Choices of one setting; chosen: each one is checked before the first trial, in about 10 ms."""
LARGEST = 1e15
"""The largest number of a range: whole numbers up to it are exact."""
ROUNDING = 1e-6
"""The fraction of a step by which a number may differ from a multiple of the step."""
Values = Mapping[str, Any]
"""Chosen values by the name of the setting."""
Check = Callable[[Document], object]
"""Checks a pipeline file, and raises a CorallineError if it is invalid."""
KnownArguments = Mapping[str, frozenset[str] | None]
"""The arguments that each builder of a search has, by the name of the builder; None for any argument. It is empty for a
search that does not vary the builder."""


@dataclass(frozen=True)
class Choices:
    """A setting with a list of values.

    Attributes:
        key: its name in the search.
        location: where it is in the pipeline file.
        values: the values; numbers are in ascending order.
    """

    key: str
    location: Location
    values: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether all values are numbers: then neighbours are alike, and the sampler sees their positions."""
        return all(_is_number(value) for value in self.values)

    @property
    def words(self) -> list[str]:
        """The values as text, by which the sampler knows them."""
        return [json.dumps(value) for value in self.values]

    @property
    def to_check(self) -> list[tuple[Location, Any]]:
        """The values to check, each with its location in the list."""
        return [((index,), value) for index, value in enumerate(self.values)]

    def suggest(self, trial: Trial) -> None:
        """Choose a value."""
        if self.is_ordered:
            trial.suggest_int(self.key, 0, len(self.values) - 1)
        else:
            trial.suggest_categorical(self.key, self.words)

    def value(self, parameter: Any) -> Any:
        """Return the value that the sampler knows as `parameter`."""
        return self.values[parameter if self.is_ordered else self.words.index(parameter)]

    def parameter(self, value: object) -> Any:
        """Return a value as the sampler knows it; None if it is not one of the choices."""
        if value not in self.values:
            return None
        index = self.values.index(value)
        return index if self.is_ordered else self.words[index]


@dataclass(frozen=True)
class Range:
    """A setting with numbers from `low` to `high`, both included.

    Attributes:
        key: its name in the search.
        location: where it is in the pipeline file.
        low: the smallest value.
        high: the largest value.
        step: the distance between values; None for any number.
        log: whether factors count, not differences.
        integer: whether the setting takes integers only.
    """

    key: str
    location: Location
    low: float
    high: float
    step: float | None = None
    log: bool = False
    integer: bool = False

    @property
    def to_check(self) -> list[tuple[Location, Any]]:
        """The values to check, each with its location in the range."""
        after_low: list[tuple[Location, Any]] = [] if self.step is None else [(("step",), self.low + self.step)]
        return [(("from",), self.low), (("to",), self.high), *after_low]

    def suggest(self, trial: Trial) -> None:
        """Choose a value."""
        if self.integer:
            trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        else:
            trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def value(self, parameter: Any) -> Any:
        """Return the value that the sampler knows as `parameter`."""
        return parameter

    def parameter(self, value: object) -> Any:
        """Return a value as the sampler knows it; None if it is not in the range."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            return None
        if self.integer and value != int(value):
            return None
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        return value if abs(steps - round(steps)) < ROUNDING else None


Dimension = Choices | Range


@dataclass(frozen=True)
class Space:
    """The settings that a search varies.

    Attributes:
        document: the pipeline file.
        dimensions: the settings; the stages and the builder, on which others depend, come first.
        arguments: the arguments of the builders, if the builder is varied.
    """

    document: Document
    dimensions: tuple[Dimension, ...]
    arguments: KnownArguments = field(default_factory=dict)

    @cached_property
    def count(self) -> int | None:
        """The number of combinations; None if there is a range of real numbers."""
        if any(_count(dimension) is None for dimension in self.dimensions):
            return None
        in_stages = [d for d in self.dimensions if d.location[0] == STAGES and d.key != STAGES]
        arguments = [d for d in self.dimensions if _is_argument(d.location)]
        dependent = (*in_stages, *arguments)
        others = [d for d in self.dimensions if d.key not in (STAGES, BUILDER_KEY) and d not in dependent]
        return self._combinations(STAGES, in_stages) * self._combinations(BUILDER_KEY, arguments) * _product(others)

    def _combinations(self, key: str, dependent: Sequence[Dimension]) -> int:
        """Return the number of combinations of a setting with those settings that depend on its value."""
        deciding = next((d for d in self.dimensions if d.key == key and isinstance(d, Choices)), None)
        if deciding is None:
            return _product(dependent)
        return sum(_product([d for d in dependent if self._is_active(d, {key: value})]) for value in deciding.values)

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Return the values that a trial chooses.

        A trial has a parameter for every setting, because Optuna's samplers model only parameters that all trials have.
        """
        for dimension in self.dimensions:
            dimension.suggest(trial)
        return self.values(trial.params)

    def values(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of parameters.

        Settings of stages that the trial leaves out, and arguments that its builder does not have, have no value.
        """
        values: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.key in parameters and self._is_active(dimension, values):
                values[dimension.key] = dimension.value(parameters[dimension.key])
        return values

    def _is_active(self, dimension: Dimension, values: Values) -> bool:
        if _is_argument(dimension.location) and BUILDER_KEY in values:
            return _takes(self.arguments[values[BUILDER_KEY]], dimension.location)
        if dimension.location[0] != STAGES or len(dimension.location) == 1 or STAGES not in values:
            return True
        names = stage_names(self.document.value)
        return names[int(dimension.location[1])] in values[STAGES]

    def of_file(self) -> dict[str, Any]:
        """Return the values that the pipeline file itself has, as the sampler knows them, where the space has them."""
        parameters: dict[str, Any] = {}
        names = stage_names(self.document.value)
        for dimension in self.dimensions:
            is_order = dimension.location == (STAGES,)
            value = names if is_order else _value_at(self.document.value, dimension.location)
            parameter = dimension.parameter(value)
            if parameter is not None:
                parameters[dimension.key] = parameter
        return parameters

    def with_values(self, values: Values, name: str) -> Document:
        """Return the pipeline file with values, under a name, and without its search."""
        edits = {d.location: values[d.key] for d in self.dimensions if d.key in values}
        content = edited(self.document, edits, self.arguments)
        content = {key: value for key, value in content.items() if key != "search"} | {"name": name}
        return Document(self.document.path, content, self.document.lines)


def _count(dimension: Dimension) -> int | None:
    if isinstance(dimension, Choices):
        return len(dimension.values)
    step = dimension.step or (1 if dimension.integer else None)
    return None if step is None else round((dimension.high - dimension.low) / step) + 1


def _product(dimensions: Sequence[Dimension]) -> int:
    """Return the number of combinations of settings that have no real numbers."""
    return math.prod(_count(dimension) or 0 for dimension in dimensions)


def _is_argument(location: Location) -> bool:
    """Whether a location is that of one argument of the builder."""
    return location[:2] == ARGUMENTS and len(location) > len(ARGUMENTS)


def _takes(known: frozenset[str] | None, location: Location) -> bool:
    """Whether a builder with these arguments has the one at a location."""
    return known is None or location[len(ARGUMENTS)] in known


def _value_at(content: Any, location: Location) -> Any:
    """Return the value at a location; None if it is not there."""
    for part in location:
        if isinstance(content, list) and isinstance(part, int):
            content = content[part]
        elif isinstance(content, dict):
            content = content.get(part)
        else:
            return None
    return content


def stage_names(content: Mapping[str, Any]) -> list[str]:
    """Return the name by which a search knows each stage of a pipeline file: its id, or the name of the stage."""
    names = []
    for entry in content[STAGES]:
        name = entry if isinstance(entry, str) else next(iter(entry))
        settings = {} if isinstance(entry, str) else entry[name] or {}
        names.append(str(settings.get("id") or name))
    return names


def edited(document: Document, edits: Mapping[Location, Any], arguments: KnownArguments) -> dict[str, Any]:
    """Return the content of a pipeline file with other values; an order of stages is applied last.

    Another builder keeps only those arguments that it has.
    """
    result: dict[str, Any] = copy.deepcopy(dict(document.value))
    names = stage_names(document.value)
    result[STAGES] = [{entry: {}} if isinstance(entry, str) else entry for entry in result[STAGES]]
    for location, value in edits.items():
        if location != (STAGES,):
            _set(result, location, value)
    known = arguments.get(edits[BUILDER]) if isinstance(edits.get(BUILDER), str) else None
    if known is not None:
        kept = result["model"].get("arguments", {})
        result["model"]["arguments"] = {name: value for name, value in kept.items() if name in known}
    if (STAGES,) in edits:
        result[STAGES] = [result[STAGES][names.index(name)] for name in edits[(STAGES,)]]
    return result


def _set(content: Any, location: Location, value: Any) -> None:
    """Set a value inside of maps and lists; maps that are missing are added.

    Raises:
        PipelineError: a part of the location is a name, and the value there is a list.
    """
    for part, following in itertools.pairwise(location):
        if isinstance(content, dict) and not isinstance(content.get(part), dict | list):
            content[part] = {}
        content = content[part]
        if isinstance(content, list) and not isinstance(following, int):
            raise PipelineError(f"{part} is a list, and has no {following!r}")
    content[location[-1]] = copy.deepcopy(value)


def read_space(document: Document, check: Check) -> Space:
    """Return the search space of a pipeline file that is valid for an ordinary run.

    Args:
        document: the pipeline file, with the key `search`.
        check: checks the file with other values.

    Raises:
        PipelineError: a setting does not exist, or a value is invalid for it; with the line.
    """
    node = document.root.child("search").child("settings")
    arguments = _arguments_of_builders(node.child(BUILDER_KEY)) if BUILDER_KEY in node.value else {}
    keys = sorted(node.value, key=lambda key: key not in (STAGES, BUILDER_KEY))
    dimensions = [_dimension(node, key, check, arguments) for key in keys]
    for first, second in itertools.permutations(dimensions, 2):
        if first.location == second.location:
            raise node.error("the setting has two names here", second.key, hint="remove one")
        if first.location != (STAGES,) and first.location == second.location[: len(first.location)]:
            raise node.error(f"{first.key!r} has a value for it, too", second.key, hint="remove one of them")
    return Space(document, tuple(dimensions), arguments)


def _arguments_of_builders(entry: DocumentNode) -> KnownArguments:
    """Return the arguments of the builders that a search chooses from; values that are no text are refused later.

    Raises:
        PipelineError: a builder does not exist, or is not a Python program; with the line.
    """
    document = entry.document
    choices = entry.value[:MAX_CHOICES] if isinstance(entry.value, list) else []
    arguments: dict[str, frozenset[str] | None] = {}
    for index, builder in enumerate(choices):
        if not isinstance(builder, str):
            continue
        trust = document.value["model"].get("trust", False)
        try:
            known = builders.known_arguments(*builders.find(builder, document.path.parent, trust=trust))
        except CorallineError as error:
            raise _unusable(entry, builder, (index,), error) from error
        arguments[builder] = None if known is None else frozenset(known)
    return arguments


def _dimension(node: DocumentNode, key: str, check: Check, arguments: KnownArguments) -> Dimension:
    location = _location(node, key)
    entry = node.child(key)
    if isinstance(entry.value, list):
        dimension: Dimension = _choices(entry, key, location)
    elif key == STAGES:
        allowed = "[[train, quantize], [train, prune, quantize]]"
        raise entry.error(f"{shown(entry.value)} is not a list of orders", allowed=allowed)
    elif isinstance(entry.value, dict):
        dimension = _range(entry, key, location)
    else:
        raise entry.error(f"{shown(entry.value)} is not a range or a list", allowed="{from: 0.3, to: 0.9}, or [a, b]")
    builder = _builder_with(entry, location, arguments)
    for position, value in dimension.to_check:
        _check_value(entry, {location: value} | builder, arguments, position, check)
    if isinstance(dimension, Range):
        return _with_numbers(dimension, entry, check)
    return replace(dimension, values=tuple(sorted(dimension.values))) if dimension.is_ordered else dimension


def _check_value(
    entry: DocumentNode, edits: Mapping[Location, Any], arguments: KnownArguments, position: Location, check: Check
) -> None:
    """Check the pipeline with edits, the first of which is the value that a search can choose.

    Raises:
        PipelineError: the value is invalid.
    """
    document = entry.document
    try:
        check(Document(document.path, edited(document, edits, arguments), document.lines))
    except CorallineError as error:
        raise _unusable(entry, next(iter(edits.values())), position, error) from error


def _unusable(entry: DocumentNode, value: Any, position: Location, error: CorallineError) -> PipelineError:
    """Return the error for a value that a search cannot use."""
    what = f"{shown(value)} cannot be used: {error.what}"
    return entry.error(what, *position, allowed=error.allowed, hint=error.hint)


def _builder_with(entry: DocumentNode, location: Location, arguments: KnownArguments) -> dict[Location, Any]:
    """Return an edit to the first builder of the search that has an argument; none where nothing has to be edited.

    Raises:
        PipelineError: no builder of the search has the argument.
    """
    if not arguments or not _is_argument(location):
        return {}
    for builder, known in arguments.items():
        if _takes(known, location):
            return {BUILDER: builder}
    names = {name for known in arguments.values() for name in known or ()}
    raise entry.error(f"no builder of the search has the argument {location[2]!r}", allowed=listing(sorted(names)))


def _choices(entry: DocumentNode, key: str, location: Location) -> Choices:
    if not 1 <= len(entry.value) <= MAX_CHOICES:
        raise entry.error(f"has {len(entry.value)} choices", allowed=f"1 to {MAX_CHOICES}")
    for index, value in enumerate(entry.value):
        if value in entry.value[:index]:
            raise entry.error(f"{shown(value)} occurs twice", index, hint="remove one")
        if key == STAGES:
            _check_order(entry, value, index)
    return Choices(key, location, tuple(entry.value))


def _check_order(entry: DocumentNode, order: Any, order_index: int) -> None:
    """Check the names in one choice of stages.

    Raises:
        PipelineError: the choice is not a list of stages of the file, each at most once.
    """
    known = stage_names(entry.document.value)
    if not isinstance(order, list):
        raise entry.error(f"{shown(order)} is not a list of stages", order_index, allowed=listing(known))
    for index, name in enumerate(order):
        if known.count(name) != 1:
            what = f"the stage {shown(name)} is not in the file" if name not in known else f"two stages are {name!r}"
            hint = nearest(name, known) if name not in known else "give one an id"
            raise entry.error(what, order_index, index, allowed=listing(known), hint=hint)
        if name in order[:index]:
            raise entry.error(f"the stage {name!r} occurs twice", order_index, index, hint="write it twice in `stages`")


def _range(entry: DocumentNode, key: str, location: Location) -> Range:
    value = entry.value
    for name in value:
        if name not in RANGE_KEYS:
            raise entry.error(
                f"unknown key {name!r}", name, allowed=listing(RANGE_KEYS), hint=nearest(name, RANGE_KEYS)
            )
    for name in ("from", "to"):
        if not _is_number(value.get(name)):
            raise entry.error(f"a range needs a number for {name!r}", allowed="{from: 0.3, to: 0.9}")
    low, high, step, log = value["from"], value["to"], value.get("step"), value.get("log", False)
    if not -LARGEST <= low < high <= LARGEST:
        raise entry.error(
            f"{shown(low)} to {shown(high)} is not a range", "to", allowed="`to` above `from`, up to 1e15"
        )
    if not isinstance(log, bool):
        raise entry.error(f"{shown(log)} is not true or false", "log")
    if log and (low <= 0 or step is not None):
        raise entry.error("a logarithmic range begins above 0, and has no step", "log")
    if step is not None:
        if not _is_number(step) or step <= 0:
            raise entry.error(f"{shown(step)} is not a number above 0", "step")
        steps = (high - low) / step
        if not 0.5 < steps <= LARGEST or abs(steps - round(steps)) > ROUNDING:
            raise entry.error(f"the range is not a multiple of the step {shown(step)}", "step")
    return Range(key, location, low, high, step, log)


def _with_numbers(dimension: Range, entry: DocumentNode, check: Check) -> Range:
    """Return a range of whole numbers if the setting takes no others.

    A builder's argument takes anything: there it is a range of whole numbers if all its numbers are written so.
    """
    are_integers = all(isinstance(number, int) for number in (dimension.low, dimension.high, dimension.step or 1))
    takes_any = _is_argument(dimension.location)
    integers_only = are_integers and (takes_any or not _takes_fractions(dimension, entry, check))
    return replace(dimension, integer=integers_only)


def _takes_fractions(dimension: Range, entry: DocumentNode, check: Check) -> bool:
    """Return whether a setting takes a number between two whole ones."""
    between = dimension.low + (dimension.high - dimension.low) / math.pi
    try:
        _check_value(entry, {dimension.location: between}, {}, (), check)
    except PipelineError:
        return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _location(node: DocumentNode, key: str) -> Location:
    """Return where a setting is in the pipeline file.

    Raises:
        PipelineError: the file has no such part.
    """
    if key == STAGES:
        return (STAGES,)
    first, *rest = key.split(".")
    is_of_stage = first == STAGES and len(rest) > 0
    if is_of_stage:
        first, *rest = rest
    if first == "model" and rest and not is_of_stage:
        is_argument = "builder" in node.document.value["model"] and rest[0] not in ModelSettings.model_fields
        return (*ARGUMENTS, *rest) if is_argument else ("model", *rest)
    if first == "data" and rest[:1] == ["preprocess"] and len(rest) > 2 and not is_of_stage:
        return _in_list(node, key, ("data", "preprocess"), rest[1], rest[2:])
    names = stage_names(node.document.value)
    if not rest or first not in names or rest == ["id"]:
        allowed = f"model.NAME, data.preprocess.STEP.NAME, stages, or a setting of a stage: {listing(names)}"
        hint = f"add the name of its setting: {first}.NAME" if key in names else nearest(first, names)
        raise node.error(f"{key!r} is not a setting that can be varied", key, allowed=allowed, hint=hint)
    if names.count(first) > 1:
        raise node.error(f"{names.count(first)} stages are {first!r}", key, hint="give them ids, and name one")
    index = names.index(first)
    entry = node.document.value[STAGES][index]
    return (STAGES, index, entry if isinstance(entry, str) else next(iter(entry)), *rest)


def _in_list(node: DocumentNode, key: str, path: Location, name: str, rest: Sequence[str]) -> Location:
    """Return the location of a setting in a list of one-key maps."""
    entries = _value_at(node.document.value, path) or []
    names = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    if names.count(name) != 1:
        what = f"{name!r} is {names.count(name)} times in {'.'.join(map(str, path))}"
        raise node.error(what, key, allowed=listing(names), hint=nearest(name, names))
    return (*path, names.index(name), name, *rest)
