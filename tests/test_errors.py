from __future__ import annotations

import pytest

from compress.core.errors import cause_of

CONV = "The Conv2D op currently only supports the NHWC tensor format on the CPU."


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("", "ValueError"),
        ("cannot reshape\nmore", "cannot reshape"),
        (
            f"Exception encountered when calling Conv2D.call().\n\n\x1b[1m{CONV}\x1b[0m\n\nArguments received",
            CONV,
        ),
        (
            "Exception encountered when calling layer 'a'.\n\nException encountered: "
            f"Exception encountered when calling layer 'b'.\n\n{CONV}",
            CONV,
        ),
        (
            'in user code:\n\n    File "m.py", line 3, in run  *\n        return f(x)\n\n    TypeError: No binding',
            "TypeError: No binding",
        ),
        (
            "Graph execution error:\n\nDetected at node c defined at (most recent call last):\n"
            f'  File "m.py", line 3, in call\n\n{CONV}\n\t [[{{{{node c}}}}]]',
            CONV,
        ),
    ],
)
def test_the_cause_of_an_exception_is_shown_not_what_stands_before_it(message: str, cause: str) -> None:
    assert cause_of(ValueError(message)) == cause
