"""What `doctor` finds about Python, the TFLite runtime, libedgetpu, and packages that are not what they seem.

Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable, List, Optional, Tuple

from deploy.doctor import Facts, Finding

RUNTIMES = ("ai-edge-litert", "tflite-runtime", "tensorflow")
_VENV = "sudo apt-get install python3-venv && python3 -m venv --system-site-packages ~/coralline"


def findings(facts: Facts) -> List[Finding]:
    """All of them."""
    checks: Tuple[Callable[[Facts], List[Finding]], ...] = (_runtime, _crashed, _library, _too_new, _traps, _shadows)
    return [each for check in checks for each in check(facts)]


def install(facts: Facts) -> str:
    """The command that installs a TFLite runtime for a Python. Of 32 bits there are old ones alone."""
    if facts.python >= (3, 10) and facts.bits == 64:
        return _pip(facts, "install ai-edge-litert")
    if facts.python >= (3, 12):
        return "getconf LONG_BIT  # no TFLite runtime is made for this Python of 32 bits: a system of 64 is needed"
    return _pip(
        facts, "install tflite-runtime 'numpy<2'" if facts.python >= (3, 8) else "install tflite-runtime==2.11.0"
    )


def _pip(facts: Facts, what: str) -> str:
    """A command of pip, which does not touch the system's own packages where it is not allowed to."""
    if not facts.managed:
        return "python3 -m pip %s" % what
    if what.startswith("uninstall"):
        return "python3 -m pip %s --break-system-packages" % what
    return "%s && ~/coralline/bin/python -m pip %s  # then use ~/coralline/bin/python" % (_VENV, what)


def _runtime(facts: Facts) -> List[Finding]:
    told = facts.told
    if "no_numpy" in told:
        why = "preprocessing and every TFLite runtime need it"
        return [
            Finding("error", "no_numpy", "there is no numpy: %s" % told["no_numpy"], why, _pip(facts, "install numpy"))
        ]
    if "broken" in told:
        why = "without a TFLite runtime no model runs"
        return [Finding("error", told["broken"]["kind"], told["broken"]["what"], why, install(facts))]
    found = told.get("runtime")
    if found is None:
        return []
    numpy, version = told.get("numpy", ""), found["version"]
    others = [name for name in RUNTIMES if name in facts.installed and name != found["name"].replace("_", "-")]
    more = "; also here: %s" % ", ".join(others) if others else ""
    used = "%s %s with numpy %s is used%s" % (found["name"], version, numpy, more)
    result = [Finding("note", "runtime", used, "CORALLINE_RUNTIME names another one, as ai_edge_litert")]
    if found["name"] == "tflite_runtime" and _numbers(version)[:2] <= (2, 14) and _numbers(numpy)[:1] >= (2,):
        what = "tflite-runtime %s was built for numpy 1, and numpy %s is here" % (version, numpy)
        why = "loading any model fails, in words that do not say why"
        result.append(Finding("error", "numpy_2", what, why, _pip(facts, "install 'numpy<2'")))
    return result


def _crashed(facts: Facts) -> List[Finding]:
    """The child process that asks the libraries did not end well."""
    if "ended" not in facts.told:
        return []
    step = facts.told.get("step", "start")
    todo = {"numpy": _pip(facts, "install --force-reinstall numpy"), "runtime": install(facts)}
    todo["pycoral"] = _pip(facts, "uninstall -y pycoral")
    todo["library"] = "sudo apt-get install --reinstall libedgetpu1-std"
    what = "the trial in a child process did not get beyond the step `%s`: %s" % (step, facts.told["ended"])
    why = "the same would happen to an application"
    return [Finding("error", "crash", what, why, todo.get(step, "python3 --version"))]


def _library(facts: Facts) -> List[Finding]:
    text = facts.told.get("unloadable")
    if text is None:
        return []
    why = "compiled models run through libedgetpu alone; without it the int8 model runs on the CPU"
    if "libusb" in text:
        return [Finding("error", "libusb_missing", "libedgetpu needs libusb: %s" % text, why, _apt("libusb-1.0-0"))]
    if "cannot open shared object file" in text:
        severity = "error" if _present(facts) else "note"
        return [Finding(severity, "library_missing", "libedgetpu is not installed", why, _apt("libedgetpu1-std"))]
    what = "libedgetpu does not load: %s" % text
    return [Finding("error", "library_broken", what, why, _apt("--reinstall libedgetpu1-std"))]


def _too_new(facts: Facts) -> List[Finding]:
    """Google's own libedgetpu 16.0 is from 2021, and was built for the TFLite of that year."""
    found = facts.told.get("runtime")
    if found is None or not found.get("too_new") or "libedgetpu" not in facts.told:
        return []
    packaged = debian_version(facts.root, r"libedgetpu1-(std|max)")
    if packaged is not None and packaged not in ("16.0", "15.0", "14.1", "14.0"):
        return []  # a rebuilt one names the TFLite that it was built for: 16.0tf2.17.1-1
    which = "libedgetpu %s, Google's own," % packaged if packaged else "a libedgetpu that no package brought"
    what = "%s is here beside %s %s" % (which, found["name"], found["version"])
    why = "with TFLite newer than 2.11.1 Google's own libedgetpu 16.0 can crash the process"
    todo = _pip(facts, "install 'tflite-runtime<2.12' 'numpy<2'")
    if facts.python >= (3, 10):
        todo = "git clone https://github.com/google-coral/libedgetpu && make -C libedgetpu  # for this TFLite"
    return [Finding("error" if packaged and _present(facts) else "warning", "too_new", what, why, todo)]


def _traps(facts: Facts) -> List[Finding]:
    """Names on the package index that are not what one would think."""
    result = []
    if facts.told.get("pycoral") == "other":
        what = "the package pycoral here is not Google's: the one on the package index is for an atlas of coral reefs"
        why = "`from pycoral.utils import edgetpu` fails, and it hides Google's own"
        result.append(Finding("warning", "pycoral", what, why, _pip(facts, "uninstall -y pycoral")))
    if "edgecompiler" in facts.installed:
        what = "the package edgecompiler is installed: it is not Google's edgetpu_compiler"
        why = "what it writes is a placeholder and does not run on an Edge TPU"
        result.append(Finding("warning", "edgecompiler", what, why, _pip(facts, "uninstall -y edgecompiler")))
    return result


def _shadows(facts: Facts) -> List[Finding]:
    """Packages of our names that Python would find in the place of ours.

    Only what has an __init__.py, or is a module, takes the place of a package further down the path. A folder
    `models/` takes nobody's place: ours are read by path.
    """
    result = []
    seen = set()
    for entry in (facts.folder,) + facts.path:
        folder = os.path.abspath(os.path.join(facts.folder, entry))
        if folder in seen or os.path.realpath(folder) == os.path.realpath(facts.ours):
            continue
        seen.add(folder)
        for name in ("compress", "deploy"):
            found = _package(folder, name)
            if found and not _is_ours(found):
                what = "%s has the name of a package of Coralline" % found
                why = "`import %s` in a program started here finds it instead of ours" % name
                todo = "mv %s %s" % (found, _renamed(found))
                result.append(Finding("warning", "shadow", what, why, todo))
        if folder == os.path.abspath(facts.folder) and _package(folder, "models"):
            what = "%s is a package" % os.path.join(folder, "models")
            why = "Coralline reads its own models/ by path, so nothing is shadowed; builders of yours need trust: true"
            result.append(Finding("note", "shadow_models", what, why))
    return result


def _package(folder: str, name: str) -> str:
    """The package or module of a name in a folder; empty if there is none."""
    if os.path.isfile(os.path.join(folder, name, "__init__.py")):
        return os.path.join(folder, name)
    single = os.path.join(folder, name + ".py")
    return single if os.path.isfile(single) else ""


def _is_ours(found: str) -> bool:
    """Whether a package is a copy of Coralline's."""
    return all(os.path.isfile(os.path.join(found, name)) for name in _mark(os.path.basename(found)))


def _mark(name: str) -> Tuple[str, ...]:
    if name == "deploy":
        return ("contract/bundle.py", "contract/preprocessing.py")
    return ("stage.py", "pipeline/schema.py", "pipeline/store.py")


def _renamed(found: str) -> str:
    return found[:-3] + "_own.py" if found.endswith(".py") else found + "_own"


def debian_version(root: str, name: str) -> Optional[str]:
    """The version of an installed Debian package whose name fits a pattern; None where it is not installed."""
    try:
        with open(os.path.join(root, "var/lib/dpkg/status"), "rb") as stream:
            text = stream.read(1 << 26).decode("utf-8", "replace")
    except OSError:
        return None
    for entry in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", entry, re.MULTILINE))
        if re.match(name + r"\Z", fields.get("Package", "")) and fields.get("Status", "").endswith(" installed"):
            return fields.get("Version")
    return None


def _present(facts: Facts) -> bool:
    from deploy import host

    return bool(host.edge_tpus(facts.root))


def _apt(names: str) -> str:
    return "sudo apt-get install %s" % names


def _numbers(text: Any) -> Tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", str(text))
    return tuple(int(part) for part in found.group().split(".")) if found else ()
