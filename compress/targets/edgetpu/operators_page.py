"""The page of the manual on what runs on the Edge TPU, made from the rules, the rewrites and the TOML file."""

from __future__ import annotations

import inspect

from compress.targets.base import Target
from compress.targets.edgetpu import rules
from compress.targets.edgetpu.rewrites import REWRITES


def page(target: Target) -> str:
    """Return the page of the Edge TPU's operators; docs/operators.md is its copy."""
    lines = [
        "# What runs on the Edge TPU",
        "",
        "Made by `python -m compress operators` from the rules that `check` applies; do not edit.",
        "",
        "An operator runs on the Edge TPU if it keeps every rule and does not depend, however indirectly, on a CPU",
        "operator that itself depends on a TPU operator: the compiler makes one partition.",
        "",
        "## Rules",
        "",
    ]
    for rule, status in rules.RULES.items():
        requirement, advice = rules.documentation(rule)
        lines += [f"### {rule.__name__}", "", requirement, "", advice, "", f'The compiler says: "{status}"', ""]
    lines += ["## Operators", "", "| operator | newest version | first runtime |", "|---|---|---|"]
    lines += [
        f"| {name} | {row['max_version']} | {row['runtime']} |" for name, row in target.tables["operators"].items()
    ]
    return "\n".join([*lines, *_parser_section(target), *_rewrites_section()]) + "\n"


def _parser_section(target: Target) -> list[str]:
    return [
        *("", "## Refused", ""),
        "The newest version that the compiler's TFLite parser takes. An operator with a newer one, an operator that",
        "is not listed, or an unknown custom operator, and it refuses the whole model.",
        *("", "| version | operators |", "|---|---|"),
        *(f"| {version} | {', '.join(names)} |" for version, names in target.tables["parser"].items()),
    ]


def _rewrites_section() -> list[str]:
    lines = ["", "## Rewrites", "", "What `python -m compress legalize` changes, each proved before it is kept.", ""]
    lines += ["| rewrite | what it does | its output may move by |", "|---|---|---|"]
    for entry in REWRITES:
        does = " ".join((inspect.getdoc(entry.rewrite) or "").split())
        steps = f"{entry.tolerance} step{'s' * (entry.tolerance > 1)}" if entry.tolerance else "nothing"
        lines.append(f"| {entry.name} | {does} | {steps} |")
    return lines
