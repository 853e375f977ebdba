"""The comparison of a quantized file with the float file, and warnings about samples, models and results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.data.preprocessed import alternatives
from compress.learning.quantization import activation_statistics, quantizer_placement
from compress.learning.quantization.activation_statistics import Statistics
from compress.learning.quantization.plan import QuantizationPlan, weights_digest
from compress.model.ir.keras_graph import Network
from compress.model.ir.weight_sparsity import empty
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks.base import Judge, Rows

BLOCK = 16
"""Samples between two reports of progress."""
FEW = 32
"""Calibration samples below which there is a warning."""
DISAGREEING = 0.1
"""Share of the held-out samples on which a file may disagree with the float model without a warning."""
FAR_DB = 10.0
"""Median signal-to-noise ratio of a file's outputs below which there is a warning; ordinary files have more than 30."""
FITTING = 1.0
"""Size of the misfit below which another preprocessing is proposed; that of the training has about 0."""
EXPLODING = 1e6
"""Activations of trained networks stay below this."""


@dataclass(frozen=True)
class FileAgreement:
    """Outputs of a float file and of its quantized file for the same samples.

    Attributes:
        expected: outputs of the float file [n, outputs].
        same: by sample how far both answer the same, from 0 to 1.
        snr_db: by sample the signal-to-noise ratio of the quantized file.
    """

    expected: Rows
    same: NDArray[np.float64]
    snr_db: NDArray[np.float64]

    @property
    def agreement(self) -> float:
        """The mean of `same`, rounded."""
        return round(float(self.same.mean()), 4)


def compared(
    float_file: Path, quantized_file: Path, samples: NDArray[np.float32], judge: Judge, progress: Progress = SILENT
) -> FileAgreement:
    """Run two .tflite files on the same samples."""
    rows = []
    for number, file in enumerate((float_file, quantized_file)):
        model, parts = LoadedModel(file, reproducible=True), []
        for start in range(0, len(samples), BLOCK):
            parts.append(model.scores(samples[start : start + BLOCK]))
            progress.update(number * len(samples) + min(start + BLOCK, len(samples)), 2 * len(samples))
        rows.append(np.concatenate(parts))
    expected, actual = rows
    return FileAgreement(expected, judge.same(expected, actual), judge.snr_db(expected, actual))


def about_samples(samples: NDArray[np.float32]) -> list[str]:
    """Describe calibration samples [n, ...] that are few or all the same."""
    warnings = []
    if len(samples) < FEW:
        warnings.append(f"{len(samples)} calibration samples are few: ranges may miss what comes later")
    if not np.ptp(samples, axis=0).any():
        warnings.append("all calibration samples are the same")
    return warnings


def about_model(trained: Network, samples: NDArray[np.float32], *, are_rows: bool = False) -> list[str]:
    """Describe samples that differ from the training data of a model, and layers whose weights are all zero.

    The network is the one that was trained: its batch norms are not folded. Samples that `are_rows` of the model's own
    table cannot have a wrong scale.
    """
    warnings = []
    far = None if are_rows else activation_statistics.misfit(trained, samples)
    if far is not None and far.is_large:
        warnings.append(
            f"the scale of the samples ({samples.min():.3g} to {samples.max():.3g}) does not fit the model: at its "
            f"first batch norm they are {far.distance:.3g} standard deviations away from the training data, and spread "
            f"{far.spread:.3g} times as much; {_better_scale(trained, samples)}"
        )
    zeros = empty(trained)
    if zeros:
        warnings.append(f"all weights are 0 in {', '.join(zeros)}: was the model trained?")
    repeated = quantizer_placement.repeated_softmax(trained)
    if repeated:
        warnings.append(
            f"the model applies softmax twice ({' and '.join(repeated)}): its scores are nearly equal, which 8 bits "
            "cannot show; remove the second softmax"
        )
    return warnings


def _better_scale(trained: Network, samples: NDArray[np.float32]) -> str:
    """Return what to do about samples that do not fit the first batch norm: the preprocessing with which they do."""
    fits = []
    for alternative in alternatives(samples):
        with np.errstate(over="ignore", invalid="ignore"):  # weights that are far too large have their own warning
            fit = activation_statistics.misfit(trained, alternative(samples))
        if fit is not None and fit.size < FITTING:
            fits.append((alternative, fit.size))
    if not fits:
        return "is data.preprocess the preprocessing of its training (0 to 1, -1 to 1, 0 to 255)?"
    best, _ = min(fits, key=lambda pair: pair[1])
    return f"{best.description} would fit; add {best.advice} to the end of data.preprocess, or change its steps"


def about_plan(plan: QuantizationPlan, network: Network) -> list[str]:
    """Describe a plan for other weights than those of the network, which is in canonical form."""
    if plan.weights_digest in ("", weights_digest(network)):
        return []
    if plan.trained_with_rounding:
        origin = "belongs to weights of quantization-aware training, which are only in the .tflite file next to it"
    else:
        origin = "was made for other weights than those of this model"
    return [f"the plan {origin}: ranges and edits may not fit; leave out quantize.plan for a new one"]


def about_activations(statistics: Statistics, outliers: list[int]) -> list[str]:
    """Describe samples with much larger activations than others, and activations that explode."""
    texts = []
    if outliers:
        few = f"{len(outliers)} of {statistics.samples} calibration samples"
        texts.append(f"{few} have activations more than three times as large as the others: are they corrupt?")
    reach = {point: float(max(-statistics.low[point].min(), statistics.high[point].max())) for point in statistics.low}
    far = [point for point, value in reach.items() if value > EXPLODING]
    if far:
        texts.append(f"the activations of {far[0]} reach {reach[far[0]]:.2g}: check the data and the training")
    return texts


def about_outputs(answers: FileAgreement, *, has_plan: bool, trained: bool) -> list[str]:
    """Describe float outputs that are all the same, and a file that differs from the float model.

    Args:
        answers: of the float file and the quantized file, on held-out samples. Their signal-to-noise ratio shows a loss
            that agreement does not show, where one class always wins.
        has_plan: whether the file was made by a plan; `debug` ranks the tensors of a plan.
        trained: whether its weights were trained with fake quantization, and so differ from the float model's.
    """
    texts = []
    hint = ": `python -m compress debug` ranks its tensors by their error" if has_plan else ""
    count = len(answers.expected)
    if count > 1 and not np.ptp(answers.expected, axis=0).any():
        texts.append("the float model has the same output for every sample")
    differing = 1 - float(answers.same.mean())
    ratio = float(np.median(answers.snr_db))
    if differing > DISAGREEING:
        texts.append(f"the file and the float model disagree on {differing:.0%} of {count} held-out samples{hint}")
    elif ratio < FAR_DB and not trained:
        texts.append(
            f"the outputs differ much from those of the float model, though both agree ({ratio:.1f} dB signal-to-noise "
            f"ratio){hint}"
        )
    return texts
