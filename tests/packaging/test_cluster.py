"""The launch of a search on a cluster: the Kubernetes Job against the schema, and the Slurm array with stand-ins.

Slurm has no check that works without a cluster, so bash reads the script, and a stand-in for Python shows its commands.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from ruamel.yaml import YAML

CLUSTER = ROOT / "packaging" / "cluster"


def command(tmp_path: Path, *script: str, **environment: str) -> str:
    """Return the arguments of the Python that a script starts."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(script, env={**environment, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job() -> Any:
    return YAML(typ="safe").load(CLUSTER / "kubernetes.yaml")


def test_the_job_is_valid() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    kubernetes.validate(job(), kubernetes.latest_version(), strict=True)
    wrong = job()
    wrong["spec"]["completion"] = 8
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_task_searches_and_the_others_join(tmp_path: Path, index: int) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = str(CLUSTER / "slurm.sh")
    assert subprocess.run([bash, "-n", script], check=False).returncode == 0
    ending = " --join" if index else ""
    said = command(tmp_path, bash, script, "p.yaml", SLURM_ARRAY_TASK_ID=str(index), STORAGE="postgresql:x", RUNS="/r")
    assert said == f"-m compress search p.yaml --storage postgresql:x --out /r{ending}"
    container = job()["spec"]["template"]["spec"]["containers"][0]
    said = command(tmp_path, *container["command"], *container["args"], JOB_COMPLETION_INDEX=str(index), STORAGE="s")
    expected = "-m compress search /pipeline/pipeline.yaml --storage s --store s3://BUCKET/search --out /work/runs"
    assert said == expected + ending
