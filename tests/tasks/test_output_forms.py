"""The forms of outputs, and the comparison of two models' values of an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.tasks.output_forms import OutputForm, activation_of, form_of, forms_by_values, forms_of
from deploy.contract.tensors import TensorLayout

RANDOM = np.random.default_rng(0)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("form", ["softmax", "sigmoid", "values"])
def test_the_distance_is_0_for_equal_outputs_and_grows(keras: Any, form: Any) -> None:
    output = OutputForm("any", (5, 3), form, 2.0)
    expected = RANDOM.normal(size=(4, 5, 3)).astype(np.float32)
    for temperature in (1.0, 4.0):
        np.testing.assert_allclose(np.asarray(output.divergence(expected, expected, temperature)), 0, atol=1e-6)
        near = np.asarray(output.divergence(expected, expected * 1.1, temperature))
        far = np.asarray(output.divergence(expected, expected * -1.0, temperature))
        assert near.shape == (4,)
        assert (near > 0).all()
        assert (far > near).all()


def test_logits_of_probabilities(keras: Any) -> None:
    logits = RANDOM.normal(size=(4, 3)).astype(np.float32)
    actual = np.asarray(OutputForm("any", (3,), "softmax", 1.0).logits(softmax(logits)))
    np.testing.assert_allclose(actual - actual[:, :1], logits - logits[:, :1], atol=1e-4)
    actual = np.asarray(OutputForm("any", (3,), "sigmoid", 1.0).logits(1 / (1 + np.exp(-logits))))
    np.testing.assert_allclose(actual, logits, atol=1e-4)


def test_equal_decisions() -> None:
    classes = OutputForm("any", (2, 2), "softmax", 1.0)
    one = np.array([[[0.9, 0.1], [0.4, 0.6]]])
    other = np.array([[[0.6, 0.4], [0.7, 0.3]]])
    np.testing.assert_allclose(classes.agreement(one, other), [0.5])
    present = OutputForm("any", (2,), "sigmoid", 1.0)
    np.testing.assert_allclose(present.agreement(np.array([[0.6, 0.1]]), np.array([[0.9, 0.7]])), [0.5])
    np.testing.assert_allclose(present.agreement(np.array([[0.6, -1]]), np.array([[0.1, 2]]), logits=True), [0.5])
    numbers = OutputForm("any", (2,), "values", 10.0)
    np.testing.assert_allclose(numbers.agreement(np.array([[0.0, 0.0]]), np.array([[0.9, 1.1]])), [0.5])


def test_forms_by_values() -> None:
    probabilities = softmax(RANDOM.normal(size=(6, 4, 3)))
    assert form_of(probabilities) == "softmax"
    assert form_of(RANDOM.normal(size=(6, 4))) == "values"
    assert form_of(RANDOM.random((6, 4))) == "values"  # these values are not known to be probabilities
    rows = np.concatenate([probabilities.reshape(6, -1), RANDOM.normal(size=(6, 2))], axis=1)
    first, second = forms_by_values(TensorLayout(["out", "out"], [(4, 3), (2,)]), rows)
    assert (first.name, first.form, first.shape) == ("out", "softmax", (4, 3))
    assert (second.name, second.form) == ("out_2", "values")
    assert second.deviation == pytest.approx(rows[:, 12:].std())


def test_forms_by_layers(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6,))
    present = layers.Activation("sigmoid", name="present")(layers.Dense(2)(image))
    classes = layers.Reshape((3,), name="classes")(layers.Dense(3, activation="softmax")(image))
    plain = layers.Dense(1, name="plain")(image)
    model = keras.Model(image, [present, classes, plain])
    assert [activation_of(tensor) for tensor in model.outputs] == ["sigmoid", "softmax", "logits"]
    forms = forms_of(model, RANDOM.random((8, 6)))
    assert {form.name: form.form for form in forms} == {"present": "sigmoid", "classes": "softmax", "plain": "values"}
