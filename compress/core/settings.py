"""Settings: strict, frozen models of the keys of pipeline.yaml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Strict, frozen settings: unknown keys, wrong types, NaN and infinity are refused.

    The text below a field is its description; `manual` reads it from the code, since that takes
    longer than all else at start-up.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # most settings are not used in most runs, and building costs start-up time
    )
