"""The settings of the compile stage, which a target's compiler reads."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from compress.core.settings import Settings

IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$"
"""A Docker image: name, tag or digest, never an option."""
SSH_HOST = r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$"
"""A host name or a name in ~/.ssh/config, with or without a user; never an option."""


class CompilerSettings(Settings):
    """The location of the vendor's compiler, and its options."""

    compiler: str | None = None
    """Path of edgetpu_compiler on this machine; by default the one on PATH, if there is one."""
    docker: Annotated[str, Field(pattern=IMAGE)] | None = None
    """A Docker image with edgetpu_compiler on its PATH. The container has no network."""
    ssh: Annotated[str, Field(pattern=SSH_HOST)] | None = None
    """Another host with edgetpu_compiler on its PATH: user@host, or a name in ~/.ssh/config."""
    compiler_version: Annotated[str, Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,12})?$")] | None = None
    """The version that the compiler must have, such as 16.0; by default any version, and 16.0 for results from the
    cache."""
    cache: str | None = None
    """A folder for compiled results, which several users may share. A result in it is used without the compiler."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Time limit of one attempt in seconds, with the transfer to and from the host."""
    child_timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """The compiler's own time limit for each attempt to partition the model, in seconds (-t; 16.0 only; 180 by
    default)."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Number of times that a failure which may be random is retried."""
    all_subgraphs: bool = False
    """Also compile operators after one that runs on the CPU, as further subgraphs (-a)."""
    min_runtime_version: Annotated[int, Field(ge=1)] | None = None
    """The oldest Edge TPU runtime on which the result must run, 10 to 14 (-m); by default the compiler decides."""
    num_segments: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of segments for a pipeline of several Edge TPUs (-n). `package` needs a model in one segment."""
    intermediate_tensors: tuple[Annotated[str, Field(pattern=r"^[^,\-][^,]*$")], ...] = ()
    """Names of the tensors at which the Edge TPU's part ends (-i)."""
    search_delegate: bool = False
    """Move operators at the end to the CPU until the rest compiles (-d; 16.0 only)."""

    @model_validator(mode="after")
    def _one_host(self) -> Self:
        if sum(host is not None for host in (self.compiler, self.docker, self.ssh)) > 1:
            raise ValueError("only one of the keys 'compiler', 'docker' and 'ssh' can be given")
        return self
