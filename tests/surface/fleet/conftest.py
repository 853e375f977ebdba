"""A host to deploy to, once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import bundles
import pytest
import remote_host
from remote_host import Host


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Run a real sshd; skip the test if there is none."""
    if reason := remote_host.missing():
        pytest.skip(reason)
    with remote_host.running(tmp_path_factory.mktemp("sshd") / "host") as sshd_host:
        yield sshd_host


@pytest.fixture
def host(server: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return the host, with the Python that runs the tests and with ssh on PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    server.python()
    return server


@pytest.fixture
def bundle_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes `bundles.packed(...)` into tmp_path, as a run leaves it."""

    def write(version: int = 0, **more: object) -> Path:
        path = tmp_path / "run" / f"v{version}.coralline"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bundles.packed(version, **more))  # type: ignore[arg-type]
        return path

    return write
