"""The command `trust`: which bundles devices accept, as signed metadata of The Update Framework (TUF)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError
from compress.core.files import explain
from compress.surface.cli.output import note, show
from compress.surface.cli.parser import PROGRAM, add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers
    from compress.surface.fleet.repository import Contents, Editor

ACTIONS = {
    "init": "create a repository and its keys",
    "add": "list bundles: devices install them from now on",
    "remove": "list files no longer",
    "refresh": "renew the online metadata before it expires",
    "rotate": "replace keys, for example after a loss",
    "status": "print fingerprint, keys, expiries and listed files",
}
TAKES_ITEMS = {"add": "BUNDLE …", "remove": "NAME …", "rotate": "root, targets or online"}


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "trust", "Sign which bundles devices accept, with a TUF repository", trust)
    actions = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=actions)
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="a folder with metadata/ and targets/")
    items = "; ".join(f"{name}: {text}" for name, text in TAKES_ITEMS.items())
    parser.add_argument("items", nargs="*", metavar="ITEM", help=items)
    keys = "private keys: a file, or a folder with *.key and root.json; repeatable (all actions but status)"
    parser.add_argument("--keys", type=Path, action="append", default=[], metavar="PATH", help=keys)
    days = "validity of the new metadata (default: root and targets 365, snapshot and timestamp 30)"
    parser.add_argument("--days", action="append", default=[], metavar="ROLE=N", help=days)
    parser.add_argument("--root-keys", type=int, default=3, metavar="N", help="init: number of root keys (default: 3)")
    threshold = "init, rotate: number of keys that must sign (default: init 2 root keys; rotate as before)"
    parser.add_argument("--threshold", type=int, metavar="N", help=threshold)
    drop = "rotate: replace this key only; repeatable (default: all keys of the role)"
    parser.add_argument("--drop", action="append", default=[], metavar="KEYID", help=drop)
    parser.add_json()


def trust(options: argparse.Namespace) -> int:
    """`python -m compress trust`.

    Raises:
        CorallineError: the arguments, keys or repository cannot be used.
    """
    from compress.surface.fleet import repository

    action = options.action
    if bool(options.items) != (action in TAKES_ITEMS):
        what = f"trust {action} takes {TAKES_ITEMS.get(action, 'a repository alone')}"
        raise PipelineError(what, hint=f"see: {PROGRAM} trust --help")
    if not options.keys and action != "status":
        raise PipelineError(f"trust {action} signs", hint="--keys FOLDER")
    days = _days(options.days)
    if action == "status":
        contents = repository.read(options.repository)
    elif action == "init":
        threshold = 2 if options.threshold is None else options.threshold
        contents = repository.init(options.repository, options.keys[0], options.root_keys, threshold, days)
        note(f"move the root keys away from {options.keys[0]} to places that are not connected, and make copies")
    else:
        editor = repository.Editor(options.repository, options.keys, days)
        _edit(editor, options)
        contents = editor.contents
        if not editor.is_published:
            note("devices do not see this yet: run `trust refresh` where the online key is")
    show(contents.to_json(), _text(contents), as_json=options.json)
    return 0


def _edit(editor: Editor, options: argparse.Namespace) -> None:
    if options.action == "add":
        files = {Path(item).name: _content(Path(item)) for item in options.items}
        if len(files) < len(options.items):
            raise PipelineError("two bundles have the same file name", hint="rename one of them")
        editor.add(files)
    elif options.action == "remove":
        editor.remove(options.items)
    elif options.action == "refresh":
        editor.refresh()
    else:
        from compress.surface.fleet.repository import ROLES

        if len(options.items) != 1 or options.items[0] not in ROLES:
            raise PipelineError("one role is rotated at a time", allowed=", ".join(ROLES))
        for path in editor.rotate(options.items[0], options.drop, options.threshold):
            note(f"{path} is a new key; remove the file of the key that it replaces")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise explain(error, "the bundle cannot be read", path) from error


def _days(texts: list[str]) -> Mapping[str, int]:
    from compress.surface.fleet.repository import DAYS

    days = {}
    for text in texts:
        role, _, number = text.partition("=")
        if role not in DAYS or not number.isdecimal() or not 1 <= int(number[:6]) <= 36_500:
            raise PipelineError(f"--days {text}", allowed=f"ROLE=N: {', '.join(DAYS)}; 1 to 36500 days")
        days[role] = int(number)
    return days


def _text(contents: Contents) -> str:
    """Return the content of a repository as lines."""
    document = contents.to_json()
    lines = [f"root fingerprint  {document['fingerprint']}"]
    for role, row in document["roles"].items():
        lines.append(
            f"{role:<9}  version {row['version']}, valid until {row['expires']}, "
            f"{row['threshold']} of {len(row['keys'])} keys: {', '.join(key[:12] for key in row['keys'])}"
        )
    lines += [f"{digest[:12]}  {name}" for name, digest in document["targets"].items()]
    return "\n".join(lines)
