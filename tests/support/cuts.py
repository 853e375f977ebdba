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


FLEET = ("killed", "connection", "after the switch", "full", "slow")


def fleet(folder: object, share: float, seed: int) -> str:
    """Return code that makes a share of the agents fail in a way of `FLEET`, at a random operation on files.

    Args:
        folder: the folder of `failures.jsonl`, which gets a line for each agent that fails.
        share: the share of the agents that fail.
        seed: together with the number of the agent, determines the failure.
    """
    return f"""
import fcntl, json, os, random, signal, sys, time
with open({str(folder)!r} + "/agents", "a+") as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.write("x")
    stream.flush()
    number = stream.tell()
chance = random.Random({seed} * 100000 + number)
if chance.random() < {share}:
    how, left = chance.choice({FLEET!r}), [chance.randrange(5, 120)]
    def note():
        with open({str(folder)!r} + "/failures.jsonl", "a") as stream:
            stream.write(json.dumps(dict(agent=number, how=how)) + chr(10))
    def hook(event, arguments):
        if left[0] < 0 or event not in {EVENTS!r}:
            return
        left[0] -= 1
        switched = event == "open" and str(arguments[0]).endswith("history.jsonl") and "a" in arguments[1]
        if not (switched if how == "after the switch" else left[0] < 0):
            return
        left[0] = -1
        note()
        if how == "slow":
            time.sleep(5)
        elif how == "full":
            raise OSError(28, "No space left on device")
        elif how == "connection":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.5)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""
