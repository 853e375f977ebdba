"""docs/tutorial.md: its files are written and its commands run, in order, in an empty folder, with the wheel."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from installation import installed
from paths import ROOT

TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"(?:<!-- (file|replaces): (\S+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of the page: its marker, the marker's argument, its language and its text."""

    marker: str
    argument: str
    language: str
    text: str


BLOCKS = [Block(*match.groups("")) for match in BLOCK.finditer(TEXT)]


def matches(expected: str, output: str) -> bool:
    """Return whether an output has the lines of a block; "…" stands for any text, also over several lines."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
    return re.search(".*?".join(parts), " ".join(output.split())) is not None


def run(line: str, folder: Path, programs: Path) -> str:
    """Run a command of the page with the programs of an environment; return its stdout."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "python"
    environment = {name: value for name, value in tiny.environment().items() if name != "PYTHONPATH"}
    command = [str(programs / program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


def replaced(content: str, key: str, block: str) -> str:
    """Return a pipeline file with another block for one key."""
    changed, count = re.subn(rf"^{key}:\n(?:[ -].*\n)+", block, content, flags=re.MULTILINE)
    assert count == 1
    return changed


@pytest.mark.tensorflow
def test_the_tutorial_with_the_installed_wheel(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The base requirements are enough: no package of an extra is installed, and the repository is not on the path."""
    programs = installed(tmp_path_factory.mktemp("installation"))
    pipeline = tmp_path / "numbers.yaml"
    outputs = [""]
    for block in BLOCKS:
        if block.marker == "file":
            (tmp_path / block.argument).write_text(block.text)
        elif block.marker == "replaces":
            pipeline.write_text(replaced(pipeline.read_text(), block.argument, block.text))
        elif block.language == "sh":
            outputs += [run(line, tmp_path, programs) for line in block.text.splitlines()]
        elif block.language == "text":
            assert matches(block.text, outputs[-1]), f"{block.text!r} is not in: {outputs[-1]}"
    assert len([*(tmp_path / "photos").rglob("*.png")]) == 1797
    macs = [int(number.replace(",", "")) for number in re.findall(r"^macs +922,080 +([\d,]+)", "".join(outputs), re.M)]
    assert macs[0] == 922_080
    assert macs[1] < 0.52 * 922_080


def test_every_block_is_a_file_a_command_or_an_output() -> None:
    """Blocks without a language are the installation and a list of folders."""
    assert [block.language for block in BLOCKS].count("") == 2
    for block in BLOCKS:
        assert block.language in ("sh", "text", "") or block.marker in ("file", "replaces"), block.text
    assert sum(block.language == "sh" for block in BLOCKS) >= 7


def test_outputs_are_compared() -> None:
    assert matches("a …\nb\n", "x\na  1\nb\n")
    assert not matches("a …\nc\n", "x\na  1\nb\n")
