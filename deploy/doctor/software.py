"""The checks of `doctor` for Python, the TFLite runtime, libedgetpu, and packages with misleading names."""

from __future__ import annotations

import glob
import os
import re
from typing import List, Optional

from deploy.doctor.command import Facts
from deploy.runner.host import edge_tpus, needs_numpy_1, text_of, version_numbers
from deploy.runner.problems import PROBLEMS, Finding

RUNTIMES = ("ai-edge-litert", "tflite-runtime", "tensorflow")
_VENV = "sudo apt-get install python3-venv && python3 -m venv --system-site-packages ~/coralline"


def findings(facts: Facts) -> List[Finding]:
    """Return all findings on software."""
    checks = (_musl, _runtime, _crashed, _library, _too_new, _other_version, _traps, _shadows)
    return [finding for check in checks for finding in check(facts)]


def install(facts: Facts) -> str:
    """Return the command that installs a TFLite runtime. For a 32-bit Python, only old versions exist."""
    if facts.python >= (3, 10) and facts.bits == 64:
        return _pip(facts, "install ai-edge-litert")
    if facts.python >= (3, 12):
        return "getconf LONG_BIT  # no TFLite runtime exists for this 32-bit Python: install a 64-bit system"
    if facts.python >= (3, 8):
        return _pip(facts, "install tflite-runtime 'numpy<2'")
    return _pip(facts, "install tflite-runtime==2.11.0")


def _pip(facts: Facts, what: str) -> str:
    """Return a pip command; a virtual environment is used if pip refuses to change the system's packages."""
    if not facts.managed:
        return "python3 -m pip %s" % what
    if what.startswith("uninstall"):
        return "python3 -m pip %s --break-system-packages" % what
    return "%s && ~/coralline/bin/python -m pip %s  # then use ~/coralline/bin/python" % (_VENV, what)


def _musl(facts: Facts) -> List[Finding]:
    """Return a finding for a system without glibc, such as Alpine Linux."""
    libraries = glob.glob(os.path.join(facts.root, "lib/ld-musl-*"))
    if not libraries or glob.glob(os.path.join(facts.root, "lib*/ld-linux*")):
        return []
    what = "this system has the C library musl (%s)" % os.path.basename(libraries[0])
    return [PROBLEMS["musl"].finding("error", what)]


def _runtime(facts: Facts) -> List[Finding]:
    reported = facts.reported
    if "no_numpy" in reported:
        what = "numpy cannot be imported: %s" % reported["no_numpy"]
        why = "preprocessing and every TFLite runtime need it"
        return [Finding("error", "no_numpy", what, why, _pip(facts, "install numpy"))]
    if "broken" in reported:
        broken = reported["broken"]
        why = "no model runs without a TFLite runtime"
        return [Finding("error", broken["kind"], broken["what"], why, install(facts))]
    runtime = reported.get("runtime")
    if runtime is None:
        return []
    numpy = reported.get("numpy", "")
    version = runtime["version"]
    others = [name for name in RUNTIMES if name in facts.installed and name != runtime["name"].replace("_", "-")]
    used = "%s %s with numpy %s is used" % (runtime["name"], version, numpy)
    if others:
        used += "; also installed: %s" % ", ".join(others)
    result = [Finding("note", "runtime", used, "the environment variable CORALLINE_RUNTIME selects another one")]
    if needs_numpy_1(runtime["name"], version) and version_numbers(numpy)[:1] >= (2,):
        what = "tflite-runtime %s was built for numpy 1, and numpy %s is installed" % (version, numpy)
        why = "every model fails to load, with a misleading message"
        result.append(Finding("error", "numpy_2", what, why, _pip(facts, "install 'numpy<2'")))
    return result


def _crashed(facts: Facts) -> List[Finding]:
    """Return a finding if the child process, which imports the libraries, crashed or hung."""
    if "ended" not in facts.reported:
        return []
    step = facts.reported.get("step", "start")
    hint = {
        "numpy": _pip(facts, "install --force-reinstall numpy"),
        "runtime": install(facts),
        "pycoral": _pip(facts, "uninstall -y pycoral"),
        "library": "sudo apt-get install --reinstall libedgetpu1-std",
    }
    what = "the trial in a child process failed in the step `%s`: %s" % (step, facts.reported["ended"])
    why = "an application would fail in the same way"
    return [Finding("error", "crash", what, why, hint.get(step, "python3 --version"))]


def _library(facts: Facts) -> List[Finding]:
    text = facts.reported.get("unloadable")
    if text is None:
        return []
    why = "compiled models need libedgetpu; without it the int8 model runs on the CPU"
    if "libusb" in text:
        return [Finding("error", "libusb_missing", "libedgetpu needs libusb: %s" % text, why, _apt("libusb-1.0-0"))]
    if "cannot open shared object file" in text:
        severity = "error" if edge_tpus(facts.root) else "note"
        what = "libedgetpu is not installed"
        return [PROBLEMS["library_missing"].finding(severity, what, install=_install_library(facts))]
    what = "libedgetpu does not load: %s" % text
    return [Finding("error", "library_broken", what, why, _apt("--reinstall libedgetpu1-std"))]


def _too_new(facts: Facts) -> List[Finding]:
    """Return a finding for a TFLite that is newer than Google's libedgetpu 16.0, which was built in 2021."""
    runtime = facts.reported.get("runtime")
    if runtime is None or not runtime.get("too_new") or "libedgetpu" not in facts.reported:
        return []
    packaged = _packaged_libedgetpu(facts.root)
    if packaged is not None and packaged not in ("16.0", "15.0", "14.1", "14.0"):
        return []  # the version of a rebuilt package names its TFLite: 16.0tf2.17.1-1
    library = "Google's libedgetpu %s" % packaged if packaged else "a libedgetpu without a Debian package"
    what = "%s is installed together with %s %s" % (library, runtime["name"], runtime["version"])
    severity = "error" if packaged and edge_tpus(facts.root) else "warning"
    finding = PROBLEMS["too_new"].finding(severity, what)
    if facts.python < (3, 10):
        finding = finding._replace(hint=_pip(facts, "install 'tflite-runtime<2.12' 'numpy<2'"))
    return [finding]


def _other_version(facts: Facts) -> List[Finding]:
    """Return a note if a rebuilt libedgetpu names another TFLite than the runtime: 16.0tf2.17.1-1 and 2.14.0.

    The versions of ai_edge_litert are not those of TFLite, so nothing is said about them.
    """
    runtime = facts.reported.get("runtime")
    packaged = _packaged_libedgetpu(facts.root) or ""
    built = re.search(r"tf(\d+\.\d+[.\d]*)", packaged)
    if runtime is None or built is None or runtime["name"] == "ai_edge_litert":
        return []
    if version_numbers(built.group(1))[:2] == version_numbers(runtime["version"])[:2]:
        return []
    versions = (packaged, built.group(1).rstrip("."), runtime["name"], runtime["version"])
    what = "libedgetpu %s was built with TFLite %s; %s %s is used" % versions
    return [PROBLEMS["library_version"].finding("note", what)]


def _install_library(facts: Facts) -> str:
    runtime = facts.reported.get("runtime")
    if runtime is not None and runtime.get("too_new"):
        return PROBLEMS["too_new"].hint
    command = _apt("libedgetpu1-std")
    lists = glob.glob(os.path.join(facts.root, "etc/apt/sources.list*"))
    lists += glob.glob(os.path.join(facts.root, "etc/apt/sources.list.d/*"))
    if any("coral-edgetpu-stable" in (text_of(path) or "") for path in lists):
        return command
    return command + "  # after adding Google's archive to apt"


def _traps(facts: Facts) -> List[Finding]:
    result = []
    if facts.reported.get("pycoral") == "other":
        what = "the installed package pycoral is not Google's: on the package index it is an atlas of coral reefs"
        why = "`from pycoral.utils import edgetpu` fails, and it hides Google's own"
        result.append(Finding("warning", "pycoral", what, why, _pip(facts, "uninstall -y pycoral")))
    if "edgecompiler" in facts.installed:
        what = "the package edgecompiler is installed: it is not Google's edgetpu_compiler"
        why = "it writes a placeholder that does not run on an Edge TPU"
        result.append(Finding("warning", "edgecompiler", what, why, _pip(facts, "uninstall -y edgecompiler")))
    return result


def _shadows(facts: Facts) -> List[Finding]:
    """Return a finding for each package that Python would import instead of Coralline's.

    Only a module, or a folder with an __init__.py, hides a package further down the path. A folder `models/` hides
    nothing, because Coralline reads its models by path.
    """
    result = []
    seen = set()
    for entry in (facts.folder,) + facts.path:
        folder = os.path.abspath(os.path.join(facts.folder, entry))
        if folder in seen or os.path.realpath(folder) == os.path.realpath(facts.package):
            continue
        seen.add(folder)
        for name in ("compress", "deploy"):
            path = _package(folder, name)
            if path and not _is_copy(path):
                what = "%s has the name of a package of Coralline" % path
                why = "`import %s` in a program started here imports it instead of Coralline's package" % name
                new = path[:-3] + "_own.py" if path.endswith(".py") else path + "_own"
                result.append(Finding("warning", "shadow", what, why, "mv %s %s" % (path, new)))
        if folder == os.path.abspath(facts.folder) and _package(folder, "models"):
            what = "%s is a package" % os.path.join(folder, "models")
            why = "Coralline reads its own models/ by path, so nothing is shadowed; your own builders need trust: true"
            result.append(Finding("note", "shadow_models", what, why))
    return result


def _package(folder: str, name: str) -> str:
    if os.path.isfile(os.path.join(folder, name, "__init__.py")):
        return os.path.join(folder, name)
    module = os.path.join(folder, name + ".py")
    return module if os.path.isfile(module) else ""


def _is_copy(path: str) -> bool:
    files = ["pipeline/stage.py", "pipeline/schema.py", "pipeline/store.py"]
    if os.path.basename(path) == "deploy":
        files = ["contract/bundle.py", "contract/preprocessing.py"]
    return all(os.path.isfile(os.path.join(path, name)) for name in files)


def _packaged_libedgetpu(root: str) -> Optional[str]:
    """Return the version of libedgetpu if it is installed as a Debian package, or None."""
    try:
        with open(os.path.join(root, "var/lib/dpkg/status"), "rb") as stream:
            text = stream.read(1 << 26).decode("utf-8", "replace")
    except OSError:
        return None
    for entry in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", entry, re.MULTILINE))
        is_installed = fields.get("Status", "").endswith(" installed")
        if fields.get("Package") in ("libedgetpu1-std", "libedgetpu1-max") and is_installed:
            return fields.get("Version")
    return None


def _apt(names: str) -> str:
    return "sudo apt-get install %s" % names
