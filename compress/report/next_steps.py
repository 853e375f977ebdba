"""Next steps after a run, with their commands, for the first screen of the report and for stdout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compress.core.artifact import MODEL_COMPILED, MODEL_TFLITE
from compress.core.resources import manual
from compress.report.record import RunRecord
from compress.report.wording import number

COMPARE = "python -m compress compare . ../OTHER-RUN"


@dataclass(frozen=True)
class NextStep:
    """A step: what it is for, and its command, for the folder of the report; "" if it is not a command."""

    text: str
    command: str = ""


def steps(record: RunRecord) -> list[NextStep]:
    """Return the next steps, in order."""
    if record.status in ("failed", "interrupted"):
        text = "Correct the cause above, then run" if record.status == "failed" else "Run"
        return [NextStep(f"{text} the same command again: stages that were completed are not run again.")]
    if record.status == "not usable":
        return [
            NextStep("Find the cause: the message above names the probable one."),
            *_debugging(record),
            NextStep("Change the pipeline file and run it again: stages that do not change are not run again."),
        ]
    return [*_use(record), NextStep("Compare this run with another one, for example with other settings.", COMPARE)]


def _debugging(record: RunRecord) -> Iterator[NextStep]:
    if any("layers" in stage.facts for stage in record.stages):
        yield NextStep("List the layers that quantization changed most.", "python -m compress debug .")


def _use(record: RunRecord) -> Iterator[NextStep]:
    """Yield the steps of a usable result: keep the budget, compile, copy to a device."""
    if any(row.holds is False for row in record.budget):
        yield NextStep(
            "The budget is not kept: change the pipeline file, or the limit under `budget`, and run it again. "
            "Stages that do not change are not run again."
        )
    bundle = f"{record.name}.coralline"
    if record.placement is not None and record.placement.failure:
        text = (
            "The compiler rejects the model: change the model as the section “Where operators run” says, and check it."
        )
        yield NextStep(text, f"python -m compress check {MODEL_TFLITE}")
        return
    yield from _on_the_cpu(record)
    if is_uncompiled(record):
        again = (
            ", then run the pipeline again, so that the bundle has the compiled model" if _has(record, bundle) else ""
        )
        text = f"Compile the model, on x86-64 Linux with the vendor's compiler{again}. See {manual('compiling.md')}."
        yield NextStep(text, f"edgetpu_compiler -s {MODEL_TFLITE}")
    if _has(record, bundle):
        yield NextStep(
            "Copy the bundle to the device, and measure it there.",
            f"python -m compress deploy {bundle} --to ssh://USER@HOST/FOLDER --bench",
        )
    elif _has(record, MODEL_TFLITE):
        yield NextStep(f"Add `package` to the stages for a bundle with its runner, or load {MODEL_TFLITE} yourself.")


def _on_the_cpu(record: RunRecord) -> Iterator[NextStep]:
    """Yield the advice to use no accelerator, if the CPU alone is predicted to be faster on the chosen host."""
    if record.placement is None or record.latency is None:
        return
    host = record.placement.expected_latency.get(record.latency.host)
    if host is not None and host.cpu_alone_ms < host.latency_ms:
        yield NextStep(
            f"Decide if you need the Edge TPU: the CPU of {record.latency.host} alone is predicted to take "
            f"{number(host.cpu_alone_ms, 'ms')}, and the Edge TPU {number(host.latency_ms, 'ms')}. The steps below are "
            "for the Edge TPU."
        )


def _has(record: RunRecord, name: str) -> bool:
    return name in record.outputs


def commands(record: RunRecord) -> list[str]:
    """Return the commands that bring the result to a device, in order, for the folder of the report."""
    usable = record.status not in ("failed", "interrupted", "not usable")
    return [step.command for step in _use(record) if step.command] if usable else []


def is_uncompiled(record: RunRecord) -> bool:
    """Whether the run has a model for a target with a compiler that is not compiled."""
    placement = record.placement
    compiles = placement is not None and bool(placement.how_to_compile) and not placement.failure
    return compiles and MODEL_TFLITE in record.outputs and MODEL_COMPILED not in record.outputs
