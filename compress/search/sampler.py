"""The choice of the next trial: ParEGO, a Gaussian process on a random mixture of the objectives.

Source: J. Knowles, ParEGO: A Hybrid Algorithm with On-Line Landscape Approximation for Expensive Multiobjective
Optimization Problems, IEEE Transactions on Evolutionary Computation 10 (2006), 50-66. The mixture is the augmented
Tchebycheff function of the objectives with new weights for each trial; the trial with the largest expected improvement
is next. Unlike there, objectives are scaled by their ranks, so that a few extreme trials do not hide the others. A
trial that violates a condition, was stopped or failed counts as worse than all others, the more the further it violates
conditions.

`benchmarks/search.py --samplers` compares it with the samplers that come with Optuna: with 60 trials it finds clearly
better fronts than TPE and NSGA-II (docs/measured.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

from compress.search.space import Choices, Dimension, Space
from compress.search.study import stored_record

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STARTUP = 10
"""Random trials before the process is fitted."""
FITTED = 300
"""Most trials that the process is fitted to: its time grows with their cube."""
CANDIDATES = 300
"""Random candidates; the same number are changed members of the front."""
CHANGED = 0.25
"""The probability that a candidate near the front differs in a setting; at least 1.5 settings on average."""
DISTANCE = 0.15
"""The standard deviation of such a change, as a fraction of the range."""
AUGMENTATION = 0.05
"""The share of the sum of the objectives in the mixture (Knowles: 0.05)."""
WORSE = 0.1
"""The distance of trials without a result from the worst one with a result."""
Parameters = Mapping[str, Any]
"""The values of a trial as the sampler knows them."""


def distribution(dimension: Dimension) -> BaseDistribution:
    """Return a setting as Optuna's distribution: that of `dimension.suggest`."""
    if isinstance(dimension, Choices):
        if dimension.is_ordered:
            return IntDistribution(0, len(dimension.values) - 1)
        return CategoricalDistribution(dimension.words)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), dimension.log, int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, dimension.log, dimension.step)


class SeededByTrial(BaseSampler):
    """Chooses each trial with a new sampler, whose seed follows from the number of the trial.

    So a search that was killed continues with the same choices, and processes that ask at the same time differ.

    Args:
        make: makes a sampler from a seed.
        seed: the seed of the search.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._number = -1
        self._sampler = make(seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self._number:
            self._number = trial.number
            self._sampler = self._make((self._seed * 1_000_003 + trial.number) % 2**32)
        return self._sampler

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the settings that are chosen together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of these settings."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the value of another setting."""
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)


class FrontSampler(BaseSampler):
    """Chooses trials for one or more objectives with conditions.

    Args:
        space: what is varied.
        seed: the seed of this choice.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = {dimension.key: distribution(dimension) for dimension in space.dimensions}
        self._random = np.random.default_rng(seed)
        self._independent = RandomSampler(seed=seed)
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all settings; those of stages that a trial leaves out are chosen in vain."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next parameters; none while there are too few trials."""
        done = _distinct(study.get_trials(deepcopy=False))
        if len(done) < STARTUP:
            return {}
        values = self._mixture(done, study)
        fitted = self._fitted(values)
        points = np.array([self._encoded(done[index].params) for index in fitted])
        candidates = self._candidates(study)
        known = {_key(each.params) for each in done}
        new = [each for each in candidates if _key(each) not in known] or candidates
        encoded = np.array([self._encoded(each) for each in new])
        improvement = _expected_improvement(points, values[fitted], encoded, self._seed)
        return dict(new[int(np.argmax(improvement))])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _mixture(self, trials: Sequence[FrozenTrial], study: Study) -> NDArray[np.float64]:
        """Return one value for each trial, of which less is better: a mixture of its objectives with random weights."""
        from scipy.stats import rankdata

        signs = [1 if direction.name == "MINIMIZE" else -1 for direction in study.directions]
        is_good = np.array([each.state == TrialState.COMPLETE and _violation(each) == 0 for each in trials])
        worst = 0.0
        result = np.zeros(len(trials))
        if is_good.any():
            losses = np.array([each.values for each, good in zip(trials, is_good, strict=True) if good]) * signs
            scaled = (rankdata(losses, axis=0) - 1) / max(1, len(losses) - 1)
            weighted = scaled * self._random.dirichlet(np.ones(len(signs)))
            result[is_good] = weighted.max(axis=1) + AUGMENTATION * weighted.sum(axis=1)
            worst = result[is_good].max()
        violations = np.array([_violation(each) for each in trials])
        result[~is_good] = worst + WORSE * (1 + violations[~is_good])
        return result

    def _fitted(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the indices of the trials that the process is fitted to: all, or half the best and half any others."""
        if len(values) <= FITTED:
            return np.arange(len(values))
        order = np.argsort(values, kind="stable")
        best, others = np.split(order, [FITTED // 2])
        return np.concatenate([best, self._random.choice(others, FITTED - len(best), replace=False)])

    def _candidates(self, study: Study) -> list[Parameters]:
        """Return random parameters, and members of the front with random changes."""
        found: list[Parameters] = [self._random_parameters() for _ in range(CANDIDATES)]
        best = [each.params for each in study.best_trials] if len(study.directions) > 1 else _best(study)
        if best:
            found += [self._changed(best[self._random.integers(len(best))]) for _ in range(CANDIDATES)]
        return found

    def _random_parameters(self) -> dict[str, Any]:
        return {name: self._random_value(kind) for name, kind in self._space.items()}

    def _random_value(self, kind: BaseDistribution) -> Any:
        if isinstance(kind, CategoricalDistribution):
            return kind.choices[self._random.integers(len(kind.choices))]
        return _from_unit(kind, float(self._random.random()))

    def _changed(self, parameters: Parameters) -> dict[str, Any]:
        """Return the parameters of a trial with random changes; those that it does not have are random."""
        probability = max(CHANGED, 1.5 / len(self._space))
        result = self._random_parameters()
        for name, value in parameters.items():
            kind = self._space[name]
            if self._random.random() >= probability:
                result[name] = value
            elif not isinstance(kind, CategoricalDistribution):
                near = _to_unit(kind, value) + self._random.normal(0, DISTANCE)
                result[name] = _from_unit(kind, float(np.clip(near, 0, 1)))
        return result

    def _encoded(self, parameters: Parameters) -> list[float]:
        """Return parameters as numbers from 0 to 1; one that a trial does not have is in the middle."""
        numbers: list[float] = []
        for name, kind in self._space.items():
            if isinstance(kind, CategoricalDistribution):
                numbers += [float(parameters.get(name) == choice) for choice in kind.choices]
            else:
                numbers.append(_to_unit(kind, parameters[name]) if name in parameters else 0.5)
        return numbers


def _distinct(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return one finished trial for each choice of parameters; those that were interrupted have none."""
    found: dict[str, FrozenTrial] = {}
    for each in trials:
        if not each.state.is_finished():
            continue
        if (stored_record(each) or {}).get("status") != "interrupted":
            found.setdefault(_key(each.params), each)
    return list(found.values())


def _key(parameters: Parameters) -> str:
    return json.dumps(dict(parameters), sort_keys=True)


def _violation(trial: FrozenTrial) -> float:
    """Return how far a trial violates its conditions, at most 1; 1 for a trial without a result or conditions."""
    if trial.state != TrialState.COMPLETE and not trial.constraints:
        return 1.0
    return min(1.0, sum(max(0.0, value) for value in trial.constraints.values()))


def _best(study: Study) -> list[Parameters]:
    """Return the parameters of the best trial that holds all conditions, of a study with one objective."""
    sign = 1 if study.directions[0].name == "MINIMIZE" else -1
    complete = [
        each for each in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]) if _violation(each) == 0
    ]
    return [min(complete, key=lambda each: sign * each.values[0]).params] if complete else []


def _to_unit(kind: Any, value: float) -> float:
    """Return the position of a number in its range, from 0 to 1."""
    low, high = float(kind.low), float(kind.high)
    if high <= low:
        return 0.5
    if kind.log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _from_unit(kind: Any, position: float) -> Any:
    """Return the number at a position in a range."""
    low, high = float(kind.low), float(kind.high)
    value = low * (high / low) ** position if kind.log else low + (high - low) * position
    if kind.step is not None:
        value = low + round((value - low) / kind.step) * kind.step
    value = min(max(value, low), high)
    return round(value) if isinstance(kind, IntDistribution) else value


def _expected_improvement(
    points: NDArray[np.float64], values: NDArray[np.float64], candidates: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Return the expected improvement of each candidate over the best point, by a Gaussian process."""
    from scipy.stats import norm
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
    from threadpoolctl import threadpool_limits

    scaled = (values - values.mean()) / (values.std() or 1.0)
    lengths = np.full(points.shape[1], 0.5)
    kernel = ConstantKernel(1.0, (0.05, 20)) * Matern(lengths, (0.05, 20), nu=2.5) + WhiteKernel(0.01, (1e-5, 0.3))
    with threadpool_limits(1):  # the matrices are small
        process = GaussianProcessRegressor(kernel, random_state=seed % 2**31).fit(points, scaled)
        mean, deviation = process.predict(candidates, return_std=True)
    improvement = process.predict(points).min() - mean  # of the means, because single values have noise
    deviation = np.maximum(deviation, 1e-9)
    ratio = improvement / deviation
    expected: NDArray[np.float64] = improvement * norm.cdf(ratio) + deviation * norm.pdf(ratio)
    return expected
