"""Costs of the operations of a search and of a shared store: `python benchmarks/scale_costs.py [--parts ...]`.

- storage: a worker joins a study. In each iteration it reads the trials, asks for one, renews its lease and reports a
  result. The figures are the wall time of each operation, and the CPU time of the worker, of the proxy and of
  PostgreSQL, for a study that already has some finished and some running trials. These trials are written directly into
  the database.
- sampler: the CPU time of the choice of a trial, by the number of finished trials; without a database.
- store: the seconds to publish an artifact of 1 MB and of 30 MB and to find it on another machine, for a folder that
  both machines mount, and for a bucket of a server on localhost (`rclone serve s3`).

Prints JSON, and writes benchmarks/results/scale_costs.json. `scale_plan.py` uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import repository

import s3
import scale
from compress.pipeline.bucket import Bucket

from compress.core.artifact import Kind
from compress.core.progress import SilentProgress
from compress.pipeline.search import leases
from compress.pipeline.search import storage as search_storage
from compress.pipeline.search.space import Range, Space
from compress.pipeline.search.study import SearchStudy
from compress.pipeline.shared_store import BucketConnection, SharedStore
from compress.pipeline.store import Store
from compress.pipeline.yaml_file import Document
from compress.report.search_record import TrialRecord

RESULTS = repository.RESULTS / "scale_costs.json"
PARTS = ("storage", "sampler", "store")
NAMES = tuple(f"stage{number}.setting" for number in range(6))
SPACE = Space(
    Document(Path(), dict.fromkeys(NAMES, 0.5) | {"stages": []}, {}),
    tuple(Range(name, (name,), 0.0, 1.0) for name in NAMES),
)
OBJECTIVES = (
    SimpleNamespace(name="accuracy", higher_is_better=True),
    SimpleNamespace(name="latency_ms", higher_is_better=False),
)
GOALS: Any = SimpleNamespace(objectives=OBJECTIVES)
STUDIES = ((100, 10), (100, 100), (1000, 100), (100, 1000), (10_000, 100))
"""The numbers of finished and running trials of each study."""
SAMPLED = (30, 100, 300, 1000, 3000, 10_000)
REPEATED = 20
TICKS = os.sysconf("SC_CLK_TCK")
FILL = """
with made as (
  insert into trials (number, study_id, state, datetime_start, datetime_complete)
  select n, (select min(study_id) from studies), '{state}', now(), {complete}
  from generate_series({first}, {last}) n returning trial_id, number
), parameters as (
  insert into trial_params (trial_id, param_name, param_value, distribution_json)
  select trial_id, name, random(), '{distribution}' from made, unnest(array[{names}]) name
), measured as (
  insert into trial_values (trial_id, objective, value, value_type)
  select trial_id, objective, random(), 'FINITE' from made, generate_series(0, 1) objective where '{state}' = 'COMPLETE'
)
insert into trial_user_attributes (trial_id, key, value_json)
select trial_id, key, value from made, (values {attributes}) attribute (key, value)
"""


class RandomStudy(SearchStudy):
    """A study whose values are random."""

    def sampler(self, seed: int) -> Any:
        """Return a sampler of random values."""
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)


def fill(url: str, finished: int, running: int) -> None:
    """Write trials into the database of a study that exists."""
    import sqlalchemy
    from optuna.distributions import FloatDistribution, distribution_to_json

    settings = dict.fromkeys(NAMES, 0.5123456789)
    values = {"accuracy": 0.91234567, "latency_ms": 1.2345678}
    record = TrialRecord(0, "complete", settings, values, {"train": 0.91, "prune": 0.9, "quantize": 0.9}, 0.92)
    owner = {"machine": "elsewhere", "process": 1, "started": "1"}
    known = {"owner": owner, "settings": settings, "lease": 3}
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        groups = (
            ("COMPLETE", 0, finished, {**known, "record": record.to_json()}),
            ("RUNNING", finished, running, known),
        )
        for state, first, count, attributes in groups:
            rows = ", ".join(f"('{name}', '{json.dumps(value)}')" for name, value in attributes.items())
            statement = FILL.format(
                state=state,
                complete="now()" if state == "COMPLETE" else "null",
                first=1 + first,
                last=first + count,
                names=", ".join(f"'{name}'" for name in NAMES),
                distribution=distribution_to_json(FloatDistribution(0, 1)),
                attributes=rows,
            )
            connection.exec_driver_sql(statement)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("analyze")  # as the server does by itself after some time
    engine.dispose()


def processes() -> dict[int, tuple[int, str, float]]:
    """Return the parent, the name and the CPU seconds of each process, by its id."""
    by_id = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            head, _, rest = (path / "stat").read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        seconds = sum(int(field) for field in fields[11:15]) / TICKS  # with those of children that have ended
        by_id[int(path.name)] = int(fields[1]), head.partition("(")[2], seconds
    return by_id


def cpu_s(root: int) -> float:
    """Return the CPU seconds of a process and of its descendants."""
    known = processes()
    inside, total = {root}, 0.0
    for number in sorted(known):
        if number == root or known[number][0] in inside:
            inside.add(number)
            total += known[number][2]
    return total


def measured(run: Callable[[], object], count: int, roots: dict[str, int]) -> dict[str, float]:
    """Return the seconds of one call: median wall time, CPU time of this process and of the process trees `roots`."""
    before = {name: cpu_s(root) for name, root in roots.items()}
    cpu_began, walls = time.process_time(), []
    for _ in range(count):
        began = time.perf_counter()
        run()
        walls.append(time.perf_counter() - began)
    worker = (time.process_time() - cpu_began) / count
    others = {f"{name} CPU s": round((cpu_s(root) - before[name]) / count, 5) for name, root in roots.items()}
    return {"s": round(statistics.median(walls), 5), "worker CPU s": round(worker, 5), **others}


def storage(name: str, finished: int, running: int) -> dict[str, Any]:
    """Return the costs of the operations of a worker."""
    with scale.serving(name) as (location, server):
        assert server is not None
        url = f"postgresql+psycopg://searcher@localhost:{server.port}/" + database(server)
        first = RandomStudy(SPACE, GOALS, "costs", {}, 0, location)
        first.close()
        fill(url, finished, running)
        roots = {"database": int((server.folder / "data" / "postmaster.pid").read_text().split()[0])}
        proxies = [number for number in processes() if "search-proxy" in command_of(number)]
        if name == "proxy":
            roots["proxy"] = max(proxies)
        costs = {}
        joined: list[SearchStudy] = []

        def join() -> None:
            joined.append(RandomStudy(SPACE, GOALS, "costs", {}, 0, location))
            joined[-1].records()

        costs["join"] = measured(join, 2, roots)
        study = joined.pop()
        joined.pop().close()

        study.look()
        costs["look"] = measured(study.look, REPEATED, roots)
        trials: list[Any] = []
        costs["ask"] = measured(lambda: trials.append(study.ask()[0]), REPEATED, roots)
        numbers = iter(range(10**6))
        costs["renew"] = measured(
            lambda: study._study._storage.set_trial_user_attr(trials[0]._trial_id, leases.LEASE, next(numbers)),
            REPEATED,
            roots,
        )

        def tell() -> None:
            trial = trials.pop()
            values = {"accuracy": 0.5, "latency_ms": 1.0}
            study.tell(trial, TrialRecord(trial.number, "complete", values=values))

        costs["tell"] = measured(tell, REPEATED, roots)
        study.close()
        return {"storage": name, "finished": finished, "running": running, **costs}


def database(server: Any) -> str:
    """Return the name of the newest database of a study on a server."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(f"postgresql+psycopg://searcher@localhost:{server.port}/postgres")
    with engine.connect() as connection:
        names = [str(row[0]) for row in connection.exec_driver_sql("select datname from pg_database")]
    engine.dispose()
    return max(name for name in names if name.startswith("search_"))


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def sampler(finished: int) -> dict[str, Any]:
    """Return the CPU seconds of the choice of a trial."""
    import optuna
    from compress.pipeline.search.sampler import FrontSampler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["maximize", "minimize"])
    chance = optuna.samplers.RandomSampler(seed=1)._rng.rng
    uniform: optuna.distributions.BaseDistribution = optuna.distributions.FloatDistribution(0, 1)
    distributions = dict.fromkeys(NAMES, uniform)
    for _ in range(finished):
        point = {name: float(chance.random()) for name in NAMES}
        accuracy = 1 - sum((value - 0.6) ** 2 for value in point.values()) + 0.01 * chance.normal()
        values = [accuracy, point[NAMES[0]] + 0.3 * point[NAMES[1]]]
        study.add_trial(optuna.trial.create_trial(params=point, distributions=distributions, values=values))
    seconds = []
    for seed in range(3):
        study.sampler = FrontSampler(SPACE, seed)
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about fits of few trials
            trial = study.ask()
            for name in NAMES:
                trial.suggest_float(name, 0, 1)
        seconds.append(time.process_time() - began)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return {"finished": finished, "CPU s": round(statistics.median(seconds), 3)}


def store() -> list[dict[str, Any]]:
    """Return the seconds to publish and to find artifacts."""
    rows = []
    with s3.serving() as server:
        os.environ.update(server.environment)
        for megabytes in (1, 30):
            for kind in ("folder", "bucket"):
                published, fetched = zip(
                    *(published_and_found(kind, megabytes, turn) for turn in range(5)), strict=True
                )
                rows.append({
                    "store": kind,
                    "MB": megabytes,
                    "publish, s": round(statistics.median(published), 3),
                    "find on another machine, s": round(statistics.median(fetched), 3),
                })  # fmt: skip
    return rows


def published_and_found(kind: str, megabytes: int, turn: int) -> tuple[float, float]:
    """Return the seconds to publish an artifact with one file, and to find it on another machine."""
    key, content, silent = f"{turn:064d}", os.urandom(megabytes * 10**6), SilentProgress()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:

        def machine(name: str) -> Store:
            if kind == "folder":
                return Store(Path(folder))
            bucket = Bucket(f"s3://{s3.BUCKET}/{megabytes}-{turn}")
            return SharedStore(Path(folder) / name, BucketConnection(bucket))

        first, second = machine("a"), machine("b")
        for machine_store in (first, second):
            machine_store.prepare()
        with first.scratch() as work:
            (work / "model.tflite").write_bytes(content)
            began = time.perf_counter()
            artifact = first.publish(key, Kind.TFLITE, work, {}, 1.0)
        first.share(key, artifact, silent, replace=True)
        published = time.perf_counter()
        fetched = second.find(key) or second.fetch(key, silent)
        assert fetched is not None
        return published - began, time.perf_counter() - published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    leases.EXPIRY_S = 1e9  # the running trials have no process
    search_storage.PROXY_S = 300.0

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[part] = rows
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)

    if "store" in options.parts:
        keep("store", store())
    rows: list[dict[str, Any]] = []
    for name in ("postgresql", "proxy") if "storage" in options.parts else ():
        for finished, running in STUDIES:
            rows.append(storage(name, finished, running))
            keep("storage", rows)
    sampled: list[dict[str, Any]] = []
    for finished in SAMPLED if "sampler" in options.parts else ():
        sampled.append(sampler(finished))
        keep("sampler", sampled)


if __name__ == "__main__":
    main()
