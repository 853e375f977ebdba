"""Pages of commands and exit codes, from the argument parsers and the exceptions."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from unittest import mock

from settings_tables import cell

from compress.surface.cli import main, run
from compress.surface.cli.parser import Parser
from deploy import __main__ as runner

HIDDEN = ("--help",)
RUNNER = "python3 runner.pyz"

MANUALS = {
    "run": "[the tutorial](../tutorial.md)",
    "init": "[the tutorial](../tutorial.md#3-the-pipeline-file)",
    "export": "[tasks](../tasks.md#one-command-without-a-pipeline-file)",
    "import": "[models](../models.md)",
    "check": "[operators](../operators.md), [the graph](../report.md#the-operators-as-a-graph)",
    "estimate": "[latency prediction](../compiling.md#latency-prediction)",
    "legalize": "[rewrites](../operators.md#rewrites)",
    "inspect": "[what a compiled model does](../explain.md), [compilation](../compiling.md)",
    "verify-compiled": "[new weights in a compiled model](../relink.md#does-a-compiled-file-hold-this-model)",
    "relink": "[new weights in a compiled model](../relink.md)",
    "search": "[search](../search.md)",
    "split": "[several Edge TPUs](../several_tpus.md)",
    "compare": "[the report](../report.md#compare-runs)",
    "debug": "[the quantization plan](../training.md#the-quantization-plan)",
    "data": "[data](../data.md), [typical mistakes](../typical_mistakes.md)",
    "sensitivity": "[structured pruning](../training.md#structured-pruning)",
    "deploy": "[deployment](../deployment.md)",
    "rollback": "[deployment](../deployment.md)",
    "status": "[deployment](../deployment.md#what-runs-where)",
    "results": "[deployment](../deployment.md)",
    "doctor": "[the device](../device.md)",
    "frigate": "[for Frigate](../detection.md#for-frigate)",
    "trust": "[signed updates](../trust.md)",
    "stages": "[stages](stages/index.md)",
    "schema": "[the pipeline file](pipeline.md)",
    "manual": "[all manuals](../index.md)",
}
"""The manual of each command; a command without one gets no line."""


def pages() -> dict[str, str]:
    """Return the pages by name."""
    return {"reference/commands": host_commands(), "reference/runner": runner_commands()}


def host_commands() -> str:
    """Return the page of `python -m compress`."""
    parser, _ = main.build_parser()
    lines = ["# Commands on the host", ""]
    lines += [
        "`python -m compress PIPELINE` runs a pipeline file. `python -m compress COMMAND` does one thing.",
        "After an installation, `coralline` is the same as `python -m compress`. `python -m compress COMMAND --help`",
        "prints the same in a terminal. [Exit codes](exit_codes.md) are the same for all commands.",
    ]
    return _page([*lines, ""], main.PROGRAM, parser, MANUALS)


def runner_commands() -> str:
    """Return the page of `runner.pyz`."""
    lines = ["# Commands on the device", ""]
    lines += [
        "`runner.pyz` is one file, which `package` writes next to the bundle. It needs Python 3.7 or newer, numpy and",
        "a TFLite runtime. [The device](../device.md) explains its use.",
    ]
    return _page([*lines, ""], RUNNER, runner._parser(), {})


def _page(lines: list[str], program: str, parser: argparse.ArgumentParser, manuals: Mapping[str, str]) -> str:
    commands = dict(subcommands(parser))
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {cell(_summary(command))} |" for name, command in commands.items()]
    for name, command in commands.items():
        lines += ["", f"## {name}", "", f"{_summary(command)}.", "", "```sh", _usage(program, name, command), "```"]
        lines += [*_arguments(command)]
        if name in manuals:
            lines += ["", f"More: {manuals[name]}."]
    return "\n".join(lines) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of each command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _summary(command: argparse.ArgumentParser) -> str:
    """Return the first paragraph of a command's description, without the full stop."""
    return " ".join((command.description or "").split("\n\n")[0].split()).rstrip(".")


def _usage(program: str, name: str, command: argparse.ArgumentParser) -> str:
    """Return the usage of a command on one line."""
    if name == "run" and isinstance(command, Parser):
        return f"{program} PIPELINE {run.USAGE}"
    formatter = argparse.HelpFormatter(prog=f"{program} {name}", width=10_000)
    actions = [action for action in command._actions if not set(action.option_strings) & {*HIDDEN}]
    formatter.add_usage(None, actions, command._mutually_exclusive_groups)
    with mock.patch.dict(os.environ, {"NO_COLOR": "1"}):
        text = formatter.format_help()
    return re.sub(r"\s+", " ", text).removeprefix("usage: ").strip()


def _arguments(command: argparse.ArgumentParser) -> list[str]:
    """Return the table of a command's arguments."""
    rows = []
    for action in command._actions:
        if action.help == argparse.SUPPRESS or set(action.option_strings) & {*HIDDEN}:
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        if action.option_strings and action.nargs != 0:
            names += f" `{_value(action)}`"
        rows.append(f"| {names} | {cell(_help(command, action))} |")
    return ["", "| argument | meaning |", "|---|---|", *rows] if rows else []


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an option's value."""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an argument, with its values filled in."""
    return argparse.HelpFormatter(prog=command.prog)._expand_help(action) if action.help else ""
