"""Mixup: training on mixtures of two samples, with the loss of both in the same shares.

Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018.
"""

from __future__ import annotations

from typing import Any

from compress.tasks.base import Change, Draws

PARTNER = "partner_labels"
"""Key of the targets of the second sample."""
SHARE = "share"
"""Key of the share of the first sample: [n], 0.5 to 1."""


def change(concentration: float) -> Change:
    """Return a function: (samples, targets, random numbers) -> mixed samples, targets with `PARTNER` and `SHARE`.

    The partner of a sample is the one before it in the batch, whose order is random. The first sample is a partner
    only: the result has one sample less.

    Args:
        concentration: both parameters of the Beta distribution from which shares are drawn.
    """
    import tensorflow as tf

    def changed(samples: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        seeds = tf.random.experimental.stateless_fold_in(draws.seeds, 7)
        gammas = draws.own(tf.random.stateless_gamma((2, draws.size), seeds, concentration), axis=1)[:, 1:]
        # With a small concentration both can be 0 in float32: such samples stay as they are.
        share = tf.math.divide_no_nan(gammas[0], gammas[0] + gammas[1])
        share = tf.maximum(share, 1 - share)
        weights = tf.reshape(share, (-1, *[1] * (len(samples.shape) - 1)))
        mixed = weights * samples[1:] + (1 - weights) * samples[:-1]
        sample_targets = {name: array[1:] for name, array in targets.items()}
        return mixed, {**sample_targets, PARTNER: targets["labels"][:-1], SHARE: share}

    return changed
