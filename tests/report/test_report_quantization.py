"""The report's section on quantization: its statements about the samples."""

from __future__ import annotations

from run_records import markdown_of, with_stages


def test_calibration_without_data_is_said() -> None:
    synthetic = {"samples": 64, "held_out": 60, "distance_before": 0.6, "distance_after": 0.01}
    facts = {"calibration_samples": 64, "kept": "ptq", "ranges": "minmax of 64 samples", "agreement": 0.98}
    text = markdown_of(with_stages({"stage": "quantize", "facts": {**facts, "synthetic": synthetic}}))
    assert "Calibrated without data: on 64 synthetic samples" in text
    assert "(distance 0.6 before, 0.01 after)" in text
    assert (
        "agrees with the float model on 0.980 of 60 further synthetic samples (measured); real samples may differ."
        in text
    )
    assert "training samples" not in text.split("## Quantization")[1].split("\n## ")[0]
    plain = markdown_of(with_stages({"stage": "quantize", "facts": facts}))
    assert "Calibrated on 64 training samples. The file agrees with the float model on 0.980 of the held-out" in plain
