"""TLS through a proxy, as docs/device.md describes it: nginx with the configuration of that page."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from serving import BODY, Service, Slow, serving

from deploy.contract import bundle

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
OPENSSL = shutil.which("openssl")
TOKEN = "t" * 32

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light"),
    pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificate"),
]


def configuration(folder: Path, port: int, service_port: int) -> Path:
    """Write the configuration of the manual with the paths and ports of this test."""
    page = (ROOT / "docs" / "device.md").read_text()
    match = re.search(r"```nginx\n(.*?)```", page, re.DOTALL)
    assert match is not None
    server = match.group(1)
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("http://127.0.0.1:8080", f"http://127.0.0.1:{service_port}"),
        ("/etc/ssl/board.pem", str(folder / "board.pem")),
        ("/etc/ssl/board.key", str(folder / "board.key")),
    ):
        assert server.count(old) == 1, old
        server = server.replace(old, new)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    path = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # the workers write to the folder of the test
    start = f"{user} pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
    path.write_text(f"{start}http {{ access_log off;\n{temporary}{server}}}\n")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def proxied(folder: Path, service: Service) -> Iterator[http.client.HTTPSConnection]:
    """Run nginx in front of a service, and connect to it."""
    command = [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=board.example"]
    files = ["-keyout", "board.key", "-out", "board.pem", "-addext", "subjectAltName=DNS:board.example,IP:127.0.0.1"]
    subprocess.run([*command, *files], cwd=folder, check=True, capture_output=True)
    port = free_port()
    path = configuration(folder, port, service.port)
    proxy = subprocess.Popen([str(NGINX), "-p", str(folder), "-c", str(path), "-g", "daemon off;"])
    context = ssl.create_default_context(cafile=str(folder / "board.pem"))
    client = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    try:
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                client.connect()
                break
            assert proxy.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.1)
        yield client
    finally:
        client.close()
        proxy.terminate()
        proxy.wait(20)


def test_predictions_through_the_proxy(tmp_path: Path) -> None:
    with serving(Slow(), token=TOKEN) as service, proxied(tmp_path, service) as client:
        headers = {"Authorization": f"Bearer {TOKEN}", "Host": "board.example"}

        def ask(method: str, path: str, body: object = None, **more: str) -> tuple[int, dict[str, str], bytes]:
            client.request(method, path, body, {**headers, **more})  # type: ignore[arg-type]
            answer = client.getresponse()
            return answer.status, dict(answer.headers), answer.read()

        status, answered, content = ask("POST", "/v1/predict?top=1", BODY, **{"X-Request-Id": "mine-1"})
        assert (status, json.loads(content)["top"][0]["label"]) == (200, "0")
        assert answered["X-Request-Id"] == "mine-1"
        large = bundle.array_bytes(np.full((4000, 4000), 7, np.uint8))  # 16 MB, nearly the largest body
        assert json.loads(ask("POST", "/v1/predict", large)[2])["top"][0]["label"] == "7"
        chunks = iter([BODY[:50], BODY[50:]])  # the proxy receives the whole body, and sends Content-Length
        assert ask("POST", "/v1/predict", chunks)[0] == 200
        assert ask("POST", "/v1/predict", bytes(17 << 20))[0] == 413
        client.close()
        assert ask("GET", "/healthz")[0] == 200
        assert ask("GET", "/v1/model", Origin="https://attacker.example")[0] == 403
        client.close()
        assert ask("GET", "/v1/model", Origin="https://board.example")[0] == 200
        headers["Authorization"] = "Bearer wrong"
        assert ask("POST", "/v1/predict", BODY)[0] == 401
