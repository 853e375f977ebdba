"""Names of layers from foreign files: valid, unique, found quickly if a malicious file repeats one, and in messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compress.model.importers.common.graph_builder import free_name
from compress.model.importers.common.unsupported import Refused, unsupported
from deploy.contract.tensors import unique_names

COUNT = 20_000


class Counted(set[str]):
    """A set that counts membership tests."""

    lookups = 0

    def __contains__(self, name: Any) -> bool:
        self.lookups += 1
        return super().__contains__(name)


def repeated(taken: Counted) -> Iterator[str]:
    for _ in range(COUNT):
        name = free_name("conv/1", taken)
        taken.add(name)
        yield name


def test_a_name_is_cleaned_and_free() -> None:
    assert free_name("block:1//conv", ()) == "block_1_conv"
    assert free_name("///", ()) == "layer"
    assert free_name("a", {"a"}) == "a_1"
    assert free_name("a", {"a", "a_1", "a_2"}) == "a_3"


def test_a_name_that_is_repeated_thousands_of_times() -> None:
    taken = Counted()
    names = list(repeated(taken))
    assert len(set(names)) == COUNT
    assert names[:3] == ["conv_1", "conv_1_1", "conv_1_2"]
    assert taken.lookups < 40 * COUNT


def test_an_output_that_is_repeated_thousands_of_times() -> None:
    names = unique_names(["scores"] * COUNT + ["scores_2", "boxes"])
    assert len(set(names)) == COUNT + 2
    assert names[:3] == ["scores", "scores_2", "scores_3"]
    assert names[-2:] == ["scores_2_2", "boxes"]


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
