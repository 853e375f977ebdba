"""Preprocessing: its values, the digest that identifies it, and refused settings and samples."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deploy.contract.preprocessing import STEPS, Preprocessing, PreprocessingError, dequantize, fields, quantize

RANDOM = np.random.default_rng(0)


def apply(sample: Any, *steps: Any) -> np.ndarray:
    return Preprocessing(list(steps))(np.asarray(sample))


def resize(*size: int, **more: str) -> dict[str, Any]:
    return {"resize": {"size": list(size), **more}}


# --- numbers ----------------------------------------------------------------------------


def test_no_steps_give_float32_with_a_channel() -> None:
    image = apply(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert image.dtype == np.float32
    assert image.shape == (2, 3, 1)
    assert image.flags.c_contiguous
    np.testing.assert_array_equal(image[..., 0], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int64", "float16", "float64", "bool", ">f4", ">u2"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 3)])
def test_any_integer_or_float(dtype: str, shape: tuple[int, ...]) -> None:
    sample = RANDOM.integers(0, 2, shape).astype(dtype)
    image = apply(sample, resize(8, 8, filter="nearest"), {"scale": {"from": [0, 1], "to": [0, 2]}})
    expected = np.repeat(sample.reshape(4, 6, -1), 2, axis=0).astype(np.float32) * 2
    assert image.dtype == np.float32
    assert image.shape == (8, 8, shape[2] if len(shape) == 3 else 1)
    np.testing.assert_array_equal(image[:, ::7], expected[:, ::5])  # the first and the last column stay


def test_the_sample_is_left_as_it_was() -> None:
    sample = np.ones((2, 2, 1), np.float32)
    apply(sample, {"scale": {"from": [0, 1], "to": [5, 6]}})
    np.testing.assert_array_equal(sample, 1)


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_resize_to_the_same_size_changes_nothing(method: str) -> None:
    sample = RANDOM.random((5, 7, 2), np.float32)
    np.testing.assert_array_equal(apply(sample, resize(5, 7, filter=method)), sample)


def test_resize_by_hand() -> None:
    row = np.array([[0.0, 4.0]])
    np.testing.assert_array_equal(apply(row, resize(1, 4))[0, :, 0], [0, 1, 3, 4])
    np.testing.assert_array_equal(apply(row, resize(1, 4, filter="nearest"))[0, :, 0], [0, 0, 4, 4])
    np.testing.assert_array_equal(apply([[0.0, 1, 2, 3]], resize(1, 2))[0, :, 0], [0.5, 2.5])
    np.testing.assert_array_equal(apply([[0.0, 1, 2, 3]], resize(1, 2, filter="nearest"))[0, :, 0], [1, 3])
    np.testing.assert_array_equal(apply(row.T, resize(4, 1))[:, 0, 0], [0, 1, 3, 4])


@pytest.mark.tensorflow
def test_resize_equals_tensorflow() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow as tf
    # With 26 to 11, 6 to 37 and other pairs, only float32 arithmetic breaks ties in the same way as TensorFlow.
    sides = (1, 2, 3, 5, 6, 8, 11, 13, 14, 23, 24, 26, 30, 32, 37, 96, 224)
    old = {"bilinear": tf.compat.v1.image.resize_bilinear, "nearest": tf.raw_ops.ResizeNearestNeighbor}
    for given_side in sides:
        sample = RANDOM.integers(0, 256, (given_side, 5, 2)).astype(np.float32)
        for side in sides:
            for method in ("bilinear", "nearest"):
                ours = apply(sample, resize(side, 9, filter=method))
                new = tf.image.resize(sample, [side, 9], method=method).numpy()
                np.testing.assert_allclose(ours, new, rtol=0, atol=1e-4, err_msg=f"{method} {given_side} to {side}")
                v1 = old[method](images=sample[None], size=[side, 9], half_pixel_centers=True)[0].numpy()
                np.testing.assert_allclose(ours, v1, rtol=0, atol=1e-4, err_msg=f"{method} {given_side} to {side}")


def test_scale() -> None:
    sample = np.array([[0, 8, 16, 32]], np.float32)
    np.testing.assert_array_equal(apply(sample, {"scale": {"from": [0, 16]}})[0, :, 0], [0, 0.5, 1, 2])
    np.testing.assert_array_equal(apply(sample, {"scale": {"from": [0, 16], "to": [1, -1]}})[0, :, 0], [1, 0, -1, -3])
    np.testing.assert_array_equal(apply(sample, {"scale": {"from": [16, 0], "to": [5, 5]}}), np.full((1, 4, 1), 5))


def test_normalize_each_channel_and_all() -> None:
    sample = np.array([[[1.0, 2.0, 3.0]]])
    one = apply(sample, {"normalize": {"mean": [1], "std": [2]}})
    np.testing.assert_array_equal(one, np.array([[[0, 0.5, 1]]], np.float32))
    per_channel = apply(sample, {"normalize": {"mean": [1, 1, 1], "std": [1, 2, 4]}})
    np.testing.assert_array_equal(per_channel, np.array([[[0, 0.5, 0.5]]], np.float32))
    mixed = apply(sample, {"normalize": {"mean": [1], "std": [1, 2, 4]}})
    np.testing.assert_array_equal(mixed, per_channel)


# --- the digest -------------------------------------------------------------------------

EQUAL = [
    ([resize(8, 8)], [resize(8, 8, filter="bilinear")]),
    ([resize(8, 8)], [{"resize": {"filter": "bilinear", "size": (8.0, 8.0)}}]),
    ([resize(8, 8, fit="pad")], [resize(8, 8, fit="pad", align="center")]),
    ([{"scale": {"from": [0, 16]}}], [{"scale": {"to": [0.0, 1.0], "from": [0.0, 16.0]}}]),
]
DIFFERENT: list[list[Any]] = [
    [],
    [resize(8, 8)],
    [resize(8, 9)],
    [resize(9, 8)],
    [resize(8, 8, filter="nearest")],
    [resize(8, 8), resize(8, 8)],
    [{"scale": {"from": [0, 16]}}],
    [{"scale": {"from": [0, 16], "to": [0, 2]}}],
    [{"scale": {"from": [0, 16.000001]}}],
    [{"normalize": {"mean": [0], "std": [1]}}],
    [{"normalize": {"mean": [0, 0], "std": [1]}}],
    [resize(8, 8), {"scale": {"from": [0, 16]}}],
    [{"scale": {"from": [0, 16]}}, resize(8, 8)],
]


@pytest.mark.parametrize(("short", "long"), EQUAL)
def test_digest_is_of_what_is_computed(short: list[Any], long: list[Any]) -> None:
    assert Preprocessing(short).digest == Preprocessing(long).digest


@pytest.mark.parametrize("steps", DIFFERENT)
def test_specification_survives_json(steps: list[Any]) -> None:
    kept = Preprocessing(steps).specification
    assert kept == steps
    again = Preprocessing(json.loads(json.dumps(kept)))
    assert again.digest == Preprocessing(steps).digest


STANDING = [
    *("1788f993b4772e35", "0b50abf4bffd5b66", "0ae2f05b0a4ce0cb", "3cc432c58cbc105f", "a98b07568d3e0ea8"),
    *("3776d59a91358fc4", "421d8fb631c53835", "ed603ef9a7d76864", "b5da4621d46e7ee1", "91247029894422c5"),
    *("4d3d82e713fdc459", "4da3a7417631037b", "459040c3f1977790"),
]
"""The first digits of the digests of DIFFERENT when resize had only size and filter: old bundles are still read."""


def test_specifications_of_the_first_bundles_keep_their_digest() -> None:
    assert [Preprocessing(steps).digest[:16] for steps in DIFFERENT] == STANDING


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"resize": {"size": [8, 8]}},
        {"filter": "area", "antialias": True, "levels": True, "fit": "pad", "fill": 3, "align": "top_left"},
    ),
    ({"crop": {"share": 0.5}}, {"share": 0.6}),
    ({"pad": {"size": [8, 8]}}, {"size": [8, 9], "fill": 1}),
    ({"colour": {"to": "grey"}}, {"to": "bgr", "from": "bgr"}),
    ({"clip": {"to": [0, 1]}}, {"to": [0, 2]}),
    ({"length": {"samples": 8}}, {"samples": 9, "keep": "end", "fill": 1}),
    ({"reshape": {"shape": [8, 8]}}, {"shape": [4, 16]}),
    ({"squeeze": {}}, {"axis": 0}),
    ({"tokens": {"length": 8, "buckets": 9}}, {"length": 9, "buckets": 10, "unit": "character"}),
]
SOUND = {"frame": 64, "step": 32, "rate": 8000, "bins": 4}
OTHER_SOUND = {
    "frame": 65,
    "step": 33,
    "rate": 8001,
    "bins": 5,
    "fft": 128,
    "window": "povey",
    "periodic": False,
    "centre": True,
    "fill": "reflect",
    "remove_mean": True,
    "preemphasis": 0.9,
    "power": 2,
    "range": [20, 3000],
    "mel": "slaney",
    "triangles": "hertz",
    "norm": "slaney",
    "log": "db",
    "offset": 1e-3,
    "floor": 1e-3,
    "relative": True,
    "depth": 80,
}
CHANGES += [({"log_mel": SOUND}, OTHER_SOUND), ({"mfcc": SOUND}, {**OTHER_SOUND, "coefficients": 2, "dct": "htk"})]


def test_every_key_is_in_the_digest() -> None:
    digests, count, steps = set[str](), 0, {"scale", "normalize"}
    for step, changes in CHANGES:
        ((name, settings),) = step.items()
        base: dict[str, Any] = {"bins": 5, "coefficients": 3} if name == "mfcc" else {}
        bases = {"antialias": {"filter": "bicubic"}, "align": {"fit": "letterbox"}}
        assert changes.keys() >= fields(STEPS[name]).keys() - {"size"}
        for key, value in changes.items():
            changed = {name: {**settings, **base, **bases.get(key, {}), key: value}}
            digests.add(Preprocessing([changed]).digest)
            count += 1
        steps.add(name)
    assert len(digests) == count
    assert steps == STEPS.keys() - {"spectrogram"}


# --- what is refused --------------------------------------------------------------------

BAD_SPECIFICATIONS: list[tuple[Any, str]] = [
    ("resize", "list of steps"),
    ({"resize": {"size": [1, 1]}}, "list of steps"),
    (None, "list of steps"),
]
BAD_STEPS: list[tuple[Any, str]] = [
    ("resize", "map with one key"),
    ({}, "map with one key"),
    ({"resize": {"size": [1, 1]}, "scale": {"from": [0, 1]}}, "map with one key"),
    ({"rezise": {"size": [1, 1]}}, "unknown step 'rezise'; allowed: resize, crop, pad, colour, scale, normalize"),
    ({1: {}}, "unknown step 1"),
    ({("resize",): {}}, "unknown step"),
    (
        {"resize": {"size": [1, 1], "filtre": "nearest"}},
        "unknown key 'filtre' in resize; allowed: size, filter, antialias",
    ),
    ({"scale": {"from_": [0, 1]}}, "unknown key 'from_'"),
    ({"resize": {}}, "resize needs the key 'size'"),
    ({"resize": None}, "resize needs the key 'size'"),
    ({"scale": {"to": [0, 1]}}, "scale needs the key 'from'"),
    ({"normalize": {"mean": [0]}}, "normalize needs the key 'std'"),
    ({"resize": [8, 8]}, "resize must be a map"),
    ({"resize": {"size": [8, 8], "antialias": 1}}, "antialias must be true or false"),
    ({"resize": {"size": [8, 8], "filter": "area", "antialias": True}}, "antialias is for the filters bilinear"),
    ({"resize": {"size": [8, 8], "fit": "pad", "fill": []}}, "fill must be a list of numbers"),
    ({"crop": {}}, "one of the keys 'size' and 'share'"),
    ({"crop": {"size": [1, 1], "share": 0.5}}, "one of the keys 'size' and 'share'"),
    *(({"crop": {"share": share}}, "share must be a number") for share in (0, 1.1, math.nan, "1", True)),
    ({"pad": {"size": [8, 1e9]}}, "pad: size must be two whole numbers"),
    ({"colour": {"to": "hsv"}}, "to must be 'rgb', 'bgr' or 'grey'"),
    ({"clip": {"to": [1, 1]}}, "two increasing numbers"),
    *(({"reshape": {"shape": shape}}, "shape must") for shape in ([], [0], [-1, -1], [2.5], [1] * 7, [1 << 40])),
    *(({"squeeze": {"axis": axis}}, "axis must be a") for axis in (6, 0.5, None, [1])),
    *(
        ({"resize": {"size": size}}, "resize: size must be")
        for size in ("8x8", 8, None, [8], [8, 8, 8], [0, 8], [8, -1], [8.5, 8], [8193, 8], {"h": 8}, {8, 9})
    ),
    *(
        ({"resize": {"size": [8, side]}}, "resize: size must be")
        for side in (True, "8", None, math.nan, math.inf, -math.inf, 10**400, [8], object())
    ),
    *(
        ({"resize": {"size": [8, 8], "filter": method}}, "filter must be 'bilinear', 'nearest', 'area' or 'bicubic'")
        for method in ("lanczos", "Nearest", None, 3, ["nearest"], math.nan)
    ),
    *(
        ({"scale": {"from": values}}, "scale: from must be")
        for values in ([1, 1], [0, 0.0], [0], [0, 1, 2], "01", 1, [0, math.nan], [0, math.inf], [0, "1"], [0, 10**400])
    ),
    *(({"scale": {"from": [0, 1], "to": values}}, "scale: to must be") for values in ([0], [0, 1e39], [0, False])),
    ({"scale": {"from": [0, 1e-300], "to": [0, 1e30]}}, "too far apart"),
    ({"scale": {"from": [1e30, 1.0000001e30], "to": [0, 1e38]}}, "too far apart"),
    *(({"normalize": {"mean": mean, "std": [1]}}, "normalize: mean must be") for mean in (0, [], "0", [math.nan], {})),
    *(
        ({"normalize": {"mean": [0], "std": std}}, "normalize: std must be")
        for std in (1, [], [0], [-1], [1, 0], [1e-50], [math.nan], [math.inf], [10**400], [None])
    ),
]


@pytest.mark.parametrize(("specification", "message"), BAD_SPECIFICATIONS)
def test_bad_specification(specification: Any, message: str) -> None:
    with pytest.raises(PreprocessingError, match=message) as caught:
        Preprocessing(specification)
    assert caught.value.step is None


@pytest.mark.parametrize(("step", "message"), BAD_STEPS, ids=lambda value: str(value)[:40])
def test_bad_step_is_named(step: Any, message: str) -> None:
    with pytest.raises(PreprocessingError, match=message) as caught:
        Preprocessing([resize(2, 2), step])
    assert caught.value.step == 1


def test_channels_that_do_not_fit() -> None:
    preprocessing = Preprocessing([resize(2, 2), {"normalize": {"mean": [0, 0], "std": [1]}}])
    with pytest.raises(PreprocessingError, match="2 numbers for 3 channels") as caught:
        preprocessing(np.zeros((4, 4, 3)))
    assert caught.value.step == 1


@pytest.mark.parametrize(
    "sample",
    [
        np.zeros((0, 4, 3)),
        np.zeros((1, 4, 4, 3)),
        np.zeros(()),
        np.zeros((4, 4), object),
        np.zeros((4, 4), complex),
        np.zeros((4, 4), "U1"),
        np.zeros((4, 4), "M8[s]"),
    ],
    ids=lambda sample: f"{sample.dtype}{sample.shape}",
)
def test_bad_sample(sample: np.ndarray) -> None:
    with pytest.raises(PreprocessingError, match="a sample must be numbers"):
        Preprocessing([resize(2, 2)])(sample)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)
SETTINGS = st.dictionaries(
    st.sampled_from(["size", "filter", "from", "to", "mean", "std", "other"]),
    JSON | st.lists(st.floats() | st.integers(-3, 20), min_size=1, max_size=3) | st.just("nearest"),
    max_size=3,
)


@given(st.lists(st.dictionaries(st.sampled_from([*STEPS, "x"]), SETTINGS | JSON, max_size=2), max_size=3) | JSON)
def test_any_value_is_a_specification_or_refused(specification: Any) -> None:
    try:
        preprocessing = Preprocessing(specification)
    except PreprocessingError:
        return
    assert len(preprocessing.digest) == 64
    assert Preprocessing(preprocessing.specification).digest == preprocessing.digest


# --- quantized values -------------------------------------------------------------------


def test_quantize_rounds_half_to_even_and_saturates() -> None:
    values = np.array([-1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 0.3, 1e9, -1e9, np.inf, -np.inf], np.float32)
    expected = [-2, -2, 0, 0, 2, 2, 1, 127, -128, 127, -128]
    stored = quantize(values, 0.5, 0, np.int8)
    assert stored.dtype == np.int8
    np.testing.assert_array_equal(stored, expected)
    shifted = quantize(values, 0.5, 10, np.uint8)
    assert shifted.dtype == np.uint8
    np.testing.assert_array_equal(shifted, [8, 8, 10, 10, 12, 12, 11, 255, 0, 255, 0])


def test_zero_point_is_added_after_rounding() -> None:
    np.testing.assert_array_equal(quantize(np.array([0.25, 0.75], np.float32), 0.5, 1, np.int8), [1, 3])
    np.testing.assert_array_equal(quantize(np.array([-1, 0, 1], np.float32), 2 / 255, -1, np.int8), [-128, -1, 126])


def test_dequantize() -> None:
    real = dequantize(np.array([-128, 0, 127], np.int8), 0.5, -28)
    assert real.dtype == np.float32
    np.testing.assert_array_equal(real, [-50, 14, 77.5])
    np.testing.assert_array_equal(dequantize(np.array([0, 255], np.uint8), 0.25, 128), [-32, 31.75])


@given(
    arrays.arrays(np.float32, 20, elements=st.floats(-3, 3, width=32)),
    st.sampled_from([0.01, 1 / 256, 0.02]),
    st.integers(-128, 127),
)
def test_there_and_back_is_within_half_a_step(values: np.ndarray, scale: float, zero_point: int) -> None:
    low, high = scale * (-128 - zero_point), scale * (127 - zero_point)
    back = dequantize(quantize(values, scale, zero_point, np.int8), scale, zero_point)
    assert np.abs(back - np.clip(values, low, high)).max() <= scale / 2 + 1e-5
