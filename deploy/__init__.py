"""The device side of Coralline: it runs on Python 3.7 with numpy and a TFLite runtime, without `compress`.

Applications use `from deploy import Model`; `python3 runner.pyz` is the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.model import Answer, Model

__all__ = ["Answer", "Model"]


def __getattr__(name: str) -> Any:
    """Import `Model` and `Answer` on first use: the host side needs neither."""
    if name in __all__:
        from deploy import model

        return getattr(model, name)
    raise AttributeError("module 'deploy' has no attribute %r" % name)
