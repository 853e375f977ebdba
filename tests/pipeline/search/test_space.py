"""The search space: the settings that can be varied, and errors before any trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.core.errors import PipelineError
from compress.pipeline import schema, yaml_file
from compress.pipeline.search.space import Choices, Range, Space, read_space

STAGES = [{"remade": {"filters": 8}}, {"stamp": {"text": "one"}}, {"stamp": {"id": "again"}}, "compile", "package"]


class Chosen:
    """A trial that chooses given parameters, and records the requests."""

    def __init__(self, **parameters: Any) -> None:
        self.given, self.params, self.asked = parameters, dict[str, Any](), dict[str, Any]()

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> None:
        self.asked[name] = ("float", low, high, step, log)
        self.params[name] = self.given.get(name, low)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> None:
        self.asked[name] = ("int", low, high, step, log)
        self.params[name] = self.given.get(name, low)

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> None:
        self.asked[name] = list(choices)
        self.params[name] = self.given.get(name, choices[0])


def space(folder: Path, settings: dict[str, Any], stages: Sequence[Any] = STAGES, **keys: Any) -> Space:
    known: Any = schema.STAGES if stages is TRAINED else tiny.STAGES
    document = yaml_file.read(tiny.project(folder, stages, search={"settings": settings}, **keys))
    schema.check(document, known)
    return read_space(document, lambda edited: schema.check(edited, known))


def refused(folder: Path, settings: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        space(folder, settings, **keys)
    return str(caught.value)


def test_settings_of_stages_are_found_by_name_and_by_id(tmp_path: Path) -> None:
    search_space = space(
        tmp_path, {"remade.filters": {"from": 1, "to": 16}, "again.text": ["a", "b"], "stages.stamp.text": ["c"]}
    )
    assert [dimension.location for dimension in search_space.dimensions] == [
        ("stages", 0, "remade", "filters"),
        ("stages", 2, "stamp", "text"),
        ("stages", 1, "stamp", "text"),
    ]
    content = search_space.with_values({"remade.filters": 3, "again.text": "b", "stamp.text": "c"}, "tiny-7").value
    assert content["name"] == "tiny-7"
    assert "search" not in content
    assert content["stages"][:3] == [
        {"remade": {"filters": 3}}, {"stamp": {"text": "one"}}, {"stamp": {"id": "again", "text": "b"}},
    ]  # fmt: skip
    assert search_space.document.value["stages"] == STAGES


def test_whole_numbers_where_the_setting_takes_no_others(tmp_path: Path) -> None:
    ranges = {"remade.filters": {"from": 1, "to": 16}, "remade.gain": {"from": 1, "to": 3}}
    chosen: Any = Chosen()
    space(tmp_path, ranges).suggest(chosen)
    assert chosen.asked == {"remade.filters": ("int", 1, 16, 1, False), "remade.gain": ("float", 1, 3, None, False)}


def test_steps_and_logarithmic_ranges(tmp_path: Path) -> None:
    ranges = {"remade.filters": {"from": 4, "to": 16, "step": 4}, "remade.gain": {"from": 0.01, "to": 1, "log": True}}
    chosen: Any = Chosen()
    search_space = space(tmp_path, ranges)
    search_space.suggest(chosen)
    assert chosen.asked["remade.filters"] == ("int", 4, 16, 4, False)
    assert chosen.asked["remade.gain"] == ("float", 0.01, 1, None, True)
    assert search_space.count is None
    settings = {"remade.filters": ranges["remade.filters"], "stamp.text": ["a", "b"]}
    assert space(tmp_path, settings).count == 8
    orders = [["remade", "stamp", "compile"], ["remade", "compile"]]
    assert space(tmp_path, {**settings, "stages": orders}).count == 8 + 4  # without `stamp`, its text is not chosen


def test_numbers_in_a_list_are_neighbours_for_the_sampler_and_words_are_not(tmp_path: Path) -> None:
    search_space = space(tmp_path, {"remade.gain": [2.0, 0.5, 1], "stamp.text": ["b", "a"]})
    chosen: Any = Chosen(**{"remade.gain": 1, "stamp.text": '"a"'})
    assert search_space.suggest(chosen) == {"remade.gain": 1, "stamp.text": "a"}
    assert chosen.asked == {"remade.gain": ("int", 0, 2, 1, False), "stamp.text": ['"b"', '"a"']}


def test_an_order_of_stages_leaves_out_the_settings_of_others(tmp_path: Path) -> None:
    orders = [["remade", "compile"], ["stamp", "remade", "compile"]]
    search_space = space(tmp_path, {"stamp.text": ["a", "b"], "remade.filters": [1, 2], "stages": orders})
    assert search_space.suggest(Chosen()) == {"stages": ["remade", "compile"], "remade.filters": 1}
    values = search_space.suggest(Chosen(stages='["stamp", "remade", "compile"]'))
    assert values == {"stages": orders[1], "stamp.text": "a", "remade.filters": 1}
    content = search_space.with_values(values, "tiny-0").value
    assert content["stages"] == [{"stamp": {"text": "a"}}, {"remade": {"filters": 1}}, {"compile": {}}]
    schema.check(search_space.with_values(values, "tiny-0"), tiny.STAGES)


def test_the_values_of_the_file_are_known_to_the_sampler(tmp_path: Path) -> None:
    ranges = {"remade.filters": {"from": 1, "to": 16}, "stamp.text": ["one", "two"], "remade.gain": [0.5, 1.0]}
    assert space(tmp_path, ranges).of_file() == {"remade.filters": 8, "stamp.text": '"one"'}
    assert space(tmp_path, {"remade.filters": {"from": 1, "to": 16, "step": 5}}).of_file() == {}
    assert space(tmp_path, {"remade.filters": [4, 8, 16]}).of_file() == {"remade.filters": 1}
    assert space(tmp_path, {"stages": [["remade", "stamp", "again", "compile", "package"]]}).of_file() == {
        "stages": '["remade", "stamp", "again", "compile", "package"]'
    }


def test_preprocessing_and_arguments_of_a_builder(tmp_path: Path) -> None:
    data = {"source": {"digits": {}}, "preprocess": [{"resize": {"size": [32, 32]}}, {"scale": {"from": [0, 16]}}]}
    keys = {"model": {"builder": "mobilenet_v2"}, "data": data}
    sizes = [[32, 32], [24, 24]]
    settings = {"data.preprocess.resize.size": sizes, "model.width": [0.35, 0.5], "model.stages": {"from": 2, "to": 7},
                "model.arguments.dropout": {"from": 0.0, "to": 0.5}}  # fmt: skip
    search_space = space(tmp_path, settings, ["train", "quantize"], **keys)
    locations = [dimension.location for dimension in search_space.dimensions]
    assert locations[0] == ("data", "preprocess", 0, "resize", "size")
    assert locations[1:] == [("model", "arguments", name) for name in ("width", "stages", "dropout")]
    stages = search_space.dimensions[2]
    assert isinstance(stages, Range)
    assert stages.integer
    assert isinstance(search_space.dimensions[0], Choices)
    assert stages.parameter(2.5) is None
    content = search_space.with_values({"model.width": 0.5, "data.preprocess.resize.size": [24, 24]}, "d").value
    assert content["model"] == {"builder": "mobilenet_v2", "arguments": {"width": 0.5}}
    assert content["data"]["preprocess"][0] == {"resize": {"size": [24, 24]}}
    message = refused(tmp_path, {"model.widht": [0.35]}, stages=["train", "quantize"], **keys)
    assert "unknown argument 'widht'" in message
    assert "did you mean 'width'?" in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"remade.filter": [1]}, "unknown key 'filter'; allowed: id, filters, gain, weights"),
        ({"remade.filter": [1]}, "did you mean 'filters'?"),
        ({"remad.filters": [1]}, "did you mean 'remade'?"),
        ({"remade": [1]}, "'remade' is not a setting that can be varied"),
        ({"remade": [1]}, "add the name of its setting: remade.NAME"),
        ({"name": ["a"]}, "'name' is not a setting that can be varied"),
        ({"budget.size_bytes": [1]}, "is not a setting that can be varied"),
        ({"data.source.npz.file": ["a"]}, "is not a setting that can be varied"),
        ({"remade.filters": {"from": 0, "to": 16}}, "search.settings.remade.filters.from: 0 cannot be used: 0 should"),
        ({"remade.filters": {"from": 1, "to": 65}}, "search.settings.remade.filters.to: 65 cannot be used: 65 should"),
        ({"remade.filters": {"from": 1.5, "to": 6}}, "1.5 cannot be used"),
        ({"remade.filters": [1, 2, "x"]}, "search.settings.remade.filters[2]: 'x' cannot be used"),
        ({"remade.trouble": ["nonee"]}, "did you mean 'none'?"),
        ({"remade.filters": [1, 1]}, "1 occurs twice"),
        ({"remade.filters": []}, "has 0 choices; allowed: 1 to 1000"),
        ({"remade.filters": 3}, "3 is not a range or a list; allowed: {from: 0.3, to: 0.9}, or [a, b]"),
        ({"remade.filters": {"form": 1, "to": 3}}, "unknown key 'form'; allowed: from, to, step, log; did you mean"),
        ({"remade.filters": {"from": 1}}, "a range needs a number for 'to'"),
        ({"remade.filters": {"from": 3, "to": 3}}, "3 to 3 is not a range; allowed: `to` above `from`, up to 1e15"),
        ({"remade.gain": {"from": -1e308, "to": 1e308}}, "is not a range"),
        ({"remade.gain": {"from": 0, "to": 1, "step": 1e-300}}, "the range is not a multiple of the step 1e-300"),
        ({"again.id": ["other"]}, "'again.id' is not a setting that can be varied"),
        ({"remade.filters": {"from": True, "to": 3}}, "a range needs a number for 'from'"),
        ({"remade.gain": {"from": 0, "to": 3, "log": True}}, "a logarithmic range begins above 0, and has no step"),
        ({"remade.gain": {"from": 0, "to": 3, "log": "yes"}}, "'yes' is not true or false"),
        ({"remade.gain": {"from": 0, "to": 3, "step": 2}}, "the range is not a multiple of the step 2"),
        ({"remade.gain": {"from": 0, "to": 3, "step": -1}}, "-1 is not a number above 0"),
        ({"stages": [["remade", "compil"]]}, "the stage 'compil' is not in the file"),
        ({"stages": [["remade", "remade"]]}, "the stage 'remade' occurs twice"),
        ({"remade.filters": {"from": 1, "to": 16, "step": 0.5}}, "remade.filters.step: 1.5 cannot be used: 1.5 should"),
        ({"stages": {"from": 1, "to": 2}}, "is not a list of orders; allowed: [[train, quantize]"),
        ({"stages": ["remade"]}, "'remade' is not a list of stages"),
        ({"stages": [["compile", "remade"]]}, "stage 2 (remade) needs a quantized tflite model"),
        ({"remade.filters.deep": [1]}, "cannot be used"),
        ({"remade.filters": [1], "stages.remade.filters": [2]}, "the setting has two names here"),
        ({"model": [{}]}, "'model' is not a setting that can be varied"),
        ({"remade.gain": {"from": 0, "to": 3, "step": 1e9}}, "the range is not a multiple of the step"),
        ({}, "should have at least 1 item"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_their_line(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    message = refused(tmp_path, settings)
    assert expected in message
    assert message.startswith(f"{tmp_path / 'pipeline.yaml'}:")


def test_a_map_and_a_part_of_it_are_not_varied_together(tmp_path: Path) -> None:
    keys = {"model": {"builder": "mobilenet_v2"}, "stages": ["train", "quantize"], "data": {"source": {"digits": {}}}}
    settings = {"model.width": [0.35, 0.5], "train.augment.shift": [0.1], "train.augment": [{"flip": True}, {}]}
    assert "'train.augment' has a value for it, too; remove one of them" in refused(tmp_path, settings, **keys)
    arguments = {"model.width": [0.35], "model.arguments": [{"stages": 2}]}
    assert "'model.arguments' has a value for it, too" in refused(tmp_path, arguments, **keys)


def test_two_stages_of_one_name_need_ids(tmp_path: Path) -> None:
    stages = [{"stamp": {"text": "a"}}, {"stamp": {"text": "b"}}, "compile"]
    assert "2 stages are 'stamp'; give them ids" in refused(tmp_path, {"stamp.text": ["c"]}, stages=stages)
    assert "give one an id" in refused(tmp_path, {"stages": [["stamp", "compile"]]}, stages=stages)


BUILDERS = {"builder": "mobilenet_v1", "arguments": {"width": 0.5, "depth": 3}}
TRAINED = ["train", "quantize"]
DIGITS: dict[str, Any] = {"data": {"source": {"digits": {}}}, "model": BUILDERS}
ARCHITECTURES = {
    "model.stages": [3, 4],
    "model.width": {"from": 0.25, "to": 1, "step": 0.25},
    "model.builder": ["mobilenet_v1", "mobilenet_v2"],
    "model.depth": {"from": 2, "to": 6},
}


def test_arguments_belong_to_the_builders_that_have_them(tmp_path: Path) -> None:
    search_space = space(tmp_path, ARCHITECTURES, TRAINED, **DIGITS)
    assert search_space.count == 4 * 5 + 4 * 2
    parameters = {"model.builder": '"mobilenet_v2"', "model.width": 0.25, "model.depth": 5, "model.stages": 1}
    values = search_space.values(parameters)
    assert values == {"model.builder": "mobilenet_v2", "model.width": 0.25, "model.stages": 4}
    model = search_space.with_values(values, "second").value["model"]
    assert model == {"builder": "mobilenet_v2", "arguments": {"width": 0.25, "stages": 4}}
    first = search_space.values(parameters | {"model.builder": '"mobilenet_v1"'})
    assert search_space.with_values(first, "first").value["model"] == {
        "builder": "mobilenet_v1",
        "arguments": {"width": 0.25, "depth": 5},
    }


def test_all_arguments_can_be_varied_together(tmp_path: Path) -> None:
    settings = {"model.builder": ["mobilenet_v1", "mobilenet_v2"], "model.arguments": [{"width": 0.5}, {"depth": 4}]}
    search_space = space(tmp_path, settings, TRAINED, **DIGITS)
    model = search_space.with_values({"model.builder": "mobilenet_v2", "model.arguments": {"depth": 4}}, "a")
    assert model.value["model"] == {"builder": "mobilenet_v2", "arguments": {}}


def test_builders_are_checked_before_any_trial(tmp_path: Path) -> None:
    for builder in ("mobilenet_v9", 5, f"{'a' * 300}.py"):
        settings = {"model.width": [0.5], "model.builder": [builder]}
        assert "cannot be used" in refused(tmp_path, settings, stages=TRAINED, **DIGITS)
    for key in ("model.deep", "model.stages"):  # the second one is an argument of another builder
        settings = {"model.builder": ["mobilenet_v1"], key: [1, 2]}
        name = key.removeprefix("model.")
        message = refused(tmp_path, settings, stages=TRAINED, **DIGITS)
        assert f"no builder of the search has the argument '{name}'" in message
    assert "is not a setting that can be varied" in refused(tmp_path, {"stages.model.builder": ["mobilenet_v2"]})
