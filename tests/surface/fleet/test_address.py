from __future__ import annotations

from pathlib import Path

import pytest

from compress.core.errors import PipelineError
from compress.surface.fleet.address import DeviceAddress, distinct, parse, read_addresses


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("ssh://mendel@board/opt/coralline", DeviceAddress("board", "mendel", None, "/opt/coralline"), "board"),
        ("ssh://board:2222/~/shop/", DeviceAddress("board", None, 2222, "~/shop"), "board-2222"),
        ("ssh://[::1]/a%20b", DeviceAddress("::1", None, None, "/a b"), "1"),
        ("file:///media/card/shop", DeviceAddress(None, None, None, "/media/card/shop"), "media-card-shop"),
        ("/media/card", DeviceAddress(None, None, None, "/media/card"), "media-card"),
    ],
)
def test_addresses(text: str, expected: DeviceAddress, name: str) -> None:
    address = parse(text)
    assert (address, address.name) == (expected, name)
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "ssh://board",
        "ssh://board/~",
        "ssh://board/a/../b",
        "ssh://-oProxyCommand=x/path",
        "ssh://-l@board/path",
        "ssh://a b/path",
        "ssh://user:secret@board/path",
        "ssh://board:0/path",
        "ssh://board:99999/path",
        "ssh://board/path?x",
        "ssh://board/a%0Ab",
        "ssh://%62oard%20/path",
        "http://board/path",
        "board:/opt/coralline",
        "mendel@board:shop",
        "file://board/path",
        "/",
        "",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(PipelineError):
        parse(text)


def test_a_folder_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("../card").path == str(tmp_path.parent / "card")


def test_a_list_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the shop\nssh://a/x  # at the door\n\nssh://b/x#1\n".replace("#1", ""))
    assert [address.host for address in read_addresses(path)] == ["a", "b"]
    assert len(distinct([*read_addresses(path), *read_addresses(path)])) == 2
    path.write_text("ssh://a/x\nssh://b\n")
    with pytest.raises(PipelineError, match="hosts:2"):
        read_addresses(path)
    with pytest.raises(PipelineError, match="cannot be read"):
        read_addresses(tmp_path / "none")
    with pytest.raises(PipelineError, match="no address"):
        distinct([])
