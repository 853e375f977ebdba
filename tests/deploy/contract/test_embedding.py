"""The embedding in a bundle: hostile manifests, and bundles and runners of other versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
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
    return bundle.pack({k: v for k, v in manifest.items() if k not in ("members", "schema_version")}, members)


def _output(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["embedding"]["output"] = "other"


def _no_output(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    del manifest["embedding"]["output"]


def _missing(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["embedding"]["head"]["weights"] = "../passwd"


def _no_head(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    del manifest["embedding"]["head"]


def _list(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["embedding"] = []


def _wide(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    members["head-weights.npy"] = bundle.array_bytes(np.zeros((8, 3), np.float32))


def _infinite(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    members["head-biases.npy"] = bundle.array_bytes(np.full(8, np.inf, np.float32))


def _label(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    labels = bundle.read_array(members["references-training-labels.npy"])
    members["references-training-labels.npy"] = bundle.array_bytes(labels + 8)


def _dtype(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    rows = bundle.read_array(members["references-training.npy"])
    members["references-training.npy"] = bundle.array_bytes(rows.astype(np.float32))


def _split(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["embedding"]["references"]["other"] = manifest["embedding"]["references"]["training"]


def _confidence(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    manifest["confidence"]["temperature"] = -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_output, "no model has the output 'other'"),
        (_no_output, "no model has the output None"),
        (_missing, "which is not in the bundle"),
        (_no_head, "incomplete"),
        (_list, "incomplete"),
        (_wide, "not one of 8 classes"),
        (_infinite, "finite"),
        (_label, "one label each"),
        (_dtype, "rows of 48 values of int8"),
        (_split, "split 'other'"),
        (_confidence, "temperature cannot be -1"),
    ],
)
def test_invalid_entries_are_refused(change: Any, message: str) -> None:
    with pytest.raises(bundle.BundleError, match=message):
        repacked(change)


def test_the_bundle_as_it_is() -> None:
    opened = bundle.Bundle(repacked(lambda manifest, members: None))
    assert opened.digest == small_shop.opened().digest
    assert opened.embedding is not None
    assert opened.embedding.references["training"].embeddings.shape == (40, small_shop.HIDDEN)


def test_older_bundles_have_neither() -> None:
    opened = bundle.Bundle(devices.packed())
    assert (opened.embedding, opened.confidence) == (None, None)


def test_imprinting_by_hand() -> None:
    vectors = np.array([[3.0, 1.0], [5.0, 1.0], [1.0, 4.0]], np.float32)
    head = imprinted(vectors, np.array([0, 0, 1]), 3, np.array([1.0, 1.0]))
    np.testing.assert_allclose(head.directions, [[1, 0], [0, 1], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(head.logits(np.array([[2.0, 2.0]])), [[0.7071, 0.7071, 0]], atol=1e-4)
    np.testing.assert_array_equal(unit(np.zeros((1, 2))), [[0, 0]])
