"""Values that every interpreter must compute bit-exactly.

`python golden.py` prints them, on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct

import numpy as np

from deploy.contract import bundle, recording, text
from deploy.contract.preprocessing import VERSION, Preprocessing, dequantize, quantize

STEPS = [
    {"resize": {"size": [5, 7]}},
    {"scale": {"from": [0, 255], "to": [-1, 1]}},
    {"normalize": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.25, 1.5]}},
    {"resize": {"size": [4, 3], "filter": "nearest"}},
]
PICTURE = [
    {"crop": {"share": 0.9}},
    {"resize": {"size": [8, 9], "filter": "bicubic", "antialias": True}},
    {"colour": {"from": "rgb", "to": "bgr"}},
    {"resize": {"size": [6, 4], "filter": "area", "fit": "pad", "fill": [1, 2, 3]}},
    {"resize": {"size": [3, 8], "antialias": True, "levels": True, "fit": "crop"}},
    {"colour": {"from": "bgr", "to": "grey"}},
    {"pad": {"size": [10, 10], "fill": 7}},
    {"clip": {"to": [0, 200]}},
    {"reshape": {"shape": [-1]}},
]
SOUND = [
    {"length": {"samples": 2000, "keep": "centre"}},
    {"mfcc": {"rate": 8000, "frame": 200, "step": 80, "bins": 20, "range": [100, 3800], "offset": 0.001}},
    {"squeeze": {}},
]
TEXT = (
    "Stra\u00dfe, STRASSE; caf\u00e9, cafe\u0301; \u0130stanbul \u0131\u015f\u0131k \ufb01ne \u00bd x\u00b2 "
    "\u039f\u03b4\u03cc\u03c2 \u0416\u0443\u043a \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \ufdfa "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u65e5\u672c\u8a9e \uff21\uff22 "
    "\ud55c\uad6d\uc5b4 \U0001f600 snake_case 3.14 don't "
    "\u1ecd\u0300r\u1ecd\u0300 \u03c4\u03b1\u0390\u03b6\u03c9 \u0391\u055f\u03a3"
)
"""Text with scripts, letter case and compatibility forms that Unicode 11 has."""
EXPECTED = {
    "digest": "fa9b581a0a8900076222e8477cf8e0078c322a5a8cb439b196172d8cc8f8d223",
    "output": "6dc6d4ec57976ee7d657b852f6c4dc052be1cb9d280ee745c9225f60895af8b3",
    "quantized": "a350027b90835891ff2a6404d5c23012bbb331ceafc21fcf153fa16ceb31a4ec",
    "picture": "97add43fae209e1f6da0513a74d6bdd38ba2a1a8fe978c1cf9a8264a3f91b886",
    "sound": "0d11615273956803c00170a21501b541b33a7e626bc8321b37fe3e5dd2e5c241",
    "recordings": "d35f4f927d67eb566fcb5723656141c7136ad03a1510f2bd7418299940883aae",
    "texts": "1eb1f269b06591495344a1aefff9966e56fb56190564f49d02fda554a64ced44",
    "bundle": "f35086fa1eeee83bc190818c512623590c6a436242f80672d846d879599f2cd2",
    "accepted": 0,
}


def sample():
    """Return a uint8 image [9, 11, 3], made without a random generator."""
    return ((np.arange(9 * 11 * 3) * 37) % 256).astype(np.uint8).reshape(9, 11, 3)


def sound():
    """Return four tones and some noise, int16 [1500], made without a random generator and without a sine."""
    place = np.arange(1500)
    waves = sum(np.abs(place % period - period // 2) * (period % 3 - 1.2) for period in (7, 19, 32, 61))
    return np.rint(waves * 200 + place * 7919 % 101).astype(np.int16)


def recordings():
    """Return the decoded sounds of WAV files of every type with three channels: their mean, and the first one."""
    sounds = []
    for tag, bits in sorted(recording.TYPES):
        block = 3 * bits // 8
        values = bytes((place * 37 + place // 7) % 64 for place in range(block * 20))  # as floats, these are finite
        form = struct.pack("<HHIIHH", tag, 3, 8000, 8000 * block, block, bits)
        parts = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(values)) + values
        content = b"RIFF" + struct.pack("<I", len(parts)) + parts
        sounds += [recording.decode_wav(content, 8000, channels) for channels in ("mix", "first")]
    return np.concatenate(sounds)


def texts():
    """Return the tokens of words and of characters, for a text and for bytes that are not UTF-8."""
    samples = [text.sample_of(TEXT, 300), text.sample_of(bytes(range(256)), 256)]
    units = [
        Preprocessing([{"tokens": {"length": 200, "buckets": 65536, "unit": unit}}]) for unit in ("word", "character")
    ]
    return np.concatenate([unit(sample) for unit in units for sample in samples])


def tensor(name, shape, dtype, scale, zero_point):
    return {"name": name, "tensor": name, "shape": shape, "dtype": dtype, "scale": scale, "zero_point": zero_point}


def manifest(**changes):
    """Return the manifest of the bundle of `packed`."""
    image, scores = tensor("image", [1, 4, 3, 3], "int8", 0.05, -3), tensor("scores", [1, 2], "int8", 1 / 256, -128)
    models = {"int8": {"file": "int8.tflite", "inputs": [image], "outputs": [scores]}}
    preprocessing = {"version": VERSION, "digest": Preprocessing(STEPS).digest, "steps": STEPS}
    golden = {"inputs": ["golden-input-0.npy"], "outputs": {"int8": "golden-output-int8.npy"}}
    content = {
        "name": "tiny",
        "coralline": "0.0",
        "task": "classification",
        "labels": ["caf\u00e9", "tea"],
        "preprocessing": preprocessing,
    }
    return dict(content, models=models, golden=golden, **changes)


def members():
    """Return the members of the bundle of `packed`."""
    return {
        "int8.tflite": b"not really a model",
        "golden-input-0.npy": bundle.array_bytes(sample()),
        "golden-output-int8.npy": bundle.array_bytes(np.array([[12, -12]], np.int8)),
    }


def packed():
    return bundle.pack(manifest(), members())


def accepted(content):
    """Return how many damaged copies of a bundle are accepted: this must be 0, and no other error may occur.

    Each copy has a changed byte, or is cut.
    """
    count = 0
    changes = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(len(content))]
    for changed in changes + [content[:i] for i in range(len(content))]:
        try:
            bundle.Bundle(changed)
        except bundle.BundleError:
            continue
        count += 1
    return count


def sha(content):
    return hashlib.sha256(content).hexdigest()


def found():
    """Return the computed values, with the same keys as EXPECTED."""
    opened = bundle.Bundle(packed())
    output = opened.preprocessing(opened.array("golden-input-0.npy"))
    stored = quantize(output, 0.05, -3, np.int8)
    return {
        "digest": opened.preprocessing.digest,
        "output": sha(output.tobytes()),
        "quantized": sha(stored.tobytes() + dequantize(stored, 0.05, -3).tobytes()),
        "picture": sha(Preprocessing(PICTURE)(sample()).tobytes()),
        "sound": sha(quantize(Preprocessing(SOUND)(sound()), 0.25, 3, np.int8).tobytes()),
        "recordings": sha(recordings().tobytes()),
        "texts": sha(texts().tobytes()),
        "bundle": sha(packed()),
        "accepted": accepted(packed()),
    }


if __name__ == "__main__":
    print(json.dumps({"found": found(), "python": platform.python_version(), "numpy": np.__version__}))
