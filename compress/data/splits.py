"""Division of samples into splits: stratified by class, and with groups kept together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Divide = Callable[[Indices, Indices, float, int], tuple[Indices, Indices]]
"""(labels of all samples, indices to divide, fraction, seed) -> (remaining indices, about this fraction of them)."""


def stratified(labels: Indices, indices: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Divide indices class by class: (remaining indices, `share` of each class, at least one of two or more)."""
    random = np.random.RandomState(seed)
    rest, taken = [], []
    for label in np.unique(labels[indices]):
        members = random.permutation(indices[labels[indices] == label])
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        taken.append(members[:count])
        rest.append(members[count:])
    return np.sort(np.concatenate(rest)), np.sort(np.concatenate(taken))


def at_random(labels: Indices, indices: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Divide indices at random: (remaining indices, `share` of them)."""
    return stratified(np.zeros_like(labels), indices, share, seed)


def quantile_strata(values: NDArray[np.float32]) -> Indices:
    """Number the samples by the quantile of a target, so that splits have the same range of it: [n], from 0.

    There are at most 10 strata, and fewer if a stratum would have less than 10 samples.
    """
    strata = max(min(10, len(values) // 10), 1)
    rank = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return (rank * strata // max(len(values), 1)).astype(np.int64)


def by_group(groups: Indices) -> Divide:
    """Divide whole groups (files, speakers, devices), stratified by the most frequent class of each."""

    def divide(labels: Indices, indices: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
        groups_present, members = np.unique(groups[indices], return_inverse=True)
        votes = np.zeros((len(groups_present), int(labels.max(initial=0)) + 1), np.int64)
        np.add.at(votes, (members, labels[indices]), 1)
        _, taken = stratified(votes.argmax(axis=1), np.arange(len(groups_present)), share, seed)
        chosen = np.isin(members, taken)
        return indices[~chosen], indices[chosen]

    return divide


def by_name(names: NDArray[np.str_]) -> Divide:
    """Divide whole groups, as `by_group`; a sample whose group has the name "" is divided alone."""
    groups = np.unique(names, return_inverse=True)[1]
    alone = names == ""
    groups[alone] = len(names) + np.arange(np.count_nonzero(alone))
    return by_group(groups)


def by_time(series: Indices, starts: Indices, length: int) -> Divide:
    """Take the last part of every class. Remaining windows do not overlap windows that were taken.

    Args:
        series: the recording that each window is a part of; recordings follow each other in time.
        starts: the first row of each window.
        length: rows of a window.
    """

    def divide(labels: Indices, indices: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
        del seed  # nothing is random
        order = indices[np.lexsort((starts[indices], series[indices]))]
        taken = []
        for label in np.unique(labels[order]):
            members = order[labels[order] == label]
            count = min(max(round(share * len(members)), 1), len(members) - 1)
            taken.append(members[len(members) - count :])
        chosen = np.concatenate(taken)
        rest = np.setdiff1d(indices, chosen)
        return rest[~overlapping(series, starts, length, rest, chosen)], np.sort(chosen)

    return divide


def overlapping(series: Indices, starts: Indices, length: int, windows: Indices, others: Indices) -> NDArray[np.bool_]:
    """Return which windows share a row with one of the others."""
    overlap = np.zeros(len(windows), bool)
    for number in np.unique(series[others]):
        mine = np.flatnonzero(series[windows] == number)
        theirs = np.sort(starts[others[series[others] == number]])
        after = np.searchsorted(theirs, starts[windows[mine]] - length, side="right")  # the first that ends later
        near = theirs[np.minimum(after, len(theirs) - 1)]
        overlap[mine] = (after < len(theirs)) & (near < starts[windows[mine]] + length)
    return overlap


def spread(labels: Indices, seed: int = 0) -> Indices:
    """Order indices so that every prefix has the class proportions of the whole."""
    random = np.random.RandomState(seed)
    rank = np.zeros(len(labels))
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        rank[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((labels, rank)).astype(np.int64)
