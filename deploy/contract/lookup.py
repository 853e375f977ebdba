"""The lookup of an embedding outside of a model: a sample has the numbers of rows, and the input gets the rows.

The Edge TPU's compiler does not map the lookup of an embedding (GATHER), so a quantized model begins after it: its
input is the rows. The table has them as the input stores them, in its dtype with its scale and zero point, so nothing
is rounded on the device.
"""

from __future__ import annotations

import numpy as np

from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription


class Lookup:
    """The lookup for an input.

    Args:
        table: the rows, [rows, width] in the dtype of the input.
        tensor: the input, [1, ..., width].

    Attributes:
        table: see above.
        shape: the shape of a preprocessed sample, which has a number for each row.

    Raises:
        ValueError: the table does not fit the input.
    """

    def __init__(self, table: Array, tensor: TensorDescription) -> None:
        fits = len(tensor.shape) >= 3 and tensor.shape[0] == 1 and table.ndim == 2 and len(table) > 0
        if not fits or table.shape[1] != tensor.shape[-1] or table.dtype != np.dtype(tensor.dtype):
            facts = (table.dtype, list(table.shape), tensor.dtype, list(tensor.shape))
            raise ValueError("a table of %s %r does not fit an input of %s %r" % facts)
        self.table = table
        self.shape = tuple(tensor.shape[1:-1])

    def __call__(self, numbers: Array) -> Array:
        """Return the rows of these numbers as the input tensor. Fractions are cut off, as Keras does it.

        Raises:
            ValueError: a number is not that of a row.
        """
        rows = np.trunc(numbers)
        if not ((rows >= 0) & (rows < len(self.table))).all():
            raise ValueError("a number is not from 0 to %d, the rows of the lookup table" % (len(self.table) - 1))
        return self.table[rows.astype(np.int64)].reshape((1,) + self.shape + (-1,))
