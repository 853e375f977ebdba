"""Messages about operators that cannot be imported."""

from __future__ import annotations

from compress.model.importers.common.unsupported import Refused, unsupported


def test_a_message_lists_each_kind_once_and_the_facts_all_operators() -> None:
    refused = [Refused(f"loop_{number}", "Loop", "it is control flow") for number in range(40)]
    refused += [Refused(f"own_{number}", f"Own{number}", "r" * 1000) for number in range(40)]
    error = unsupported(refused, "model.onnx")
    assert (
        "80 operators cannot be converted to Keras layers: Loop 'loop_0': it is control flow (and 39 more of"
        in error.what
    )
    assert error.what.endswith("...; and 33 more")
    assert len(error.what) < 2500
    assert len(error.facts["refused"]) == 80
