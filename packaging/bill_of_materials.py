"""Dependencies of a release: `python packaging/bill_of_materials.py`.

Writes dist/coralline.cdx.json, a software bill of materials (CycloneDX 1.6): every package that
`pip install '.[search,sign]'` installs, with the version and the hashes of constraints.txt, its licence, and
the packages that it needs. The same sources and constraints give the same bytes. `--page` writes docs/dependencies.md,
the table of these packages for people. Licences are what the packages declare in their metadata.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ("coralline", ("search", "sign"))
"""The package and the extras whose dependencies are listed."""
EPOCH = 1580601600
"""2020-02-02, the time of the files in the wheels, unless SOURCE_DATE_EPOCH gives another one."""
NOT_DECLARED = {"namex": "Apache License 2.0"}
"""Licences of packages whose metadata have none, from the licence files in their wheels."""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(.*?)(?=^[A-Za-z0-9]|\Z)", re.MULTILINE | re.DOTALL)
_SHA256 = re.compile(r"--hash=sha256:([0-9a-f]{64})")
PAGE = """\
# Dependencies

`pip install '.[search,sign]'` installs {count} other packages. [constraints.txt](../constraints.txt) pins them
and the development tools by version and SHA-256: `make demo` and `make test` install nothing else. `make constraints`
writes this file again; it needs [uv](https://docs.astral.sh/uv/). `make wheel` writes the list below as
`dist/coralline.cdx.json` too: a software bill of materials in the format CycloneDX.

On the device, `deploy` needs numpy and a TFLite runtime only. Pillow (8 or newer) decodes images, and `cryptography`
verifies signatures faster.

The licences are those that the packages declare. Packages with binaries contain further libraries; their licences are
in the folders `*.dist-info` of the installed packages.

| package | version | licence |
|---|---|---|
{rows}
"""


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        name: its normalized name.
        version: its version.
        licence: the licence that it declares.
        needs: the normalized names of the packages that it needs here.
    """

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]


def pins(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the versions and SHA-256 hashes in the text of constraints.txt, by normalized name."""
    return {
        canonicalize_name(name): (version, tuple(_SHA256.findall(rest))) for name, version, rest in _PIN.findall(text)
    }


def dependencies(name: str, extras: tuple[str, ...]) -> dict[str, Package]:
    """Return a package and all packages that it needs in this environment, by normalized name."""
    packages: dict[str, Package] = {}
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        key = canonicalize_name(name)
        needed = list(_needed(name, extras))
        if key not in packages or extras:
            known = packages[key].needs if key in packages else ()
            needs = {*known, *(canonicalize_name(requirement.name) for requirement in needed)}
            packages[key] = Package(key, metadata.version(name), licence(name), tuple(sorted(needs)))
            waiting += [(requirement.name, tuple(requirement.extras)) for requirement in needed]
    return dict(sorted(packages.items()))


def _needed(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def licence(name: str) -> str:
    """Return the licence that an installed package declares: an expression, a classifier or a name.

    Raises:
        ValueError: it declares none.
    """
    about: Any = metadata.metadata(name)
    declared = about.get("License-Expression") or ""
    classifiers = [row.split(" :: ")[-1] for row in about.get_all("Classifier") or () if row.startswith("License ::")]
    text = (about.get("License") or "").strip()
    licence_text = declared or (text if text and "\n" not in text else ", ".join(classifiers))
    licence_text = licence_text or NOT_DECLARED.get(canonicalize_name(name), "")
    if not licence_text:
        raise ValueError(f"{name} declares no licence: look it up, and add it to NOT_DECLARED")
    return licence_text


def bill(packages: dict[str, Package], pinned: dict[str, tuple[str, tuple[str, ...]]]) -> str:
    """Return the bill of materials as JSON.

    Raises:
        ValueError: a package is not installed in the version of constraints.txt.
    """
    root, _ = RELEASE
    components = {}
    for package in packages.values():
        version, hashes = pinned.get(package.name, (package.version, ()))
        if version != package.version or (package.name != root and not hashes):
            raise ValueError(f"{package.name} {package.version} is installed; constraints.txt has {version}")
        components[package.name] = Component(
            name=package.name,
            version=package.version,
            type=ComponentType.APPLICATION if package.name == root else ComponentType.LIBRARY,
            bom_ref=f"{package.name}@{package.version}",
            purl=None if package.name == root else PackageURL("pypi", name=package.name, version=package.version),
            licenses=[LicenseFactory().make_from_string(package.licence)],
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in hashes],
        )
    content = "".join(f"{package}\n" for package in packages.values())
    document = Bom(
        components=[component for name, component in components.items() if name != root],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, content),
    )
    document.metadata.component = components[root]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH))
    document.metadata.timestamp = datetime.datetime.fromtimestamp(epoch, datetime.UTC)
    for package in packages.values():
        document.register_dependency(components[package.name], [components[name] for name in package.needs])
    return make_outputter(document, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def page(packages: dict[str, Package]) -> str:
    """Return the text of docs/dependencies.md."""
    others = [package for name, package in packages.items() if name != RELEASE[0]]
    rows = "\n".join(f"| {package.name} | {package.version} | {package.licence} |" for package in others)
    return PAGE.format(count=len(others), rows=rows)


def main() -> None:
    """Write the bill, or the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--page", action="store_true", help="write docs/dependencies.md instead")
    packages = dependencies(*RELEASE)
    if parser.parse_args().page:
        (ROOT / "docs" / "dependencies.md").write_text(page(packages), encoding="utf-8")
        return
    text = bill(packages, pins((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    (ROOT / "dist").mkdir(exist_ok=True)
    (ROOT / "dist" / "coralline.cdx.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
