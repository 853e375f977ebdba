"""Which models reach which branch of a formula: a replacement for leave-one-out validation.

The rules for parameter bytes are code that was derived from real compiled models, not parameters of a fit that could
be repeated without one of the models. Instead: a branch that only one model reaches was derived from that model
alone, and no other model confirms it. A model that reaches no such branch depends only on rules that other models
confirm. A reached branch counts as needed, although the result may not depend on it: this is the strict assumption. A
branch is a piece of bytecode, so that both sides of a conditional expression count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

Branch = tuple[CodeType, int]


def reached(work: Callable[[], Any], modules: Iterable[ModuleType]) -> frozenset[Branch]:
    """Return the branches of the modules that a call of `work` reaches."""
    files = {module.__file__ for module in modules}
    branches: set[Branch] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            branches.add((frame.f_code, frame.f_lasti))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return frozenset(branches)


def alone(supports: Mapping[str, frozenset[Branch]], family: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return for each model the source lines with branches that no model of another family reaches."""
    lines: dict[str, list[str]] = {}
    for name, branches in supports.items():
        others = [other_branches for other, other_branches in supports.items() if family[other] != family[name]]
        lines[name] = _lines(branches.difference(*others))
    return lines


def _lines(branches: Iterable[Branch]) -> list[str]:
    places = set()
    for code, at in branches:
        line = list(code.co_positions())[at // 2][0] or code.co_firstlineno
        text = Path(code.co_filename).read_text().splitlines()[line - 1].strip()
        places.add((Path(code.co_filename).name, line, f"{code.co_name}: {text}"))
    return [f"{file}:{line} {text}" for file, line, text in sorted(places)]
