"""Interpreters with prepared outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest


class PreparedInterpreter:
    """An interpreter after an inference, with given outputs."""

    def __init__(
        self,
        outputs: Sequence[Any],
        size: tuple[int, int] = (100, 50),
        signatures: Mapping[str, Any] | None = None,
        quantization: tuple[float, int] = (0.0, 0),
    ) -> None:
        width, height = size
        self.tensors = [np.asarray(output) for output in outputs]
        self.tensors.append(np.zeros((1, height, width, 3), np.uint8))
        self._signatures = signatures or {}
        self._quantization = quantization

    def _detail(self, index: int) -> dict[str, Any]:
        tensor = self.tensors[index]
        shape = np.array(tensor.shape, np.int32)
        facts = {"index": index, "name": str(index), "shape": shape, "dtype": tensor.dtype.type}
        return {**facts, "quantization": self._quantization}

    def get_input_details(self) -> list[dict[str, Any]]:
        return [self._detail(len(self.tensors) - 1)]

    def get_output_details(self) -> list[dict[str, Any]]:
        return [self._detail(index) for index in range(len(self.tensors) - 1)]

    def tensor(self, index: int) -> Callable[[], Any]:
        return lambda: self.tensors[index]

    def _get_full_signature_list(self) -> Mapping[str, Any]:
        return self._signatures


@pytest.fixture
def prepared() -> type[PreparedInterpreter]:
    return PreparedInterpreter
