"""Several tensors of one sample as a row: flattened, one after the other.

A model with one input takes samples of any shape. A model with several inputs takes rows, which its `TensorLayout`
splits. Outputs are compared as rows too.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import numpy as np

from deploy.contract.preprocessing import Array


class TensorLayout:
    """The tensors of one sample in a row.

    Args:
        names: their names, in the order of the model.
        shapes: their shapes, without the batch.

    Attributes:
        names: see above.
        shapes: see above.
        sizes: the number of values of each tensor.
        size: the number of values of a row.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self.names = tuple(names)
        self.shapes: Tuple[Tuple[int, ...], ...] = tuple(tuple(int(side) for side in shape) for shape in shapes)
        self.sizes = tuple(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)
        self.size = sum(self.sizes)

    @classmethod
    def of(cls, details: Sequence[Any]) -> TensorLayout:
        """Return the layout of a runtime's details of inputs or outputs, whose shapes begin with the batch."""
        return cls([str(detail["name"]) for detail in details], [detail["shape"][1:] for detail in details])

    def parts(self, rows: Array) -> List[Array]:
        """Return rows [n, size] as one flat array for each tensor: [n, values]."""
        ends = np.cumsum(self.sizes)[:-1]
        return list(np.split(rows, ends, axis=1))

    def split(self, rows: Array) -> List[Array]:
        """Return rows [n, size] as one array for each tensor: [n, *shape]."""
        return [part.reshape((len(part),) + shape) for part, shape in zip(self.parts(rows), self.shapes)]

    def join(self, arrays: Sequence[Array]) -> Array:
        """Return the arrays [n, *shape] of all tensors as rows [n, size]."""
        return np.concatenate([np.asarray(array).reshape(len(array), -1) for array in arrays], axis=1)
