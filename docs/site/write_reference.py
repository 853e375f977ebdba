"""The reference pages, from the code. `make docs` and `python -m compress manual PAGE` show their text.

In the repository each page is a stub, so that links to the page are valid there. `python docs/site/write_reference.py`
writes the stubs, after a stage or a page was added or removed.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import command_pages  # noqa: E402
import operators_page  # noqa: E402
import stage_pages  # noqa: E402
from settings_tables import cell, sections, table  # noqa: E402
from stage_pages import purpose  # noqa: E402

from compress import targets  # noqa: E402
from compress.core import errors  # noqa: E402
from compress.data.dataset import Splitting  # noqa: E402
from compress.data.sources import SOURCES  # noqa: E402
from compress.learning.context import Execution  # noqa: E402
from compress.pipeline.schema import Budget, Measure, ModelSettings, PipelineKeys, SearchSettings  # noqa: E402
from compress.surface.cli import manual  # noqa: E402
from compress.tasks import TASKS  # noqa: E402
from compress.tasks.base import Refusal, Task, Use  # noqa: E402
from deploy.contract import bundle as device_bundle  # noqa: E402
from deploy.contract import errors as device_errors  # noqa: E402
from deploy.contract import preprocessing  # noqa: E402


def pages() -> dict[str, str]:
    """Return all generated pages by name: the path below docs/, without `.md`."""
    return {
        **stage_pages.pages(),
        **command_pages.pages(),
        "reference/pipeline": pipeline(),
        "reference/sources": sources(),
        "reference/steps": steps(),
        "reference/tasks": tasks(),
        "reference/targets": target_page(),
        "reference/exit_codes": exit_codes(),
        "operators": operators_page.page(),
    }


def stub(name: str, text: str) -> str:
    """Return the text of a generated page in the repository: the title, and how the page is shown."""
    title = next(line for line in text.splitlines() if line.startswith("# "))
    command = f"python -m compress manual {name.removesuffix('/index')}"
    return f"{title}\n\nThis page is generated: `{command}` prints it, `make docs` builds it.\n"


def _page(title: str, *introduction: str) -> list[str]:
    return [f"# {title}", "", *introduction]


def pipeline() -> str:
    """Return the page of the keys of a pipeline file."""
    lines = _page(
        "The pipeline file",
        "A pipeline file is YAML 1.2. Unknown keys, duplicate keys and values of a wrong type are refused, with the",
        "line. Relative paths start at the folder of the file. Editors complete and check the file with the schema",
        "`docs/pipeline.schema.json`, which `python -m compress schema` prints.",
        "",
        "| key | meaning | more |",
        "|---|---|---|",
        "| `model` | the model to start from; required | [below](#model) |",
        "| `data` | samples, labels, splits, preprocessing; not needed for a quantized `.tflite` | [below](#data) |",
        "| `stages` | the ordered list of stages; required | [stages](stages/index.md) |",
        "| `measure` | what is measured, and how | [below](#measure) |",
        "| `budget` | limits of the result | [below](#budget) |",
        "| `execution` | how training runs on this machine | [below](#execution) |",
        "| `search` | what `python -m compress search` tries | [below](#search) |",
    )
    properties = _described(PipelineKeys)
    for nested in ("measure", "budget", "execution", "search"):
        properties.pop(nested)
    lines += ["", "## Plain keys", "", *table(properties, ["schema_version", "name"])]
    lines += sections(ModelSettings, level="##", first="model")
    lines += [
        *("", "## data", "", "| key | meaning | more |", "|---|---|---|"),
        "| `source` | where the samples come from; required | [sources](sources.md) |",
        f"| `task` | {cell(manual.TASK_KEY)} | [tasks](tasks.md) |",
        "| `preprocess` | a list of steps, which every sample passes: in training, calibration, evaluation and on the "
        "device | [steps](steps.md) |",
        "| `split` | how samples are divided into splits | below |",
    ]
    lines += sections(Splitting, level="###", first="split")
    lines += sections(Measure, level="##", first="measure")
    lines += sections(Budget, level="##", first="budget")
    lines += ["", "Each task has its own keys of `budget`: [tasks](tasks.md)."]
    lines += sections(Execution, level="##", first="execution")
    lines += ["", "[Training](../training.md#several-devices-gpus-and-tpus) explains the strategies."]
    lines += sections(SearchSettings, level="##", first="search")
    lines += ["", "[Search](../search.md) explains the settings, objectives and constraints."]
    return "\n".join(lines) + "\n"


def _described(kind: Any) -> dict[str, Any]:
    """Return the properties of a class of settings, with their descriptions."""
    manual.describe_settings()
    properties: dict[str, Any] = kind.model_json_schema()["properties"]
    return properties


def sources() -> str:
    """Return the page of the data sources."""
    lines = _page(
        "Data sources",
        "One of these is `data.source` in a pipeline file. [Data](../data.md) has an example of each. It also explains",
        "labels, splits and class names.",
        "",
        "| source | samples |",
        "|---|---|",
    )
    lines += [f"| [`{name}`](#{name}) | {cell(purpose(source))} |" for name, source in SOURCES.items()]
    for name, source in SOURCES.items():
        lines += ["", f"## {name}", "", purpose(source)]
        lines += sections(source, level="###", first=f"Settings of {name}")
        if not source.model_fields:
            lines += ["", "It has no settings."]
    return "\n".join(lines) + "\n"


def steps() -> str:
    """Return the page of the preprocessing steps."""
    lines = _page(
        "Preprocessing steps",
        "The items of the list `data.preprocess`. Training, calibration, evaluation and the device run the same steps,",
        "with the same code. [Preprocessing](../preprocessing.md) has examples with the shapes of the results.",
        "",
        "| step | what it does |",
        "|---|---|",
    )
    lines += [f"| [`{name}`](#{name}) | {cell(purpose(step))} |" for name, step in preprocessing.STEPS.items()]
    for name, step in preprocessing.STEPS.items():
        lines += ["", f"## {name}", "", purpose(step), ""]
        properties = {
            key: {**schema, **_default(step, key)} for key, schema in manual._step(step)["properties"].items()
        }
        needed = preprocessing.needed(step)
        lines += table(properties, needed) if properties else ["It has no settings."]
    return "\n".join(lines) + "\n"


def _default(step: Any, key: str) -> dict[str, Any]:
    """Return the default of a key of a preprocessing step, as a part of its schema."""
    default = preprocessing.fields(step)[key].default
    if default is None or default is dataclasses.MISSING:
        return {}
    return {"default": list(default) if isinstance(default, tuple) else default}


METHODS: dict[Use, str] = {
    "distillation": "[distill](stages/distill.md)",
    "qat teacher": "`qat.distill`",
    "healing by distillation": "[replace_activations](stages/replace_activations.md) with training",
    "channel importance": "[prune](stages/prune.md)",
    "measured sensitivity": "`allocation: sensitivity`",
    "class weights": "`class_weights`",
    "augmentation": "`augment`",
    "rotation": "`augment.rotate`",
    "mixup": "`augment.mixup`",
    "label smoothing": "`label_smoothing`",
    "labels": "[train](stages/train.md)",
    "tfmot": "[sparsify](stages/sparsify.md), [cluster](stages/cluster.md)",
    "tfmot qat": "`engine: tfmot`",
    "package": "[package](stages/package.md)",
    "embedding": "[expose_embedding](stages/expose_embedding.md)",
}
"""The stages and settings that use a method, see `compress.pipeline.stage.Use`."""


def tasks() -> str:
    """Return the page of the tasks."""
    lines = _page(
        "Tasks",
        "A task says what a model is for. The data source decides it, or `data.task`. [Tasks](../tasks.md) explains",
        "the labels and the outputs of each task.",
    )
    for name, task in TASKS.items():
        lines += ["", f"## {name}", "", f"For {task.models}."]
        if task.instead_of:
            others = ", ".join(f"`{other}`" for other in sorted(task.instead_of))
            lines += ["", f"`data: {{task: {name}}}` also takes samples for {others}."]
        lines += ["", "| metric | unit | better | key of `budget` |", "|---|---|---|---|"]
        for metric in task.metrics:
            better = "higher" if metric.higher_is_better else "lower"
            limit = f"`{metric.change}`" if metric.limited else ""
            lines.append(f"| {metric.label} | {metric.unit or 'as the targets'} | {better} | {limit} |")
        lines += _refused(task)
    return "\n".join(lines) + "\n"


def _refused(task: Task) -> list[str]:
    """Return the table of the methods that a task refuses."""
    if not task.refused:
        return ["", "It refuses no stage and no setting."]
    merged: dict[Refusal, list[str]] = {}
    for use, refusal in task.refused.items():
        merged.setdefault(refusal, []).append(METHODS.get(use, f"`{use}`"))
    lines = ["", "| refused | reason | instead |", "|---|---|---|"]
    for refusal, methods in merged.items():
        instead = "; ".join(filter(None, (refusal.allowed, refusal.hint)))
        lines.append(f"| {', '.join(methods)} | {cell(refusal.what)} | {cell(instead)} |")
    return lines


def target_page() -> str:
    """Return the page of the targets."""
    lines = _page(
        "Targets",
        "The target is the hardware that a model is made for: `target:` in a pipeline file, or `--target`.",
    )
    for name in targets.TARGETS:
        target = targets.load(name)
        lines += ["", f"## {name}", "", f"{target.summary}.", ""]
        available = "It uses the compiler of its vendor if that is available."
        lines += [available if target.compiler.name else "It needs no compiler.", ""]
        hosts = ", ".join(f"`{host}`" for host in target.cost.hosts) or "none; the latency is measured on this machine"
        lines += [f"Hosts whose latency is predicted: {hosts}."]
    lines += ["", "[Operators](../operators.md) lists what the Edge TPU runs."]
    return "\n".join(lines) + "\n"


MEANINGS = {
    0: "Done.",
    1: "An error inside the program. Please report it with the whole output.",
    2: "The pipeline file, the arguments or a key file are wrong.",
    3: "The data is missing, empty or wrong. On the device: a sample cannot be used.",
    4: "The model cannot be used, or it needs `trust: true` because it contains code. On the device: the "
    "runtime refuses the model.",
    5: "A stage failed.",
    6: "A file cannot be read or written: disk full, no permission, or a damaged result in the store.",
    7: "Everything ran, but the result is over the budget or not usable. The report is complete.",
    8: "Metadata cannot be signed, or a key or repository cannot be used. On the device: the file is not a bundle, it "
    "was changed, or the device does not trust it.",
    9: "`check`, `legalize`: some operators run on the CPU. `verify-compiled`: it cannot be decided.",
    10: "`check`, `legalize`: the compiler will reject the model. `relink`: refused. `verify-compiled`: another model.",
    11: "The TFLite runtime is missing, or it does not work.",
    12: "The Edge TPU cannot be used.",
    13: "The outputs differ from the golden outputs.",
    14: "`doctor` found an error.",
    15: "A device was not reached, or it keeps its previous version.",
    130: "Interrupted with Ctrl-C. Run the same command again to continue.",
    141: "The program that reads stdout closed it, as `head` does.",
}


def exit_codes() -> str:
    """Return the page of the exit codes."""
    lines = _page(
        "Exit codes",
        "Every error is one message on stderr: where the problem is, what it is, what is allowed, and what to do. With",
        "`--json`, the message is in the JSON document too. The host (`python -m compress`) and the device",
        "(`runner.pyz`) use the same codes. [Troubleshooting](../troubleshooting.md) explains the messages of each.",
        "",
        "| exit code | where | meaning |",
        "|---|---|---|",
    )
    where = dict.fromkeys(codes_of(errors, errors.CorallineError), "host")
    for code in codes_of(device_errors, device_errors.DeviceError) | {*PACKAGED}:
        where[code] = "host, device" if code in where else "device"
    where[0] = "host, device"
    where[device_errors.EXIT_UNSOUND] = "host, device"  # `doctor` runs on both
    lines += [f"| {code} | {where[code]} | {MEANINGS[code]} |" for code in sorted(where)]
    return "\n".join(lines) + "\n"


PACKAGED = (device_bundle.BundleError.exit_code,)
"""The exit codes of exceptions of the device that are not a `DeviceError`."""


def codes_of(module: ModuleType, root: Any) -> set[int]:
    """Return the exit codes of a module: those of its exceptions, and its constants EXIT_…."""
    kinds = [root]
    for kind in kinds:
        kinds += kind.__subclasses__()
    constants = {value for name, value in vars(module).items() if name.startswith("EXIT_")}
    return {kind.exit_code for kind in kinds} | constants


def main() -> None:
    """Write the stubs, and remove those of pages that no longer exist."""
    stubs = {ROOT / "docs" / f"{name}.md": stub(name, text) for name, text in pages().items()}
    for path in (ROOT / "docs" / "reference").rglob("*.md"):
        if path not in stubs:
            path.unlink()
    for path, text in stubs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
