"""The service: answers, bugs, limits, disconnected clients, a full queue, a graceful end. The corpus has the rest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import data_files
import devices
import numpy as np
import pytest
from pictures import encoded
from PIL import Image
from serving import BODY, FACTS, Service, Slow, eventually, raw, read, serving

from deploy.contract import bundle
from deploy.contract.decoding import Decoding
from deploy.runner.model import Model
from deploy.service import app, connection, metrics


@pytest.fixture
def slow() -> Iterator[tuple[Service, Slow]]:
    model = Slow()
    with serving(model, queue=2) as service:
        yield service, model


def test_answers_are_those_of_the_model() -> None:
    opened = bundle.Bundle(devices.packed(samples=0))
    with Model(opened, "int8") as model, serving(model) as service:
        for image in devices.images(5, seed=3):
            status, headers, answer = service.ask("POST", "/v1/predict?top=2", bundle.array_bytes(image))
            assert status == 200
            assert [(row["label"], row["score"]) for row in answer["top"]] == model(image).top(2)
            assert answer["request_id"] == headers["X-Request-Id"]
            raw_body = service.ask("POST", "/v1/predict", image.tobytes(), X_Shape="6,5,1", X_Dtype="uint8")
            assert raw_body[2]["top"] == [{"label": name, "score": score} for name, score in model(image).top(3)]
        assert service.ask("GET", "/v1/model")[2] == FACTS
        status, _, answer = service.ask("POST", "/v1/predict", bundle.array_bytes(np.zeros((2, 3, 4, 5, 6), np.uint8)))
        assert status == 400
        assert "preprocess" in answer["error"]["what"]


def test_files_are_decoded_as_the_bundle_says() -> None:
    seen = []

    class Seeing(Slow):
        def prepare(self, image: Any, between: Any = None, most_bytes: int = 0) -> Any:
            seen.append(image)
            return image

    facts = {**FACTS, "decoding": dict(Decoding(1, "first", 8000)._asdict())}
    with serving(Seeing(), facts) as service:
        for form in ("BMP", "WEBP"):
            options = {"lossless": True} if form == "WEBP" else {}
            content = encoded(Image.new("RGB", (5, 6), (10, 20, 30)), form, **options)
            assert service.ask("POST", "/v1/predict", content)[0] == 200
        assert [(image.shape, int(image.max())) for image in seen] == [((6, 5, 1), 18)] * 2
        sound = data_files.riff(
            data_files.form(channels=2), data_files.chunk(b"data", np.array([[16384, 0]], "<i2").tobytes())
        )
        assert service.ask("POST", "/v1/predict", sound)[0] == 200
        assert seen[-1].tolist() == [0.5]


def test_paths_methods_and_parameters(slow: tuple[Service, Slow]) -> None:
    service, _ = slow
    assert service.ask("GET", "/")[0] == 404
    assert service.ask("GET", "/v1/predict")[:2][0] == 405
    assert service.ask("GET", "/v1/predict")[1]["Allow"] == "POST"
    assert service.ask("POST", "/healthz", b"x")[0] == 405
    status, _, content = service.ask("POST", "/v1/predict?top=1001", BODY)
    assert (status, "1 to 1000" in content["error"]["what"]) == (400, True)
    assert service.ask("POST", "/v1/predict?top=001", BODY)[0] == 200
    assert len(service.ask("POST", "/v1/predict?top=1", BODY)[2]["top"]) == 1
    assert service.ask("POST", "/v1/predict", bytes(16), X_Shape="4,4", X_Dtype="object")[0] == 400
    assert service.ask("GET", "/healthz", X_Request_Id="mine-1")[1]["X-Request-Id"] == "mine-1"
    assert service.ask("GET", "/healthz", X_Request_Id="not mine")[1]["X-Request-Id"] != "not mine"


class Bug:
    """A method that raises an exception once, when it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.original, self.armed = getattr(owner, name), False
        patch.setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        if self.armed:
            self.armed = False
            raise ZeroDivisionError("a bug")
        return self.original(*arguments)


@pytest.mark.parametrize(
    "method", ["admit", "_content", "_predict", "_prediction", "requested_top", "prepare", "answer"]
)
def test_a_bug_costs_its_request_alone(
    method: str, slow: tuple[Service, Slow], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service, model = slow
    owners = {"requested_top": app, "prepare": model, "answer": model}
    bug = Bug(monkeypatch, owners.get(method, service.server), method)
    open_client = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    open_client.request("GET", "/healthz")
    assert read(open_client.getresponse())[0] == 200
    half = service.connect()
    half.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 4\r\n\r\n12")
    eventually(lambda: service.server.held == 2)
    for count in (1, 2):
        bug.armed = True
        status, _, content = service.predict(1)
        assert status == 500
        assert content["error"]["what"] == "unexpected ZeroDivisionError"
        open_client.request("POST", "/v1/predict", BODY)
        assert read(open_client.getresponse())[2]["top"][0]["label"] == "0"
        assert service.metric("coralline_unexpected_errors_total") == count
    open_client.close()
    half.sendall(b"34")
    assert half.recv(65536).startswith(b"HTTP/1.1 400 ")  # four bytes are not an image
    half.close()
    eventually(lambda: service.metric("coralline_held_bytes") == 0)
    assert capsys.readouterr().err.count("ZeroDivisionError: a bug") == 1


@pytest.mark.parametrize(
    ("owner", "name"), [("RefusedAnswer", "execute"), ("Channel", "received"), ("Channel", "expire")]
)
def test_a_bug_in_a_connection_ends_that_connection_alone(
    owner: str, name: str, slow: tuple[Service, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = slow

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch, service.connect() as sock:
        patch.setattr(getattr(connection, owner), name, broken)
        sock.sendall(b"nonsense\r\n\r\n")
        sock.recv(65536)
    assert service.predict(3)[2]["top"][0]["label"] == "3"
    eventually(lambda: service.metric("coralline_connections") == 1)
    if name != "expire":  # which may not have been called in this time
        assert service.metric("coralline_unexpected_errors_total") >= 1


@pytest.mark.parametrize("name", ["_make_room", "_expire", "_alive"])
def test_a_bug_outside_of_requests_does_not_end_the_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Slow(), timeout_s=1.0, idle_s=1.0) as service:
        bug = Bug(monkeypatch, service.server, name)
        bug.armed = True
        with contextlib.suppress(OSError, http.client.HTTPException), service.connect() as sock:
            sock.sendall(b"GET /healthz HT")
            sock.recv(65536)
        assert service.predict(1)[0] == 200
        eventually(lambda: not bug.armed)
        assert service.predict(3)[2]["top"][0]["label"] == "3"
        eventually(lambda: service.metric("coralline_unexpected_errors_total") == 1)


def test_unexpected_errors_are_logged_without_a_flood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    log = metrics.FailureLog(interval_s=60.0)
    for _ in range(1000):
        add(log, "{}[1]")
    add(log, "1 // 0")  # from another place
    text = capsys.readouterr().err
    assert (text.count("KeyError: 1"), text.count("ZeroDivisionError"), log.count) == (1, 1, 1001)
    assert "more since" not in text
    now = 60.0
    add(log, "{}[1]")
    assert "(999 more since the last report)" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        closed = io.StringIO()
        closed.close()
        patch.setattr("sys.stderr", closed)
        now = 120.0
        add(log, "{}[1]")
    assert log.count == 1003


def add(log: metrics.FailureLog, code: str) -> None:
    try:
        eval(code)
    except (KeyError, ZeroDivisionError) as error:
        log.add(error)


def test_requests_one_after_another_without_waiting(slow: tuple[Service, Slow]) -> None:
    bodies = [bundle.array_bytes(np.full((2, 2), value, np.uint8)) for value in range(5)]
    heads = [b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body) for body in bodies]
    heads[-1] += b"Connection: close\r\n"
    response = raw(slow[0], b"".join(head + b"\r\n" + body for head, body in zip(heads, bodies, strict=True)))
    answers = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in response.split(b"HTTP/1.1 200 OK")[1:]]
    assert [row["top"][0]["label"] for row in answers] == ["0", "1", "2", "3", "4"]


def test_in_pieces_of_one_byte(slow: tuple[Service, Slow]) -> None:
    body = bundle.array_bytes(np.full((2, 2), 7, np.uint8))
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    response = raw(slow[0], *(request[place : place + 1] for place in range(len(request))))
    assert response.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b'"label": "7"' in response


def test_a_full_queue_sends_away_and_keeps_the_connection(slow: tuple[Service, Slow]) -> None:
    service, model = slow
    model.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = []
        for count in range(5):  # one in the model, one prepared, one about to be, two in the queue
            waiting.append(pool.submit(service.predict, count))
            time.sleep(0.1)
        eventually(lambda: service.server.worker.full)
        client = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
        body = bundle.array_bytes(np.full((2, 2), 42, np.uint8))
        client.request("POST", "/v1/predict", body)
        status, headers, answer = read(client.getresponse())
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "queue is full" in answer["error"]["what"]
        assert service.ask("GET", "/readyz")[0] == 200
        model.gate.set()
        assert sorted(future.result()[2]["top"][0]["label"] for future in waiting) == ["0", "1", "2", "3", "4"]
        client.request("POST", "/v1/predict", body)
        assert read(client.getresponse())[2]["top"][0]["label"] == "42"
        client.close()
    assert service.metric('coralline_rejected_total{cause="queue"}') == 1


def test_a_client_that_vanishes_is_not_answered(slow: tuple[Service, Slow]) -> None:
    service, model = slow
    model.gate.clear()
    first = threading.Thread(target=service.predict, args=(1,))
    first.start()
    eventually(lambda: service.server.worker._since is not None)
    body = bundle.array_bytes(np.full((2, 2), 2, np.uint8))
    with service.connect() as sock:
        sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.2)
    with service.connect() as sock:  # and one that disconnects in the middle of its body
        sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        time.sleep(0.2)
    eventually(lambda: service.metric("coralline_vanished_total") == 2)
    assert service.metric("coralline_held_bytes") == len(body)  # of the first one of them
    model.gate.set()
    first.join()
    assert service.predict(3)[2]["top"][0]["label"] == "3"
    assert model.seen == 2


def test_an_answer_that_takes_too_long_is_told() -> None:
    model = Slow()
    model.gate.clear()
    with serving(model, timeout_s=0.3) as service:
        assert service.predict(1)[0] == 504
        model.gate.set()
        assert service.predict(2)[2]["top"][0]["label"] == "2"


def test_connections_and_bytes_are_bounded() -> None:
    with serving(Slow(), connections=2, held_bytes=1000) as service:
        idle = [service.connect(), service.connect()]
        assert service.ask("GET", "/healthz")[0] == 200  # an idle connection was closed for it
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"
        with service.connect() as sock:  # an announced body is not counted; a received one is
            sock.sendall(head + bytes(600))
            eventually(lambda: service.server.held == 600)
            assert service.ask("POST", "/v1/predict", b"x" * 300)[0] == 400
            with service.connect() as other:
                other.sendall(head + bytes(450))
                assert sock.recv(65536).startswith(b"HTTP/1.1 503")  # it had the most bytes
                other.sendall(bytes(450))
                assert other.recv(65536).startswith(b"HTTP/1.1 400")
        assert service.metric('coralline_rejected_total{cause="memory"}') == 1
        for client in idle:
            client.close()


def test_the_token() -> None:
    with serving(Slow(), token="t" * 20) as service:
        for authorization in ("", "Bearer wrong", f"Basic {'t' * 20}", "Bearer " + "t" * 21, "Bearer \xe9"):
            status, headers, _ = service.ask("POST", "/v1/predict", BODY, Authorization=authorization)
            assert (status, headers["Www-Authenticate"]) == (401, "Bearer")
        assert service.ask("GET", "/metrics")[0] == 401
        assert service.ask("GET", "/healthz")[0] == 200
        assert service.ask("POST", "/v1/predict", BODY, Authorization=f"Bearer {'t' * 20}")[0] == 200


def test_a_device_that_fails_is_not_ready(slow: tuple[Service, Slow]) -> None:
    service, _ = slow
    status, _, answer = service.predict(255)
    assert (status, answer["error"]["hint"]) == (500, "plug it in")
    assert service.ask("GET", "/readyz")[0] == 503
    assert service.ask("GET", "/healthz")[0] == 200
    assert service.predict(1)[0] == 200
    assert service.ask("GET", "/readyz")[0] == 200


def test_what_waits_is_finished_and_what_is_new_refused() -> None:
    model = Slow()
    with serving(model, queue=8) as service, concurrent.futures.ThreadPoolExecutor(8) as pool:
        model.gate.clear()
        waiting = [pool.submit(service.predict, value) for value in range(6)]
        eventually(lambda: service.server.worker.waiting >= 3)
        half = service.connect()
        half.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        time.sleep(0.2)
        service.server.stop()
        assert half.recv(65536).startswith(b"HTTP/1.1 503")
        half.close()
        with pytest.raises(OSError, match="refused"):
            service.connect().close()
        model.gate.set()
        labels = sorted(future.result()[2]["top"][0]["label"] for future in waiting)
        assert labels == ["0", "1", "2", "3", "4", "5"]
        service.thread.join(5)
        assert not service.thread.is_alive()


def test_no_answer_is_lost_or_mixed_up() -> None:
    """Some clients are answered, some disconnect, and some send garbage, all at the same time."""
    with serving(Slow(0.0005), queue=64) as service:
        body = {value: bundle.array_bytes(np.full((2, 2), value, np.uint8)) for value in range(250)}

        def client(number: int) -> int:
            random, answered = np.random.default_rng(number), 0
            keeping = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
            for turn in range(40):
                value = int(random.integers(250))
                if turn % 10 == 8:
                    with service.connect() as sock:
                        sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\nabc")
                    continue
                sent = b"garbage" if turn % 10 == 5 else body[value]
                keeping.request("POST", "/v1/predict", sent, {"X-Request-Id": f"{number}-{turn}"})
                status, headers, answer = read(keeping.getresponse())
                assert headers["X-Request-Id"] == f"{number}-{turn}"
                assert status == (400 if turn % 10 == 5 else 200)
                if status == 200:
                    assert answer["top"][0]["label"] == str(value)
                    answered += 1
            keeping.close()
            return answered

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(client, range(16))) == 16 * 32
        eventually(lambda: service.metric("coralline_held_bytes") == 0)
        assert service.metric('coralline_requests_total{code="200",path="/v1/predict"}') == 16 * 32


def test_prometheus_reads_the_metrics(slow: tuple[Service, Slow]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    service, _ = slow
    service.predict(1)
    service.ask("POST", "/v1/predict", b"garbage")
    families = {
        family.name: family for family in parser.text_string_to_metric_families(service.ask("GET", "/metrics")[2])
    }
    assert {"coralline_requests", "coralline_model_seconds", "coralline_queue_length"} <= set(families)
    assert families["coralline_requests"].type == "counter"
    assert {row.labels["code"]: row.value for row in families["coralline_requests"].samples} == {"200": 1, "400": 1}
    histogram = families["coralline_model_seconds"]
    assert histogram.type == "histogram"
    counts = [row.value for row in histogram.samples if row.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == 1
    assert families["coralline_model_info"].samples[0].labels["name"] == "tiny"
