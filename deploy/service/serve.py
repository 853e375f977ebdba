"""The command `serve`: it opens the sockets, reads the token, handles signals, and notifies systemd."""

from __future__ import annotations

import argparse
import contextlib
import grp
import ipaddress
import os
import pwd
import shlex
import signal
import socket
import stat
import sys
from typing import Any, Dict, List, Optional, Tuple

from deploy.contract import bundle, trust
from deploy.contract.errors import ArgumentError, EdgeTpuError, RuntimeLibraryError, address_error
from deploy.service.admission import ServiceLimits, host_name

MIN_TOKEN = 16
"""Chosen: even 16 hexadecimal digits are 64 bits, too many to guess by requests."""
MAX_RATE = 1_000_000
"""Chosen, to refuse typing errors: no model answers as often."""
BACKLOG = 128
SWITCH_S = 0.0005
"""The interval after which another thread must release Python's lock when the model returns. Python's default, 5 ms, is
as long as an inference."""
UNIT = """\
# systemd unit for a Coralline bundle, written by: runner.pyz serve BUNDLE --print-unit
# Copy it to /etc/systemd/system/coralline.service, then run: systemctl enable --now coralline
[Unit]
Description=Coralline: %(bundle)s
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
ExecStart=%(command)s
Restart=on-failure
RestartSec=2
WatchdogSec=30
TimeoutStartSec=180
TimeoutStopSec=45
User=%(user)s
%(groups)s%(runtime)sNoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
DevicePolicy=closed
DeviceAllow=char-usb_device rw
DeviceAllow=char-apex rw
Environment=PYTHONUNBUFFERED=1

[Install]
WantedBy=multi-user.target
"""


def serve(arguments: argparse.Namespace) -> Tuple[Dict[str, Any], str]:
    """Serve a bundle until a signal arrives; return a summary of the requests.

    Raises:
        ArgumentError: the address or the token is invalid.
        BundleError, DeviceError: see `Model`.
        OSError: a socket cannot be opened.
    """
    if arguments.print_unit:
        text = unit(arguments)
        return {"unit": text}, text.rstrip("\n")
    server_class = _server_class()
    from deploy.learn import command as learn_command
    from deploy.runner.model import load_safely
    from deploy.runner.runtime import RuntimeOptions

    addresses = _addresses(arguments)
    if arguments.queue < 1:
        raise ArgumentError("--queue is %d, and must be at least 1" % arguments.queue, "use --queue 1 or more")
    if not 0 <= arguments.rate <= MAX_RATE:  # also False for NaN
        raise ArgumentError("--rate is %g, and must be from 0 to %d" % (arguments.rate, MAX_RATE), "use --rate 10")
    settings = ServiceLimits(
        queue=arguments.queue,
        token=_token(arguments.token_file, addresses),
        hosts=tuple(_host_name(name) for name in ["localhost"] + arguments.allow_host),
        origins=tuple(_origin(origin) for origin in arguments.allow_origin),
        rate=arguments.rate,
    )
    sockets = [_socket(family, address) for family, address in addresses]
    try:
        opened = bundle.read(arguments.bundle, trust.find(arguments.trust_folder))
        options = RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)
        model = load_safely(opened, arguments.role, options)
        if model.remark:
            print("runner: %s" % model.remark, file=sys.stderr)
        recognizer = learn_command.use(model, arguments, lambda text: print("runner: %s" % text, file=sys.stderr))
        server = server_class(model, _facts(model, recognizer), sockets, settings, _notify_watchdog)
        for sock in sockets:
            print("runner: listening on %s" % _url(sock), file=sys.stderr, flush=True)
        _notify("READY=1")
        _run_until_signal(server)
        if not server.ended:  # `model.close` would wait for the inference
            hint = "unplug the Edge TPU and plug it in again (on a board: sudo reboot)"
            raise EdgeTpuError("the last inference did not return", hint, "hang")
        model.close()
    finally:
        for family, address in addresses:
            if family == socket.AF_UNIX and os.path.exists(address):
                os.unlink(address)
    result = server.metrics.summary()
    total = sum(row["count"] for row in result["requests"])
    return result, "%d requests answered, %d clients disconnected before their answer" % (total, result["vanished"])


def _server_class() -> Any:
    """Return `app.Server`.

    Raises:
        RuntimeLibraryError: Python is too old, or waitress or prometheus_client is not installed.
    """
    try:
        from deploy.service.app import Server
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("waitress", "prometheus_client"):
            raise
        what = "serve needs Python 3.9 or newer with waitress and prometheus_client; this is Python %d.%d without %s"
        hint = "python3 -m pip install 'waitress>=3.0.1,<4' 'prometheus_client>=0.20'"
        raise RuntimeLibraryError(what % (*sys.version_info[:2], error.name), hint, "no_waitress")
    return Server


def _run_until_signal(server: Any) -> None:
    """Run the server. The first SIGTERM or SIGINT finishes the waiting requests, the second one ends it at once."""

    def stop(number: int, frame: Any) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.default_int_handler)
        _notify("STOPPING=1")
        server.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        server.run()
    finally:
        sys.setswitchinterval(interval)
        for number, handler in before.items():
            signal.signal(number, handler)


def _facts(model: Any, recognizer: Any = None) -> Dict[str, Any]:
    """Return the answer to /v1/model: the manifest without its file tables, and the model in use."""
    manifest = model.bundle.manifest
    entry = model.bundle.models[model.role]
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    facts = {
        "schema_version": 1,
        "name": manifest["name"],
        "coralline": manifest["coralline"],
        "sha256": digests[entry.file],
        "task": model.bundle.task,
        "answers": model.bundle.answers if recognizer is None else "class",
        "labels": list(manifest["labels"]) if recognizer is None else recognizer.labels,
        "preprocessing": manifest["preprocessing"],
        "sample_rate": model.bundle.decoding.sound_rate,
        "decoding": dict(model.bundle.decoding._asdict()),
        "inputs": [tensor.to_json() for tensor in entry.inputs],
        "outputs": [tensor.to_json() for tensor in entry.outputs],
    }
    facts.update(model.describe())
    return facts


# --- who may use it -------------------------------------------------------------------


def _host_name(text: str) -> str:
    name = host_name(text)
    if name is None or name != text.lower():
        raise ArgumentError("--allow-host %s is not a host name" % text[:100], "write it without http:// and port")
    return name


def _origin(text: str) -> str:
    scheme, separator, host = text.lower().partition("://")
    if scheme not in ("http", "https") or not separator or host_name(host) is None:
        what = "--allow-origin %s is not the origin of a page" % text[:100]
        raise ArgumentError(what, "write it as https://shop.example or http://127.0.0.1:8000, without a path")
    return text.lower()


# --- sockets --------------------------------------------------------------------------


def _addresses(arguments: argparse.Namespace) -> List[Tuple[int, Any]]:
    """Return family and address of each socket."""
    addresses: List[Tuple[int, Any]] = []
    if arguments.unix:
        addresses.append((socket.AF_UNIX, os.path.abspath(arguments.unix)))
    if not arguments.unix or arguments.port is not None:
        port = 8080 if arguments.port is None else arguments.port
        if not 0 <= port < 65536:
            raise ArgumentError("--port is %d, and must be from 0 to 65535" % port, "use --port 8080")
        try:
            rows = socket.getaddrinfo(arguments.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            reason = error.strerror or "unknown"
            raise ArgumentError("the host %s cannot be resolved: %s" % (arguments.host, reason), "use --host 127.0.0.1")
        addresses.append((int(rows[0][0]), rows[0][4]))
    return addresses


def _socket(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _remove_stale_socket(address)
            mask = os.umask(0o117)  # so that `bind` creates the file with mode 0660
            try:
                sock.bind(address)
            finally:
                os.umask(mask)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise address_error(error, address, family == socket.AF_UNIX)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale_socket(path: str) -> None:
    """Remove the Unix socket of a process that has ended.

    Raises:
        ArgumentError: the path is not a socket, or a process listens on it.
    """
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ArgumentError("%s exists and is not a socket" % path, "use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise ArgumentError("another process listens on %s" % path, "use another path")


def _url(sock: socket.socket) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return "unix:%s" % name
    return "http://%s:%d" % ("[%s]" % name[0] if ":" in name[0] else name[0], name[1])


def _token(path: Optional[str], addresses: List[Tuple[int, Any]]) -> str:
    """Return the token in a file; an empty string without a file.

    Raises:
        ArgumentError: other users can read the file, the token is invalid, or the address needs a token.
        OSError: the file cannot be read.
    """
    generate = "python3 -c 'import secrets; print(secrets.token_hex(32))' > %s"
    if path is None:
        for family, address in addresses:
            host = str(address[0]).partition("%")[0]
            if family != socket.AF_UNIX and not ipaddress.ip_address(host).is_loopback:
                hint = "(umask 077; %s), and --token-file token" % (generate % "token")
                raise ArgumentError("other hosts can reach %s, so a token is required" % address[0], hint)
        return ""
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_mode & 0o077:
            raise ArgumentError("other users can read %s" % path, "chmod 600 %s" % shlex.quote(path))
        token = stream.read(4096).strip()
    if len(token) < MIN_TOKEN or not all(33 <= byte < 127 for byte in token):
        what = "%s must contain a token of at least %d printable ASCII characters" % (path, MIN_TOKEN)
        raise ArgumentError(what, generate % shlex.quote(path))
    return token.decode()


# --- systemd --------------------------------------------------------------------------


def _notify_watchdog(healthy: bool) -> None:
    if healthy:
        _notify("WATCHDOG=1")


def _notify(text: str) -> None:
    """Send a state to systemd if systemd started this process with `Type=notify` (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    # an OSError means that systemd does not listen any more, or that no file descriptor is free
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)
        sock.sendto(text.encode(), address)


def unit(arguments: argparse.Namespace) -> str:
    """Return a systemd unit that runs this command as this user."""
    program = os.path.abspath(sys.argv[0])
    start = [program] if program.endswith(".pyz") else ["-m", "deploy"]
    command = [sys.executable] + start + ["serve", os.path.abspath(arguments.bundle)]
    command += _unit_options(arguments)
    groups = [name for name in ("plugdev", "apex") if _has_group(name)]
    folder = os.path.dirname(os.path.abspath(arguments.unix or "/"))
    in_run = folder.startswith("/run/") and "/" not in folder[5:]
    return UNIT % {
        "bundle": os.path.basename(arguments.bundle),
        "command": " ".join(_quoted(part) for part in command),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "groups": "SupplementaryGroups=%s\n" % " ".join(groups) if groups else "",
        "runtime": "RuntimeDirectory=%s\n" % folder[5:] if in_run else "",
    }


def _unit_options(arguments: argparse.Namespace) -> List[str]:
    options: List[str] = []
    for name in ("role", "device", "threads", "library", "host", "port", "queue"):
        value = getattr(arguments, name)
        if value not in (None, ""):
            options += ["--" + name, str(value)]
    if arguments.rate:
        options += ["--rate", str(arguments.rate)]
    for name in ("allow_host", "allow_origin"):
        for value in getattr(arguments, name):
            options += ["--" + name.replace("_", "-"), value]
    for name in ("unix", "token_file", "learnt", "trust_folder"):
        value = getattr(arguments, name)
        if value:
            options += ["--" + name.replace("_", "-"), os.path.abspath(value)]
    for name in ("no_learnt", "confidence"):
        if getattr(arguments, name):
            options.append("--" + name.replace("_", "-"))
    return options


def _quoted(part: str) -> str:
    """Quote one word of ExecStart, so that systemd expands no specifier or variable in it (systemd.service(5))."""
    escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped == part and not set(part) & set(" \t'") else '"%s"' % escaped


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
