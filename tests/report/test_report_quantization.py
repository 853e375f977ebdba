"""The report's section on quantization: its statements about the samples."""

from __future__ import annotations

from run_records import markdown_of, with_stages


def test_the_calibration_samples_are_counted() -> None:
    facts = {"calibration_samples": 64, "kept": "ptq", "ranges": "minmax of 64 samples", "agreement": 0.98}
    text = markdown_of(with_stages({"stage": "quantize", "facts": facts}))
    assert "Calibrated on 64 training samples. The file agrees with the float model on 0.980 of the held-out" in text
