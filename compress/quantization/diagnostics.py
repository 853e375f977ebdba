"""What is strange about calibration samples, a model or a result, in a sentence for the user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Network
from compress.ir.weight_sparsity import empty
from compress.quantization import activation_statistics
from compress.quantization.activation_statistics import Statistics
from compress.quantization.plan import QuantizationPlan, weights_digest

FEW = 32
"""Calibration samples below which there is a warning."""
DISAGREEING = 0.1
"""Share of the held-back samples that a file may answer otherwise than the float model without a warning."""
FAR_DB = 10.0
"""Median signal-to-noise ratio of a file's answers below which there is a warning; ordinary files have more than 30."""
EXPLODING = 1e6
"""Activations beyond this are no activations of a trained network."""


def about_samples(samples: NDArray[np.float32]) -> list[str]:
    """What is strange about preprocessed calibration samples [n, ...] by themselves."""
    found = []
    if len(samples) < FEW:
        found.append(f"{len(samples)} calibration samples are few: ranges may miss what comes later")
    if not np.ptp(samples, axis=0).any():
        found.append("all calibration samples are the same")
    return found


def about_model(trained: Network, samples: NDArray[np.float32]) -> list[str]:
    """Samples that are not what a model was trained with, and layers whose weights are all zero.

    Args:
        trained: the network as it was trained, batch norm not folded.
        samples: preprocessed samples [n, ...].
    """
    found = []
    far = activation_statistics.misfit(trained, samples)
    if far is not None and far > activation_statistics.FAR:
        found.append(
            f"the calibration samples are {far:.3g} standard deviations from what the model's first batch norm "
            "saw in training: is data.preprocess what the model was trained with?"
        )
    zeros = empty(trained)
    return [*found, f"all weights are 0 in {', '.join(zeros)}: was the model trained?"] if zeros else found


def about_plan(plan: QuantizationPlan, network: Network) -> list[str]:
    """A plan for other weights than those of the network, which is in canonical form."""
    if plan.weights_digest in ("", weights_digest(network)):
        return []
    if plan.trained_with_rounding:
        belongs = "belongs to weights that were trained with rounding, and are only in the .tflite file beside it"
    else:
        belongs = "was made for other weights than this model has"
    return [f"the plan {belongs}: its ranges and edits may not fit; without quantize.plan they are found anew"]


def about_activations(found: Statistics, outliers: list[int]) -> list[str]:
    """Samples that reach much farther than others, and activations that explode."""
    texts = []
    if outliers:
        few = f"{len(outliers)} of {found.samples} calibration samples"
        texts.append(f"{few} reach more than three times as far as the others: are they corrupt?")
    reach = {point: float(max(-found.low[point].min(), found.high[point].max())) for point in found.low}
    far = [point for point, value in reach.items() if value > EXPLODING]
    if far:
        texts.append(
            f"the activations of {far[0]} reach {reach[far[0]]:.2g}: are the data and the training what they should be?"
        )
    return texts


def about_answers(
    wanted: NDArray[np.float32], same: NDArray[np.float64], snr_db: NDArray[np.float64], *, by_plan: bool, trained: bool
) -> list[str]:
    """Float answers that are all the same, and a file that answers otherwise than the float model, or nearly so.

    Args:
        wanted: outputs of the float model for the held-back samples [n, outputs].
        same: how far the .tflite file answers each of them the same, from 0 to 1 (`judging`).
        snr_db: the signal-to-noise ratio of each of its answers; it tells where agreement is no news, since one class
            wins whatever is lost.
        by_plan: whether the file was made by a plan, of which `debug` knows more.
        trained: whether its weights were trained with rounding, and so are others than the float model's.
    """
    texts, more = [], ": `python -m compress debug` says where it is lost" if by_plan else ""
    if len(wanted) > 1 and not np.ptp(wanted, axis=0).any():
        texts.append("the float model answers the same for every sample")
    apart, ratio = 1 - float(same.mean()), float(np.median(snr_db))
    if apart > DISAGREEING:
        texts.append(
            f"{apart:.0%} of {len(wanted)} held-back samples are answered otherwise than by the float model{more}"
        )
    elif ratio < FAR_DB and not trained:
        texts.append(
            f"the outputs are far from those of the float model, though they mean the same ({ratio:.1f} dB of signal "
            f"to noise){more}"
        )
    return texts
