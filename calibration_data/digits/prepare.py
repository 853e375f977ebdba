"""Write digits.npz from scikit-learn's array of handwritten digits (a development dependency).

usage: python calibration_data/digits/prepare.py

The file is part of Coralline, so that the shipped pipeline needs no download and no scikit-learn. If its content
changes, put the printed SHA-256 into manifest.toml.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FILE = Path(__file__).with_name("digits.npz")


def main() -> None:
    """Write the images as uint8 [1797, 8, 8] from 0 to 16, and the labels as uint8 [1797]."""
    digits = load_digits()
    np.savez_compressed(FILE, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8))
    print(f"{FILE}: SHA-256 {hashlib.sha256(FILE.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
