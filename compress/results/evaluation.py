"""The results of an evaluation: whether outputs depend on the input, the comparison of two models, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compress.core.measurement import Measurement, Measurements

ExampleKind = Literal["different", "typical"]
EXAMPLES = "examples"
"""The folder of a run with the pictures of examples."""


@dataclass(frozen=True)
class Spread:
    """The counts of a model's most frequent output.

    Attributes:
        text: the answer and its count as a predicate: "answers 'Apple' to 449 of 449 test samples".
        same: samples that get the most frequent answer.
        others: samples whose label is another answer.
        told_apart: samples of `others` that get another answer.
        constant: whether all outputs are the same floating-point values, although the samples differ.
    """

    text: str
    samples: int
    same: int
    others: int
    told_apart: int
    constant: bool = False


@dataclass(frozen=True)
class Judgement:
    """The verdict whether a model's outputs depend on its input.

    Attributes:
        verdict: "degenerate" for one answer to nearly everything; "undecided" where the labels do not allow a verdict.
        text: the most frequent answer and its count, as a predicate.
        spread: the counts; None for a task that does not count answers.
    """

    verdict: Literal["varied", "degenerate", "undecided"]
    text: str
    spread: Spread | None = None


@dataclass(frozen=True)
class DegeneracyRecord:
    """The verdicts on the outputs of both models."""

    original: Judgement
    result: Judgement


@dataclass(frozen=True)
class ScaleRecord:
    """The channels of one scale in an output that mixes quantities of different size.

    Attributes:
        channels: the indices of the channels.
        low: the smallest value of the original in these channels.
        high: the largest value.
        sqnr_db: the ratio of the variation of the original's values to their error in dB.
        constant: the channels that vary in the original, and have one value in the result.
    """

    channels: tuple[int, ...]
    low: float
    high: float
    sqnr_db: float
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputComparisonRecord:
    """How close one output of the result is to the original's.

    Attributes:
        shape: the shape without the batch.
        sqnr_db: the ratio of the original's values to their error in dB.
        max_abs_error: the largest difference of a value.
        agreement: the share of equal decisions; None for an output without decisions.
        channel_axis: the axis of the channels in `shape`; None for an output of one scale.
        scales: the channels by scale, the largest first; empty for an output of one scale.
        step: the quantization step of the result; None for an output in floating point.
        flat_channels: the number of channels that vary in the original, and have one value in the result.
    """

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    max_abs_error: float
    agreement: float | None = None
    channel_axis: int | None = None
    scales: tuple[ScaleRecord, ...] = ()
    step: float | None = None
    flat_channels: int = 0


@dataclass(frozen=True)
class ClassRecord:
    """The quality of both models for one class.

    Attributes:
        samples: the number of test samples of the class; for detection, of its objects.
        ap50: for detection, the average precision at IoU 0.5 of both models.
    """

    name: str
    samples: int
    original: Measurement
    result: Measurement
    ap50: Mapping[str, float | None] | None = None

    @property
    def counted(self) -> str:
        """What `samples` counts, in the singular."""
        return "sample" if self.ap50 is None else "object"


@dataclass(frozen=True)
class ConfusionRecord:
    """Counts of test samples by true class (row) and predicted class (column), of both models."""

    original: tuple[tuple[int, ...], ...]
    result: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RightAnswersRecord:
    """Which test samples both models answer correctly.

    For each model, a bit for each sample as hexadecimal digits; the first sample is the highest bit of the first byte.
    """

    samples: int
    original: str
    result: str


@dataclass(frozen=True)
class ComparisonRecord:
    """The comparison of result and original.

    Attributes:
        measurements: drops, ratios, agreement.
        per_class: the quality for each class, if the task has classes.
        right: which samples are answered correctly, for tasks whose answers are right or wrong.
    """

    measurements: Measurements
    per_class: tuple[ClassRecord, ...] = ()
    confusion: ConfusionRecord | None = None
    outputs: tuple[OutputComparisonRecord, ...] = ()
    right: RightAnswersRecord | None = None


@dataclass(frozen=True)
class PictureRecord:
    """A picture of a sample with an answer drawn into it.

    Attributes:
        shows: the answer: "label", the correct one, "original" or "result".
        file: the name of the file in the folder EXAMPLES of the run.
        text: the answer in words.
    """

    shows: str
    file: str
    sha256: str
    text: str


@dataclass(frozen=True)
class ExampleRecord:
    """A test sample with the label, if there is one, and the answers of both models.

    Attributes:
        sample: its index in the test split.
        name: its name, such as the path of its file.
        kind: why it was chosen: a large difference between both models, or one near the median.
        difference: the difference in words.
    """

    sample: int
    name: str
    kind: ExampleKind
    difference: str
    pictures: tuple[PictureRecord, ...]


@dataclass(frozen=True)
class ExamplesRecord:
    """Test samples with the answers of original and result: the largest difference first, then typical ones.

    `note` says what is drawn, and `samples` from how many test samples the examples were chosen.
    """

    note: str
    samples: int
    examples: tuple[ExampleRecord, ...]
