"""Unrolling of the loops in a TensorFlow graph: recurrent layers are loops over their time steps there.

The graph is evaluated operator by operator. What depends on no input is computed, such as shapes, counters and
conditions; every other operator is copied into a new graph, once for each step. TensorFlow's lists of tensors become
Python lists. So the structure of the recurrent layer does not matter, only that its number of steps is fixed.

Source: tensorflow.org/api_docs/python/tf/raw_ops (While, StatelessWhile, TensorList*).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_STEPS = 256
"""Largest number of steps of a loop that is unrolled."""
LOOPS = {"While", "StatelessWhile"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf"}
SWAPPED = [1, 0]
"""The first two axes of a sequence that Keras turns from [batch, steps] to [steps, batch], or back."""


class LoopError(Exception):
    """A loop cannot be unrolled; the message is the reason."""


@dataclass
class Steps:
    """A tensor of all time steps, [steps, batch, ...], as one value for each step: [batch, ...].

    Values are NumPy arrays, if they depend on no input, or symbolic tensors.
    """

    items: list[Any]


@dataclass
class _Evaluation:
    """The evaluation of one graph.

    Attributes:
        functions: the functions of the graph by name, as graphs.
        constants: the constants in the new graph, by the id of their array; the array is kept with it.
    """

    functions: dict[str, Any]
    constants: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def run(self, graph: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the values of some tensors of a graph, for values of its inputs.

        Raises:
            LoopError: a loop or a list depends on the values of an input of the model.
        """
        values = {tensor.name: value for tensor, value in zip(graph.inputs, inputs, strict=True)}
        for operation in graph.get_operations():
            if operation.type in ("Placeholder", "NoOp"):
                continue
            results = self._operation(operation, [values[tensor.name] for tensor in operation.inputs])
            values |= {tensor.name: result for tensor, result in zip(operation.outputs, results, strict=True)}
        return [values[tensor.name] for tensor in outputs]

    def _operation(self, operation: Any, inputs: list[Any]) -> list[Any]:
        """Return the outputs of an operation."""
        kind = operation.type
        if kind in LOOPS:
            return self._loop(operation, inputs)
        if kind in CALLS:
            return self._called(operation, "f", inputs)
        if kind in BRANCHES:
            branch = "then_branch" if _static(inputs[0], operation) else "else_branch"
            return self._called(operation, branch, inputs[1:])
        if kind in LIST_OPERATIONS:
            return LIST_OPERATIONS[kind](operation, inputs)
        if kind == "Identity":
            return inputs
        if any(isinstance(value, Steps) for value in inputs):
            return self._of_steps(operation, inputs)
        return self._tensors(operation, inputs)

    def _called(self, operation: Any, attribute: str, inputs: Sequence[Any]) -> list[Any]:
        graph = self.functions[operation.get_attr(attribute).name]
        return self.run(graph, inputs, graph.outputs)

    def _loop(self, operation: Any, values: list[Any]) -> list[Any]:
        """Return the values after the last step."""
        for _ in range(MOST_STEPS + 1):
            if not _static(self._called(operation, "cond", values)[0], operation):
                return values
            values = self._called(operation, "body", values)
        raise LoopError(f"the loop {operation.name} has more than {MOST_STEPS} steps")

    def _of_steps(self, operation: Any, inputs: list[Any]) -> list[Any]:
        """Return the outputs of an operation on all time steps: the sequence, one step, or another operation's."""
        steps, *others = inputs
        if operation.type == "ReverseV2" and isinstance(steps, Steps) and list(others[0]) == [0]:
            return [Steps(steps.items[::-1])]
        if operation.type == "Transpose" and isinstance(steps, Steps) and list(others[0][:2]) == SWAPPED:
            return [_stacked([self.tensor(item) for item in steps.items], axis=1)]
        if operation.type == "StridedSlice" and _takes_one(operation, others):
            return [steps.items[int(others[0][0])]]
        stacked = [
            _stacked([self.tensor(item) for item in value.items], axis=0) if isinstance(value, Steps) else value
            for value in inputs
        ]
        return self._tensors(operation, stacked)

    def _tensors(self, operation: Any, inputs: list[Any]) -> list[Any]:
        """Return the outputs of an operation on tensors: computed if possible, otherwise symbolic."""
        if operation.type == "Shape" and inputs[0].shape is not None and None not in tuple(inputs[0].shape):
            return [np.array(inputs[0].shape, operation.outputs[0].dtype.as_numpy_dtype)]
        if operation.type == "ZerosLike" and inputs[0].shape is not None and None not in tuple(inputs[0].shape):
            return [np.zeros(inputs[0].shape, operation.outputs[0].dtype.as_numpy_dtype)]
        if operation.type == "Transpose" and not isinstance(inputs[0], np.ndarray):
            perm = inputs[1]
            if isinstance(perm, np.ndarray) and list(perm[:2]) == SWAPPED and list(perm[2:]) == [*range(2, len(perm))]:
                return [Steps([inputs[0][:, step] for step in range(inputs[0].shape[1])])]
        if all(isinstance(value, np.ndarray) for value in inputs) and not operation.op_def.is_stateful:
            return _computed(operation, inputs)
        import tensorflow

        graph = tensorflow.compat.v1.get_default_graph()
        return list(_copied(graph, operation, [self.tensor(value) for value in inputs]).outputs)

    def tensor(self, value: Any) -> Any:
        """Return a value as a tensor of the new graph."""
        import tensorflow

        if isinstance(value, Steps):
            return _stacked([self.tensor(item) for item in value.items], axis=0)
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in self.constants:
            self.constants[id(value)] = value, tensorflow.constant(value)
        return self.constants[id(value)][1]


def unrolled(function: Any) -> Any:
    """Return a concrete function without loops that computes the same; the function itself if it has none.

    The inputs keep their names, and the outputs are a list in the same order.

    Args:
        function: a concrete function whose inputs have fixed shapes.

    Raises:
        LoopError: a loop has too many steps, or their number depends on the values of an input.
    """
    import tensorflow
    from tensorflow.python.framework import convert_to_constants, function_def_to_graph

    frozen = convert_to_constants.convert_variables_to_constants_v2(function, lower_control_flow=False)
    definition = frozen.graph.as_graph_def()
    if not any(node.op in LOOPS for node in definition.node):
        return function
    with frozen.graph.as_default():
        functions = {
            function_def.signature.name: function_def_to_graph.function_def_to_graph(function_def)
            for function_def in definition.library.function
        }

    specs = [tensorflow.TensorSpec(tensor.shape, tensor.dtype, tensor.op.name) for tensor in frozen.inputs]

    @tensorflow.function(input_signature=specs, autograph=False)
    def run(*tensors):  # type: ignore[no-untyped-def]
        evaluation = _Evaluation(functions)
        outputs = evaluation.run(frozen.graph, tensors, frozen.outputs)
        return [evaluation.tensor(output) for output in outputs]

    return run.get_concrete_function()


def _static(value: Any, operation: Any) -> Any:
    """Return a value that must not depend on an input of the model.

    Raises:
        LoopError: it does.
    """
    if not isinstance(value, np.ndarray):
        raise LoopError(f"{operation.type} {operation.name} depends on the values of an input")
    return value


def _takes_one(operation: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a StridedSlice takes one step: the other axes are whole."""
    masks = {name: operation.get_attr(name) for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")}
    rest = 2 ** len(arguments[0]) - 2  # every axis but the first one
    is_rest_complete = masks["begin_mask"] & rest == masks["end_mask"] & rest == rest
    has_others = masks["ellipsis_mask"] or masks["new_axis_mask"]
    return operation.get_attr("shrink_axis_mask") == 1 and is_rest_complete and not has_others


def _stacked(items: Sequence[Any], axis: int) -> Any:
    import tensorflow

    return tensorflow.concat([tensorflow.expand_dims(item, axis) for item in items], axis)


def _copied(graph: Any, operation: Any, inputs: Sequence[Any]) -> Any:
    """Add a copy of an operation to a graph."""
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    types = [output.dtype for output in operation.outputs]
    return graph.create_op(operation.type, list(inputs), types, attrs=attributes, op_def=operation.op_def)


def _computed(operation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an operation on arrays."""
    import tensorflow

    with tensorflow.Graph().as_default() as graph:
        outputs = _copied(graph, operation, [tensorflow.constant(value) for value in inputs]).outputs
        with tensorflow.compat.v1.Session() as session:
            return [np.asarray(value) for value in session.run(list(outputs))]


def _from_tensor(operation: Any, inputs: list[Any]) -> list[Any]:
    tensor = inputs[0]
    return [tensor.items if isinstance(tensor, Steps) else [tensor[step] for step in range(tensor.shape[0])]]


def _reserve(operation: Any, inputs: list[Any]) -> list[Any]:
    return [[None] * int(_static(inputs[1], operation))]


def _get_item(operation: Any, inputs: list[Any]) -> list[Any]:
    item = inputs[0][int(_static(inputs[1], operation))]
    if item is None:
        raise LoopError(f"{operation.name} reads an element that was not written")
    return [np.asarray(item) if isinstance(item, np.generic) else item]


def _set_item(operation: Any, inputs: list[Any]) -> list[Any]:
    items, index = list(inputs[0]), int(_static(inputs[1], operation))
    items[index] = inputs[2]
    return [items]


def _stack(operation: Any, inputs: list[Any]) -> list[Any]:
    if any(item is None for item in inputs[0]):
        raise LoopError(f"{operation.name} reads an element that was not written")
    return [Steps(inputs[0])]


LIST_OPERATIONS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "TensorListFromTensor": _from_tensor,
    "TensorListReserve": _reserve,
    "TensorListGetItem": _get_item,
    "TensorListSetItem": _set_item,
    "TensorListStack": _stack,
    "TensorListLength": lambda operation, inputs: [np.array(len(inputs[0]), np.int32)],
}
"""Operations on lists: (operation, inputs) -> outputs."""
