"""The sections on data, outputs, environment and settings."""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.blocks import (
    Block,
    Columns,
    Details,
    Heading,
    Pairs,
    Preformatted,
    Section,
    Text,
    missing,
    or_missing,
    table,
)
from compress.report.wording import MAX_PROSE, TIMES, absence, first, outline, scalar, seconds, shorten
from compress.results.encoding import decode
from compress.results.run import BundleRecord, DataRecord, RunRecord

MAX_CLASSES = 24  # chosen; about two lines
MAX_CORRUPT = 10


def data(record: RunRecord) -> Section:
    """Return the section on the data set."""
    if record.data is None:
        return Section("Data", [missing(absence(record))])
    preprocessing = outline(record.data.preprocess) or "no step"
    blocks: list[Block] = [Pairs(list(_data(record.data))), Heading("Preprocessing"), Preformatted(preprocessing)]
    return Section("Data", blocks)


def _data(data: DataRecord) -> Iterator[tuple[str, str]]:
    yield "source", shorten(data.source)
    yield "samples (counted)", ", ".join(f"{shorten(split)} {samples:,}" for split, samples in data.samples.items())
    yield "input shape", f" {TIMES} ".join(map(str, data.input_shape)) or "a single number"
    kind = "targets" if data.targets else "classes"
    yield f"{len(data.classes)} {kind}", first(data.classes, MAX_CLASSES, " · ") or "no names recorded"
    values = " to ".join(f"{value:g}" for value in data.range)
    yield "values", f"{values}, {', '.join(data.dtypes)}, in {data.looked_at:,} samples looked at"
    if data.missing:
        yield "no training sample", shorten(", ".join(data.missing), MAX_PROSE)
    elif data.imbalance:
        yield "imbalance", f"the most frequent class has {data.imbalance:g} samples for one of the rarest"
    for target in data.targets:
        values = f"{target.least:g} to {target.most:g}, mean {target.mean:g}, in the training split"
        yield f"target {shorten(target.name)}", values
    if data.corrupt.count:
        samples = shorten("; ".join(data.corrupt.first[:MAX_CORRUPT]), 2000)
        yield f"left out, {data.corrupt.count:,} that cannot be read", samples
    for note in data.notes:
        yield "note", shorten(note, MAX_PROSE)


def outputs(record: RunRecord) -> Section:
    """Return the files that the run wrote."""
    rows = [(shorten(name), f"{file.size_bytes:,} bytes", file.sha256) for name, file in record.outputs.items()]
    blocks = table(("File", "Size (measured)", "SHA-256"), rows)
    hosts = [decode(BundleRecord, stage.facts).original_opens for stage in record.stages]
    blocks += [Text(f"The float original in the bundle opens {shorten(text, MAX_PROSE)}.") for text in hosts if text]
    return Section("Outputs", or_missing(blocks, f"no file was written: {absence(record)}"))


def environment(record: RunRecord) -> Section:
    """Return the machine, the versions of the tools, and the pipeline file."""
    host = record.environment
    machine = [
        ("coralline", record.coralline),
        ("seed", str(record.seed)),
        ("time (measured)", seconds(record.seconds)),
        ("node", host.node),
        ("cpu", host.cpu),
        ("system", host.system),
        ("python", host.python),
        ("runtime", host.runtime),
    ]
    pairs = Pairs([(name, scalar(value)) for name, value in machine])
    tools = Pairs([(shorten(tool), scalar(version)) for tool, version in host.tools.items()])
    settings = Details("Settings of the pipeline", [Preformatted(outline(record.pipeline) or "not recorded")])
    return Section("Environment and settings", [Columns([[pairs], [tools]]), settings])


def stage_facts(record: RunRecord) -> Section:
    """Return the settings and the facts of each stage."""
    details = []
    for index, stage in enumerate(record.stages):
        content = {"settings": stage.settings or "all defaults", "facts": stage.facts or "none recorded"}
        summary = f"{index} {shorten(stage.id)}: {stage.status}, {seconds(stage.seconds)}"
        details.append(Details(summary, [Preformatted(outline(content))]))
    return Section("Settings and facts of the stages", or_missing(details, absence(record)))
