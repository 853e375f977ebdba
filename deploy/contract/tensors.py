"""The inputs and outputs of models: their description in a bundle, and several of them as a row.

A row has the tensors of one sample, flattened, one after the other. A model with one input takes samples of any shape.
A model with several inputs takes rows, which its `TensorLayout` splits. Outputs are compared as rows too.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.preprocessing import Array, dequantize, quantize
from deploy.contract.step import count

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64", "bool")
MAX_RANK = 8
"""The largest number of dimensions of a tensor; chosen."""
MAX_VALUES = 1 << 30
"""The largest number of values of a tensor; chosen: as int8 it has the size of the largest bundle."""


class TensorDescription(NamedTuple):
    """An input or output of a model, as the manifest of a bundle describes it.

    Attributes:
        name: its name for applications; no two inputs or outputs of a model have the same one.
        tensor: its name in the .tflite file.
        shape: its shape, with the batch of 1.
        dtype: one of DTYPES.
        scale: the scale of quantized values; None: the values are not quantized.
        zero_point: the zero point of quantized values.
    """

    name: str
    tensor: str
    shape: Tuple[int, ...]
    dtype: str
    scale: Optional[float]
    zero_point: int

    @classmethod
    def of(cls, details: Sequence[Any]) -> List[TensorDescription]:
        """Return the descriptions of a runtime's details of all inputs or outputs, with their names in the file."""
        names = unique_names([str(detail["name"]) for detail in details])
        tensors = []
        for name, detail in zip(names, details):
            scale, zero_point = detail["quantization"]
            dtype = np.dtype(detail["dtype"]).name
            shape = tuple(int(length) for length in detail["shape"])
            tensors.append(cls(name, name, shape, dtype, float(scale) or None, int(zero_point)))
        return tensors

    @classmethod
    def parsed(cls, entry: Any) -> TensorDescription:
        """Return the description in a manifest. Unknown keys, of later versions, are ignored.

        Raises:
            ValueError: the entry is invalid.
        """
        if not isinstance(entry, dict):
            raise ValueError("%r is not a map" % (entry,))
        for key in cls._fields:
            if key not in entry:
                raise ValueError("a tensor has no %s" % key)
            if not _is_valid(key, entry[key]):
                raise ValueError("%s cannot be %r" % (key, entry[key]))
        scale = None if entry["scale"] is None else float(entry["scale"])
        return cls(entry["name"], entry["tensor"], tuple(entry["shape"]), entry["dtype"], scale, entry["zero_point"])

    @property
    def values(self) -> Tuple[Any, ...]:
        """Shape, dtype, scale and zero point."""
        return (self.shape, self.dtype, self.scale, self.zero_point)

    def to_json(self) -> Dict[str, Any]:
        """Return the entry of a manifest."""
        return dict(self._asdict(), shape=list(self.shape))

    @property
    def is_quantized(self) -> bool:
        """Whether the values are integers with a scale."""
        return self.scale is not None and not self.dtype.startswith("float")

    def stored(self, values: Array) -> Array:
        """Return real values in the dtype of the tensor: quantized if it is quantized, rounded if it has integers."""
        if self.scale is not None and self.is_quantized:
            return quantize(values, self.scale, self.zero_point, self.dtype)
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return np.clip(np.rint(values), limits.min, limits.max).astype(dtype)
        return values.astype(dtype)

    def real(self, stored: Array) -> Array:
        """Return the values of the tensor as float32, dequantized if it is quantized."""
        if self.scale is None or not self.is_quantized:
            return stored.astype(np.float32)
        return dequantize(stored, self.scale, self.zero_point)


def sample_shape(shape: Sequence[int]) -> Tuple[int, ...]:
    """Return the shape of a tensor without the batch of 1, if it begins with one: states of a model may not."""
    lengths = tuple(int(length) for length in shape)
    return lengths[1:] if lengths[:1] == (1,) else lengths


def as_row(outputs: Sequence[Array]) -> Array:
    """Return the outputs of a sample as [1, ...]: one output as it is, several as one row in a common dtype."""
    if len(outputs) == 1 and outputs[0].shape[:1] == (1,):
        return outputs[0]
    return np.concatenate([output.reshape(1, -1) for output in outputs], axis=1)


def unique_names(names: Sequence[str]) -> List[str]:
    """Return names of which no two are the same: a repeated one gets its number."""
    unique: Dict[str, None] = {}
    following: Dict[str, int] = {}
    for name in names:
        candidate = name
        while candidate in unique:
            number = following.get(name, 2)
            candidate = "%s_%d" % (name, number)
            following[name] = number + 1
        unique[candidate] = None
    return list(unique)


def _is_valid(key: str, value: Any) -> bool:
    """Return whether a value of a tensor in a manifest is valid."""
    if key in ("name", "tensor"):
        return isinstance(value, str)
    if key == "shape":
        if not isinstance(value, list) or len(value) > MAX_RANK:
            return False
        return all(type(length) is int and length > 0 for length in value) and count(value) <= MAX_VALUES
    if key == "dtype":
        return value in DTYPES
    if key == "scale":
        return value is None or (type(value) in (int, float) and 0 < value < 1e30)
    return type(value) is int and abs(value) < 1 << 31


class TensorLayout:
    """The tensors of one sample in a row.

    Args:
        names: their names, in the order of the model.
        shapes: their shapes, without the batch.

    Attributes:
        sizes: the number of values of each tensor.
        size: the number of values of a row.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self.names = tuple(names)
        self.shapes: Tuple[Tuple[int, ...], ...] = tuple(tuple(int(side) for side in shape) for shape in shapes)
        self.sizes = tuple(count(shape) for shape in self.shapes)
        self.size = sum(self.sizes)

    @classmethod
    def of(cls, tensors: Sequence[TensorDescription]) -> TensorLayout:
        """Return the layout of inputs or outputs."""
        return cls([tensor.name for tensor in tensors], [sample_shape(tensor.shape) for tensor in tensors])

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


class Lookup:
    """The lookup of an embedding outside of a model: a sample has the numbers of rows, and the input gets the rows.

    The Edge TPU's compiler does not map the lookup of an embedding (GATHER), so a quantized model begins after it: its
    input is the rows. The table has them as the input stores them, in its dtype with its scale and zero point, so
    nothing is rounded on the device.

    Args:
        table: the rows, [rows, width] in the dtype of the input.
        tensor: the input, [1, ..., width].

    Attributes:
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
            ValueError: the table has no row of a number.
        """
        rows = np.trunc(numbers)
        if not ((rows >= 0) & (rows < len(self.table))).all():
            raise ValueError("a number is not from 0 to %d, the rows of the lookup table" % (len(self.table) - 1))
        return self.table[rows.astype(np.int64)].reshape((1,) + self.shape + (-1,))
