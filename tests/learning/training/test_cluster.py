"""TF_CONFIG, and the wait for all workers, without TensorFlow."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from typing import Any

import pytest
import worker_processes

from compress.core.errors import PipelineError, StageError
from compress.core.execution import Execution
from compress.learning.training import cluster as clusters
from compress.learning.training import strategies
from compress.learning.training.cluster import WorkerCluster, from_environment, wait_for_all

TWO = ("localhost:2222", "[::1]:2223")


def config(cluster: Any = None, task: Any = None) -> dict[str, str]:
    cluster = {"worker": list(TWO)} if cluster is None else cluster
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task or {"type": "worker", "index": 1}})}


def test_tf_config_names_the_workers() -> None:
    cluster = from_environment(config())
    assert (cluster.addresses, cluster.index, cluster.is_chief) == (TWO, 1, False)
    assert cluster.named(0) == "worker 0 (the chief) at localhost:2222"
    assert WorkerCluster(TWO, 0).digest == cluster.digest != WorkerCluster(TWO[::-1], 1).digest
    chief = from_environment(
        config({"worker": ["10.0.0.1:1", "host-a.my_net.example.:1"]}, {"type": "worker", "index": 0, "trial": "3"})
    )
    assert chief.is_chief


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "TF_CONFIG: strategy: multi_worker needs the addresses of all workers"),
        ({"TF_CONFIG": " "}, "the environment variable is not set"),
        ({"TF_CONFIG": "{"}, "it is not JSON"),
        ({"TF_CONFIG": "[" * 100_000}, "it is not JSON"),
        ({"TF_CONFIG": " 1" * clusters.LARGEST}, "it has 2,097,152 characters"),
        ({"TF_CONFIG": "[]"}, "the map 'cluster' is missing"),
        ({"TF_CONFIG": '{"cluster": {"worker": []}}'}, "the map 'task' is missing"),
        (config({"chief": ["a:1"], "worker": ["b:1"]}), r'cluster has the roles \["chief", "worker"\]'),
        (config({"worker": []}), r"cluster.worker is \[\]; allowed: a list of 2 to 1024"),
        (
            config({"worker": ["a:1"]}),
            r"allowed: a list of 2 to 1024 addresses; `strategy: one` or `mirrored` continues",
        ),
        (config({"worker": "a:1"}), 'cluster.worker is "a:1"'),
        (config({"worker": ["a:1", 7]}), "cluster.worker has 7"),
        (config({"worker": ["a:1", "a"]}), 'cluster.worker has "a"; allowed: host:port'),
        (config({"worker": ["b:1", "a:0"]}), 'cluster.worker has "a:0"'),
        (config({"worker": ["b:1", "a:65536"]}), 'cluster.worker has "a:65536"'),
        (config({"worker": ["b:1", "-a:1"]}), 'cluster.worker has "-a:1"'),
        (config({"worker": ["b:1", "a\n:1"]}), r"cluster.worker has .a\\n:1"),
        (config({"worker": ["b:1", "x" * 64 + ":1"]}), r"cluster.worker has .x+\.\.\."),
        (config({"worker": ["b:1", "a..b:1"]}), 'cluster.worker has "a..b:1"'),
        (config({"worker": ["a:1", "b:1", "a:1"]}), "cluster.worker has a:1 twice"),
        (config(task={"type": "chief", "index": 0}), 'task.type is "chief"; allowed: worker'),
        (config(task={"type": "worker", "index": 2}), "task.index is 2; allowed: 0 to 1"),
        (config(task={"type": "worker", "index": True}), "task.index is true"),
        (config(task={"type": "worker", "index": -1}), "task.index is -1"),
        (config(task={"type": "worker"}), "task.index is null"),
    ],
)
def test_an_invalid_tf_config_is_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        from_environment(environment)


def test_other_strategies_do_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert strategies.workers(Execution(strategy="mirrored")) is None
    with pytest.raises(PipelineError, match="it is not JSON"):
        strategies.workers(Execution(strategy="multi_worker"))


def test_workers_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "PROBE_S", 0.05)
    addresses = tuple(f"localhost:{port}" for port in worker_processes.free_ports(3))
    lines: list[str] = []
    threads = [
        threading.Thread(target=wait_for_all, args=(WorkerCluster(addresses, index), lines.append))
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    with closing(socket.create_server(("", int(addresses[2].rpartition(":")[2])))):  # TensorFlow's server runs already
        for thread in threads:
            # The first worker that has met all others frees its port; TensorFlow's server then answers the others.
            thread.join(1)
        servers = [
            socket.create_server(("", int(address.rpartition(":")[2])))
            for address, thread in zip(addresses, threads, strict=False)
            if not thread.is_alive()
        ]
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        for server in servers:
            server.close()


def test_a_worker_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "PROBE_S", 0.01)
    addresses = tuple(f"localhost:{port}" for port in worker_processes.free_ports(2))
    lines: list[str] = []
    with pytest.raises(StageError, match=f"worker 1 at {addresses[1]} did not start within 0 s") as caught:
        wait_for_all(WorkerCluster(addresses, 0), lines.append, 0.05)
    assert lines == [f"waiting for worker 1 at {addresses[1]}"]
    assert "firewalls" in caught.value.hint
    assert WorkerCluster(addresses, 0).unreachable() == [1]


def test_a_port_in_use_is_an_error() -> None:
    with closing(socket.create_server(("", 0))) as server:
        port = server.getsockname()[1]
        with pytest.raises(StageError, match=rf"the port of worker 0 \(the chief\) at localhost:{port} is in use"):
            wait_for_all(WorkerCluster((f"localhost:{port}",), 0), print)
