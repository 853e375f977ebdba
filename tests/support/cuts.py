"""Code that runs on the remote host before the code that `deploy` sends: it kills the agent or damages its input."""

from __future__ import annotations

EVENTS = (
    *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate", "os.listdir"),
    *("shutil.rmtree", "fcntl.flock", "subprocess.Popen"),
)


def at_operation(number: int, folder: object) -> str:
    """Return code that kills the agent (SIGKILL) right before the n-th operation on files below a folder."""
    return f"""
import os, signal, sys
left = [{number}]
def hook(event, arguments):
    if event in {EVENTS!r} and (event == "fcntl.flock" or any({str(folder)!r} in str(each) for each in arguments)):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


def after_bytes(number: int) -> str:
    """Return code that kills the agent (SIGKILL) when it has received more than this number of bytes."""
    return f"""
import os, signal
left, read = [{number}], os.read
def counted(handle, size):
    content = read(handle, size)
    left[0] -= len(content)
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return content
os.read = counted
"""


def spoilt(times: int) -> str:
    """Return code that changes one byte in each of the first `times` large blocks that the agent receives."""
    return f"""
import os
left, read = [{times}], os.read
def spoiling(handle, size):
    content = read(handle, size)
    if left[0] and len(content) > 10000 and b'"do"' not in content:
        left[0] -= 1
        content = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    return content
os.read = spoiling
"""


def runner_fails_after(runs: int) -> str:
    """Return code that lets the runner work `runs` times and then fail."""
    return f"""
import subprocess, sys
left, popen = [{runs}], subprocess.Popen
def failing(command, **options):
    left[0] -= 1
    return popen(command if left[0] >= 0 else [sys.executable, "-c", "raise SystemExit('runner: broken')"], **options)
subprocess.Popen = failing
"""


def at_the_switch(folder: object, *, after: bool) -> str:
    """Return code that kills the agent (SIGKILL) after the switch of the release, or before it at README.txt."""
    event, name = ("open", "history.jsonl") if after else ("os.rename", "README.txt")
    return f"""
import os, signal, sys
def hook(event, arguments):
    if event == {event!r} and {str(folder)!r} + "/" in str(arguments) and {name!r} in str(arguments[:2]):
        if event != "open" or "a" in arguments[1]:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""
