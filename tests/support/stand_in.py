"""Stand-ins for edgetpu_compiler, docker and ssh: they record their calls, and give the answers that a test sets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "16.0.384591198"
LOG = f"""\
Edge TPU Compiler version {VERSION}
Started a compilation timeout timer of 180 seconds.

Model compiled successfully in 329 ms.

Input model: model.tflite
Input size: 2.78KiB
Output model: model_edgetpu.tflite
Output size: 2.93KiB
On-chip memory used for caching model parameters: 1.25KiB
On-chip memory remaining for caching model parameters: 7.87MiB
Off-chip memory used for streaming uncached model parameters: 0.00B
Number of Edge TPU subgraphs: 1
Total number of operations: 2
Operation log: model_edgetpu.log

Operator                       Count      Status

CONV_2D                        1          Mapped to Edge TPU
FULLY_CONNECTED                1          Mapped to Edge TPU
Compilation child process completed within timeout period.
Compilation succeeded! \n"""
"""The output of compiler 16 for `tiny.classifier()`."""
FAILED = f"""\
Edge TPU Compiler version {VERSION}
Started a compilation timeout timer of 180 seconds.
%sCompilation child process completed within timeout period.
Compilation failed! \n"""
CHANCE = f"Edge TPU Compiler version {VERSION}\n\nInternal compiler error. Aborting! \n"

_COMPILER = """
answers, notes = json.loads({answers!r}), pathlib.Path({notes!r})
asked = notes.read_text().splitlines() if notes.exists() else []
model = pathlib.Path(sys.argv[-1])
told = {{
    "arguments": sys.argv[1:], "folder": os.getcwd(), "around": sorted(os.listdir()), "pid": os.getpid(),
    "stdin": sys.stdin.read(), "model": hashlib.sha256(model.read_bytes()).hexdigest(),
}}
with notes.open("a") as stream:
    stream.write(json.dumps(told) + "\\n")
answer = answers[min(len(asked), len(answers) - 1)]
for name, path in answer["files"].items():
    pathlib.Path(name).write_bytes(pathlib.Path(path).read_bytes())
pathlib.Path("model_edgetpu.log").write_text("the table again")
sys.stdout.write(answer["log"])
sys.stdout.flush()
if answer["seconds"]:
    child = subprocess.Popen(["sleep", str(answer["seconds"])])  # the real one works in a child, too
    with notes.with_name("children").open("a") as stream:
        stream.write(f"{{child.pid}}\\n")
    child.wait()
if answer["exit_code"] < 0:
    os.kill(os.getpid(), -answer["exit_code"])
sys.exit(answer["exit_code"])
"""
_SSH = """
assert sys.argv[1] == "-T" and sys.argv[-3] == "--", sys.argv
notes = pathlib.Path({notes!r})
with notes.open("a") as stream:
    stream.write(json.dumps({{"arguments": sys.argv[1:-1]}}) + "\\n")
if {refuses!r}:
    sys.exit("ssh: connect to host there port 22: Connection refused")
# Like sshd: the shell has another session, and hears of our end only by the end of its input.
pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
shell = subprocess.Popen(["bash", "-c", sys.argv[-1]], start_new_session=True, **pipes)


def copy(source, sink):
    while content := os.read(source.fileno(), 1 << 16):
        sink.write(content)
        sink.flush()
    sink.close()


threading.Thread(target=copy, args=(sys.stdin, shell.stdin), daemon=True).start()
copy(shell.stdout, sys.stdout.buffer)
os._exit(shell.wait())
"""
_DOCKER = """
notes, containers = pathlib.Path({notes!r}), pathlib.Path({notes!r} + "-containers")
containers.mkdir(exist_ok=True)
arguments = sys.argv[1:]
with notes.open("a") as stream:
    stream.write(json.dumps({{"arguments": [part for part in arguments if len(part) < 300]}}) + "\\n")
if arguments[:2] == ["image", "inspect"]:
    print("sha256:" + "a" * 64) if arguments[-1] == "coral" else sys.exit("Error: No such image")
elif arguments[0] == "run":
    name, at = arguments[arguments.index("--name") + 1], arguments.index("--entrypoint")
    if arguments[at + 2] != "coral":
        sys.exit("docker: Error response from daemon: pull access denied")
    files = tempfile.mkdtemp()
    command = [arguments[at + 1], *arguments[at + 3 :]]
    inside = subprocess.Popen(command, start_new_session=True, env={{**os.environ, "TMPDIR": files}})
    (containers / name).write_text(json.dumps([inside.pid, files]))
    code = inside.wait()
    (containers / name).unlink()
    shutil.rmtree(files)
    sys.exit(code)
elif arguments[:2] == ["rm", "--force"]:
    session, files = json.loads((containers / arguments[2]).read_text())
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if (process / "stat").read_text().rpartition(")")[2].split()[3] == str(session):
                os.kill(int(process.name), 9)
        except (FileNotFoundError, ProcessLookupError):
            continue
    (containers / arguments[2]).unlink()
    shutil.rmtree(files, ignore_errors=True)  # the script may be removing them, too
"""


@dataclass(frozen=True)
class Answer:
    """The behaviour of the stand-in for the compiler: the files that it writes, its output, duration and exit code."""

    log: str = LOG
    files: Mapping[str, bytes] = field(default_factory=dict)
    exit_code: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Programs:
    """The stand-ins of a test, in a folder that must be on PATH."""

    folder: Path

    def compiler(self, *answers: Answer, name: str = "edgetpu_compiler") -> Path:
        """Write a compiler that gives one answer after the other, and then repeats the last one."""
        plain: list[Any] = []
        for index, answer in enumerate(answers):
            paths = {}
            for file, content in answer.files.items():
                paths[file] = str(self.folder / f"answer-{index}-{file}")
                Path(paths[file]).write_bytes(content)
            plain.append({**vars(answer), "files": paths})
        return self.write(name, _COMPILER.format(answers=json.dumps(plain), notes=str(self.folder / "asked")))

    def ssh(self, refuses: bool = False) -> Path:
        """Write an ssh that reaches this machine, or that refuses to connect."""
        return self.write("ssh", _SSH.format(notes=str(self.folder / "ssh-asked"), refuses=refuses))

    def docker(self) -> Path:
        """Write a docker that has an image "coral"."""
        return self.write("docker", _DOCKER.format(notes=str(self.folder / "docker-asked")))

    def write(self, name: str, body: str) -> Path:
        path = self.folder / name
        head = "import hashlib, json, os, pathlib, shutil, subprocess, sys, tempfile, threading"
        path.write_text(f"#!{sys.executable} -IX utf8\n{head}\n{body}", encoding="utf-8")
        path.chmod(0o755)
        return path

    def asked(self, name: str = "asked") -> list[dict[str, Any]]:
        """Return the recorded calls of a stand-in."""
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ended(self, *folders: Path) -> bool:
        """Return whether all compilers and their children end, and these folders are empty, within ten seconds."""
        children = self.folder / "children"
        pids = [call["pid"] for call in self.asked()]
        pids += [int(line) for line in children.read_text().split()] if children.exists() else []
        for _ in range(100):
            if not any(map(_alive, pids)) and not any(path for folder in folders for path in folder.iterdir()):
                return True
            time.sleep(0.1)
        return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before or during the read
        return False


def success(model: bytes, log: str = LOG, names: Sequence[str] = ("model_edgetpu.tflite",), **more: Any) -> Answer:
    """Return the compiler's behaviour for a model that it can compile."""
    from packages import compiled

    return Answer(log, dict.fromkeys(names, compiled(model)), **more)
