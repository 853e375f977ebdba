"""The settings of the compile stage, which a target's compiler reads."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from compress.settings import Settings

IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$"
"""A Docker image: name, tag or digest, never an option."""
SSH_HOST = r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$"
"""A host name or a name in ~/.ssh/config, with or without a user; never an option."""


class CompilerSettings(Settings):
    """Where the vendor's compiler is, and its options."""

    compiler: str | None = None
    """Path of edgetpu_compiler on this machine; by default the one on PATH, if any."""
    docker: Annotated[str, Field(pattern=IMAGE)] | None = None
    """A Docker image that has edgetpu_compiler on its PATH: it runs there, without network."""
    ssh: Annotated[str, Field(pattern=SSH_HOST)] | None = None
    """Another host, user@host or a name in ~/.ssh/config, that has edgetpu_compiler on its PATH."""
    compiler_version: Annotated[str, Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,12})?$")] | None = None
    """The compiler's version, 16.0 or in full; another is refused. By default any, and 16.0 from the cache."""
    cache: str | None = None
    """A folder of results that may be shared: what it holds is not compiled again, and needs no compiler."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long one try may take, transport included."""
    child_timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """The compiler's own limit for each part that it tries (-t; 16.0 only, where it is 180 by itself)."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """How often a failure that may be chance is tried again."""
    all_subgraphs: bool = False
    """Whether operators after one that stays on the CPU are compiled too, as further parts (-a)."""
    min_runtime_version: Annotated[int, Field(ge=1)] | None = None
    """The oldest Edge TPU runtime, 10 to 14, that must run the result (-m); by default the compiler's own."""
    num_segments: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts that the model is cut into, for as many Edge TPUs (-n); package takes whole models only."""
    intermediate_tensors: tuple[Annotated[str, Field(pattern=r"^[^,\-][^,]*$")], ...] = ()
    """Names of tensors where the Edge TPU's part ends (-i)."""
    search_delegate: bool = False
    """Whether operators at the end are left to the CPU until the rest compiles (-d; 16.0 only)."""

    @model_validator(mode="after")
    def _one_host(self) -> Self:
        if sum(host is not None for host in (self.compiler, self.docker, self.ssh)) > 1:
            raise ValueError("only one of the keys 'compiler', 'docker' and 'ssh' can be given")
        return self
