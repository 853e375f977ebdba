"""Write the known problems of `doctor` into the pages of docs/hardware: `python docs/draw_known_problems.py`.

The text is that of deploy/runner/problems.py, which `doctor` prints.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploy.runner.problems import INSTALL_PACKAGE, PROBLEMS, Problem  # noqa: E402 - after the change of the search path

PAGES = ROOT / "docs" / "hardware"
BEGIN = "<!-- begin: python docs/draw_known_problems.py -->"
END = "<!-- end -->"
VALUES = {"user": "$USER", "config": "/boot/firmware/config.txt", "pid": "PROCESS"}
"""Placeholders for the values of one host."""
FIXES = {
    "library_missing": "sudo apt-get install libedgetpu1-std  # Google's; see the table above for yours",
    "no_driver": "sudo apt-get install gasket-dkms && sudo modprobe apex  # kernel 6.3 and older; see the table above",
    "not_built": f"{INSTALL_PACKAGE}, for kernel 6.4 to 6.17; see the table above",
    "headers": "sudo apt-get install linux-headers-$(uname -r)",
    "pages": "echo kernel=kernel8.img | sudo tee -a /boot/firmware/config.txt && sudo reboot",
    "no_node": "docker run --device-cgroup-rule 'c 189:* rmw' -v /dev/bus/usb:/dev/bus/usb …",
    "not_passed": "docker run --device /dev/apex_0 …",
    "firmware": "docker run --device-cgroup-rule 'c 189:* rmw' -v /dev/bus/usb:/dev/bus/usb …",
}
"""The usual fix of each problem whose fix depends on the host."""


def drawn(page: str) -> str:
    """Return the section of a page on known problems."""
    parts = [part for name, problem in PROBLEMS.items() if problem.page == page for part in _parts(name, problem)]
    return "\n\n".join(parts)


def _parts(name: str, problem: Problem) -> Iterator[str]:
    yield f"### {sentence(problem.title)}"
    values = {**VALUES, **dict.fromkeys(("fix", "install", "headers"), FIXES.get(name, ""))}
    row = problem.finding("error", "", **values)
    yield f"{sentence(row.why)}. `doctor` reports `{problem.kind}`."
    if row.hint:
        command, _, comment = row.hint.partition("  # ")
        yield f"```sh\n{command}\n```" + (f"\n\n{sentence(comment)}." if comment else "")
    if problem.sources:
        yield "Sources: " + ", ".join(f"[{label(source)}]({source})" for source in problem.sources) + "."


def sentence(text: str) -> str:
    """Return the text with a capital first letter, except for the name of a program."""
    return text if text.startswith("libedgetpu") else text[0].upper() + text[1:]


def label(source: str) -> str:
    """Return a short name of a URL: `owner/name 12` for a GitHub thread, `owner/name` for a repository, or the host."""
    thread = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)", source)
    if thread:
        return f"{thread[1]} {thread[2]}"
    repository = re.match(r"https://github\.com/([\w.-]+/[\w.-]+)", source)
    return repository[1] if repository else source.split("/")[2]


def with_problems(page: Path) -> str:
    """Return the text of a page with its known problems."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{drawn(page.stem)}\n\n{END}{tail}"


def pages() -> list[Path]:
    """Return the pages that have a section on known problems."""
    return [path for path in sorted(PAGES.glob("*.md")) if BEGIN in path.read_text(encoding="utf-8")]


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_problems(path), encoding="utf-8")
