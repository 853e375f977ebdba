"""The device side of Coralline: Python 3.7, numpy and a TFLite runtime; imports nothing else of ours.

`from deploy import Model` is the way in for applications; `python3 runner.pyz` is the same from the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.model import Answer, Model

__all__ = ["Answer", "Model"]


def __getattr__(name: str) -> Any:
    """`Model` and `Answer`, imported when they are asked for: the host side needs neither."""
    if name in __all__:
        from deploy import model

        return getattr(model, name)
    raise AttributeError("module 'deploy' has no attribute %r" % name)
