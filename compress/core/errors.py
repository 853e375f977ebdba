"""Every error that a user can cause, its exit code, and parts of its message.

::

    CorallineError             1   our own fault, or not classified
    ├── PipelineError          2   the pipeline file or the command line is wrong
    ├── DataError              3   the data set is missing, empty or not what it should be
    ├── ModelError             4   the model file or builder cannot be used
    │   └── UntrustedError     4   ... because it would run code that nobody vouched for
    ├── StageError             5   a stage could not do its work
    ├── StoreError             6   disk full, no permission, unwritable folder
    ├── ResultError            7   everything ran, but the result is not acceptable
    │   ├── BudgetError        7   ... because it breaks the budget
    │   └── NotUsableError     7   ... because the verdict on it is "not usable"
    ├── SigningError           8   metadata cannot be signed, or a key or repository cannot be used
    └── DeploymentError        15  a device was not reached, or keeps the version that it had

Exit code 0 is success, 8 also a bundle that does not verify, or that a device does not trust (`deploy.contract`),
9 and 10 the answers of `check` (some operators on the CPU; refused; 10 also of `relink`), 11 to 13 what `runner.pyz`
finds on a device and 14 that `doctor` found errors (`deploy.contract.errors`), 130 an interruption with Ctrl-C.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_PARTLY = 9
EXIT_REFUSED = 10
EXIT_INTERRUPTED = 130
"""As shells report it: 128 and the number of SIGINT."""


def reason_of(error: BaseException) -> str:
    """Return the reason of an error for a message; of the operating system, without its number and the path."""
    return getattr(error, "strerror", None) or str(error)


STACKS = {
    "in user code:": r"\w+(Error|Exception): ",
    "Graph execution error:": r"(?!File |Detected at node |\d+ root error)",
}
"""First lines of exceptions of TensorFlow that have a stack before the cause, with the pattern of the cause's line."""
LONGEST_CAUSE = 300
"""Characters of a cause in a message."""


def cause_of(error: BaseException) -> str:
    """Return the line of an exception's message that names the cause.

    Keras and TensorFlow put other lines before it: the layer that failed, or the stack of the traced code.
    """
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rsplit("Exception encountered: ", 1)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0] in STACKS:
        lines = [line for line in lines[1:] if re.match(STACKS[lines[0]], line)] or lines[-1:]
    line = next((line for line in lines if not line.startswith("Exception encountered when")), lines[0])
    return line if len(line) <= LONGEST_CAUSE else f"{line[:LONGEST_CAUSE]}..."


MAX_SHOWN = 100
"""A longer value would make a message longer than two lines of a terminal."""


def shown(value: object) -> str:
    """Return a value for a message: as in YAML, on one line, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` if a known word is similar, otherwise an empty string."""
    import difflib  # it is only needed for messages

    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def listing(words: Sequence[str]) -> str:
    """Return words for an `allowed:` clause."""
    return ", ".join(words) if words else "nothing"


class CorallineError(Exception):
    """An error for the user: one message without a traceback.

    Args:
        what: the problem.
        where: file, line and key, or the stage.
        allowed: the accepted values.
        hint: advice.

    Attributes:
        facts: details for programs, which --json prints in addition to the message.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", allowed: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.allowed, self.hint = what, where, allowed, hint
        self.facts: dict[str, Any] = {}

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.hint:
            text += f"; {self.hint}"
        return text


class PipelineError(CorallineError):
    """The pipeline file or the command line is wrong."""

    exit_code = 2


class DataError(CorallineError):
    """The data set is missing, empty or invalid."""

    exit_code = 3


class ModelError(CorallineError):
    """The model file or the builder cannot be used."""

    exit_code = 4


class UntrustedError(ModelError):
    """Loading would run code that the model contains, and `trust: true` is not set."""


class StageError(CorallineError):
    """A stage failed."""

    exit_code = 5


class StoreError(CorallineError):
    """Disk full, no permission, unwritable folder, damaged artifact."""

    exit_code = 6


class ResultError(CorallineError):
    """Everything ran and the record is complete, but the result is not acceptable."""

    exit_code = 7


class BudgetError(ResultError):
    """The result exceeds the budget."""


class NotUsableError(ResultError):
    """The verdict on the result is "not usable"."""


class SigningError(CorallineError):
    """Metadata cannot be signed, or a key or a repository cannot be used."""

    exit_code = 8


class DeploymentError(CorallineError):
    """A device was not reached, or keeps its previous version."""

    exit_code = 15
