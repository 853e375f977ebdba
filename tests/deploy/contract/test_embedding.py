"""The embedding in a bundle: hostile manifests and arrays, and its directions by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_shop

from deploy.contract import bundle
from deploy.contract.embedding import imprinted, unit


def repacked(change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> bytes:
    """Return the bundle of the shop with another manifest or other members."""
    opened = small_shop.opened()
    manifest = bundle.json.loads(bundle.json.dumps(opened.manifest))  # a copy
    members = dict(opened.members)
    change(manifest, members)
    return bundle.pack(manifest, members)


REFERENCES = {"other": {"embeddings": "references-training.npy", "labels": "references-training-labels.npy"}}


def array(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Return the change of an array in a bundle."""
    return lambda _, members: members.update({name: bundle.array_bytes(change(bundle.read_array(members[name])))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest, _: manifest["embedding"].update(output="other"), "no model has the output 'other'"),
        (lambda manifest, _: manifest["embedding"].pop("output"), "no model has the output None"),
        (lambda manifest, _: manifest["embedding"]["head"].update(weights="../passwd"), "which is not in the bundle"),
        (lambda manifest, _: manifest["embedding"].pop("head"), "incomplete"),
        (lambda manifest, _: manifest.update(embedding=[]), "incomplete"),
        (lambda manifest, _: manifest["embedding"].update(references=REFERENCES), "split 'other'"),
        (lambda manifest, _: manifest["confidence"].update(temperature=-1), "temperature cannot be -1"),
        (array("head-weights.npy", lambda weights: weights[:, :3]), "not one of 8 classes"),
        (array("head-biases.npy", lambda biases: biases + np.float32("inf")), "finite"),
        (array("references-training-labels.npy", lambda labels: labels + 8), "one label each"),
        (array("references-training.npy", lambda rows: rows.astype(np.float32)), "rows of 48 values of int8"),
    ],
)
def test_invalid_entries_are_refused(change: Any, message: str) -> None:
    with pytest.raises(bundle.BundleError, match=message):
        repacked(change)


def test_imprinting_by_hand() -> None:
    vectors = np.array([[3.0, 1.0], [5.0, 1.0], [1.0, 4.0]], np.float32)
    head = imprinted(vectors, np.array([0, 0, 1]), 3, np.array([1.0, 1.0]))
    np.testing.assert_allclose(head.directions, [[1, 0], [0, 1], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(head.logits(np.array([[2.0, 2.0]])), [[0.7071, 0.7071, 0]], atol=1e-4)
    np.testing.assert_array_equal(unit(np.zeros((1, 2))), [[0, 0]])
