"""What a source of samples is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from compress.stage import Settings, Split


@dataclass(frozen=True)
class Samples:
    """Labelled samples; `read` decodes one when it is needed.

    Attributes:
        labels: int64 [n], indices into `class_names`.
        class_names: the classes.
        read: the decoded sample at an index: [height, width] or [height, width, channels].
        splits: the division that comes with the data, if one does: indices of each split.
        describe: what to call the sample at an index in a message.
    """

    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    read: Callable[[int], NDArray[Any]]
    splits: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)
    describe: Callable[[int], str] = "sample {}".format


class Source(Settings):
    """A place where samples come from; its fields are its settings in pipeline.yaml."""

    name: ClassVar[str]

    def beside(self, folder: Path) -> Self:
        """The same source with relative paths taken from `folder`."""
        del folder
        return self

    def fingerprint(self) -> dict[str, Any]:
        """What changes whenever a sample does, found without decoding any.

        Raises:
            DataError: the data is not there.
        """
        raise NotImplementedError

    def load(self) -> Samples:
        """Opens the data.

        Raises:
            DataError: it is missing, empty, or not what it should be.
        """
        raise NotImplementedError
