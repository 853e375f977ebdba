"""Complete files or none, named in errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy.contract.durable_files import write_atomically


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_survives_a_power_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    flushed: list[str] = []
    flush = os.fsync

    def recorded(handle: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        flush(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    write_atomically(str(tmp_path / "shop.learnt"), b"new", durable)
    assert (tmp_path / "shop.learnt").read_bytes() == b"new"
    assert flushed == (["file", "folder"] if durable else [])
