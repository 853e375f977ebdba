"""The manual page about the operators of the Edge TPU, generated from the rules, the rewrites and the TOML file."""

from __future__ import annotations

import inspect

from compress.targets.edgetpu import rules
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.rewrites import REWRITES


def page() -> str:
    """Return the page."""
    lines = [
        "# Operators on the Edge TPU",
        "",
        "These are the rules that `python -m compress check` applies.",
        "",
        "An operator runs on the Edge TPU if it violates no rule and does not depend, directly or indirectly, on a CPU",
        "operator that itself depends on an Edge TPU operator: the compiler makes one partition.",
        "",
        "## Rules",
        "",
    ]
    for rule, status in rules.RULES.items():
        requirement, advice = rules.documentation(rule)
        lines += [f"### {rule.__name__}", "", requirement, "", advice, "", f'The compiler says: "{status}"', ""]
    lines += _operators_section()
    return "\n".join([*lines, *_parser_section(), *_rewrites_section()]) + "\n"


def _operators_section() -> list[str]:
    return [
        *("## Operators", ""),
        "The last column is the largest input or output of such an operator that is known to be mapped, from 134",
        "compiled models: the number of values, with channels in blocks of 4. It is not a limit. An operator without a",
        "limit in the rules above has no known limit; it can still have one. `check` reports a risk where a reduction,",
        "a pooling window, a resize or an LSTM is larger than any known one.",
        *("", "| operator | newest version | first runtime | largest known |", "|---|---|---|---|"),
        *(
            f"| {name} | {known.max_version} | {known.runtime} | "
            f"{'no compiled model is known' if known.largest_mapped is None else format(known.largest_mapped, ',')} |"
            for name, known in CONSTANTS.operators.items()
        ),
    ]


def _parser_section() -> list[str]:
    return [
        *("", "## Supported by the parser", ""),
        "The newest version of each operator that the compiler's TFLite parser supports. The compiler rejects the",
        "whole model if one operator has a newer version, is not in this table, or is an unknown custom operator.",
        *("", "| version | operators |", "|---|---|"),
        *(f"| {version} | {', '.join(names)} |" for version, names in CONSTANTS.parser.items()),
    ]


def _rewrites_section() -> list[str]:
    lines = ["", "## Rewrites", ""]
    lines += ["The rewrites of `python -m compress legalize`. Each one is verified before it is kept.", ""]
    lines += ["| rewrite | effect | tolerance of its output |", "|---|---|---|"]
    for entry in REWRITES:
        does = " ".join((inspect.getdoc(entry.rewrite) or "").split())
        steps = f"{entry.tolerance} step{'s' * (entry.tolerance > 1)}" if entry.tolerance else "bit-exact"
        lines.append(f"| {entry.name} | {does} | {steps} |")
    return lines
