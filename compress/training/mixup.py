"""Mixup: training on mixtures of two samples, with the loss of both in the same shares.

Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018.
"""

from __future__ import annotations

from typing import Any

from compress.tasks.base import Change

PARTNER = "partner_labels"
"""Key of the targets of the second sample."""
SHARE = "share"
"""Key of the share of the first sample: [n], 0.5 to 1."""


def change(concentration: float) -> Change:
    """Return a function: (samples, targets, two seeds) -> mixed samples, targets with `PARTNER` and `SHARE`.

    The partner of a sample is the next one in the batch, whose order is random.

    Args:
        concentration: both parameters of the Beta distribution from which shares are drawn.
    """
    import tensorflow as tf

    def changed(samples: Any, targets: Any, seeds: Any) -> tuple[Any, Any]:
        count = tf.shape(samples)[0]
        shape = (2, count)
        gammas = tf.random.stateless_gamma(shape, tf.random.experimental.stateless_fold_in(seeds, 7), concentration)
        # With a small concentration both can be 0 in float32: such samples stay as they are.
        share = tf.math.divide_no_nan(gammas[0], gammas[0] + gammas[1])
        share = tf.maximum(share, 1 - share)
        weights = tf.reshape(share, (-1, *[1] * (len(samples.shape) - 1)))
        mixed = weights * samples + (1 - weights) * tf.roll(samples, 1, axis=0)
        return mixed, {**targets, PARTNER: tf.roll(targets["labels"], 1, axis=0), SHARE: share}

    return changed
