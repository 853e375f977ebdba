"""The device side of Coralline: it runs on Python 3.7 with numpy and a TFLite runtime, without `compress`.

Applications use `from deploy import Model`; `python3 runner.pyz` is the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.learn.recognizer import Recognizer
    from deploy.runner.answers import Answer, NamedOutputs, Recognition
    from deploy.runner.model import Model
    from deploy.runner.tiles import Tiles

__all__ = ["Answer", "Model", "NamedOutputs", "Recognition", "Recognizer", "Tiles"]


def __getattr__(name: str) -> Any:
    """Import the classes on first use: the host side does not need them."""
    if name in __all__:
        from deploy.learn import recognizer
        from deploy.runner import answers, model, tiles

        return getattr({"Model": model, "Recognizer": recognizer, "Tiles": tiles}.get(name, answers), name)
    raise AttributeError("module 'deploy' has no attribute %r" % name)
