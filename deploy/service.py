"""What is around the service: sockets, the token, signals, systemd, and the verb `serve` itself.

Runs on Python 3.7 with numpy and a TFLite runtime.
"""

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

from deploy.admission import ServiceLimits
from deploy.contract import bundle, signature
from deploy.contract.errors import ArgumentError, EdgeTpuError
from deploy.serve import Server

MIN_TOKEN = 16
BACKLOG = 128
SWITCH_S = 0.0005
"""How long another thread may keep Python's lock when the model comes back; by default it is 5 ms, the time of an
inference."""
UNIT = """\
# systemd unit for a Coralline bundle, made by: runner.pyz serve BUNDLE --print-unit
# Put it into /etc/systemd/system/coralline.service, then: systemctl enable --now coralline
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


def verb(arguments: argparse.Namespace) -> Tuple[Dict[str, Any], str]:
    """Serves a bundle until a signal comes; then what was answered.

    Raises:
        ArgumentError: the address or the token cannot be used.
        BundleError, DeviceError: see `Model`.
        OSError: the socket cannot be made.
    """
    if arguments.print_unit:
        text = unit(arguments)
        return {"unit": text}, text.rstrip("\n")
    from deploy.model import tried
    from deploy.runtime import RuntimeOptions

    addresses = _addresses(arguments)
    settings = ServiceLimits(queue=arguments.queue, token=_token(arguments.token_file, addresses))
    if arguments.queue < 1:
        raise ArgumentError("--queue %d holds nothing" % arguments.queue, "use --queue 1 or more")
    sockets = [_socket(family, address) for family, address in addresses]
    try:
        opened = bundle.read(arguments.bundle, signature.trusted(arguments.key))
        options = RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)
        model = tried(opened, arguments.role, options)
        if model.remark:
            print("runner: %s" % model.remark, file=sys.stderr)
        server = Server(model, _facts(model), sockets, settings, _told_systemd)
        for each in sockets:
            print("runner: listening on %s" % _shown(each), file=sys.stderr, flush=True)
        _notify("READY=1")
        _until_signal(server)
        if not server.ended:  # closing the model would wait for it
            todo = "unplug the Edge TPU and plug it in again (on a board: sudo reboot)"
            raise EdgeTpuError("the last inference never came back", todo, "hang")
        model.close()
    finally:
        for family, address in addresses:
            if family == socket.AF_UNIX and os.path.exists(address):
                os.unlink(address)
    result = server.figures.summary()
    total = int(server.figures.requests.total())
    return result, "%d requests answered, %d clients vanished" % (total, result["vanished"])


def _until_signal(server: Server) -> None:
    """Runs it; the first SIGTERM or SIGINT ends it gently, the second at once."""

    def stop(number: int, frame: Any) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.default_int_handler)
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


def _facts(model: Any) -> Dict[str, Any]:
    """The answer to /v1/model: what the manifest tells, without its tables of files."""
    manifest = model.bundle.manifest
    entry = manifest["models"][model.role]
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    signer = model.bundle.signer
    told = {
        "schema_version": 1,
        "name": manifest["name"],
        "coralline": manifest["coralline"],
        "sha256": digests[entry["file"]],
        "signed_by": None if signer is None else signature.key_name(signer),
        "labels": list(manifest["labels"]),
        "preprocessing": manifest["preprocessing"],
        "sample_rate": model.bundle.decoding.sound_rate,
        "decoding": dict(model.bundle.decoding._asdict()),
        "input": entry["input"],
        "output": entry["output"],
    }
    told.update(model.describe())
    return told


# --- sockets --------------------------------------------------------------------------


def _addresses(arguments: argparse.Namespace) -> List[Tuple[int, Any]]:
    """Family and address of each socket."""
    found: List[Tuple[int, Any]] = []
    if arguments.unix:
        found.append((socket.AF_UNIX, os.path.abspath(arguments.unix)))
    if not arguments.unix or arguments.port is not None:
        port = 8080 if arguments.port is None else arguments.port
        if not 0 <= port < 65536:
            raise ArgumentError("there is no port %d" % port, "use 1 to 65535")
        try:
            rows = socket.getaddrinfo(arguments.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ArgumentError("the host %s is not known: %s" % (arguments.host, error), "use --host 127.0.0.1")
        found.append((int(rows[0][0]), rows[0][4]))
    return found


def _local(family: int, address: Any) -> bool:
    return family == socket.AF_UNIX or ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


def _socket(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _free(address)
            mask = os.umask(0o117)  # 0660 from the first moment on
            try:
                made.bind(address)
            finally:
                os.umask(mask)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _free(path: str) -> None:
    """Removes a socket that a dead process left.

    Raises:
        ArgumentError: something else is there, or somebody listens.
    """
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ArgumentError("%s is there and no socket" % path, "use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise ArgumentError("somebody listens on %s already" % path, "use another path")


def _shown(sock: socket.socket) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return "unix:%s" % name
    return "http://%s:%d" % ("[%s]" % name[0] if ":" in name[0] else name[0], name[1])


def _token(path: Optional[str], addresses: List[Tuple[int, Any]]) -> str:
    """The token of a file; empty without one.

    Raises:
        ArgumentError: it can be read by others, is too short, or one is needed and there is none.
        OSError: it cannot be read.
    """
    if path is None:
        for family, address in addresses:
            if not _local(family, address):
                make = "python3 -c 'import secrets; print(secrets.token_hex(32))' > token"
                todo = "(umask 077; %s), and --token-file token" % make
                raise ArgumentError("%s is reached from other hosts, and needs a token" % address[0], todo)
        return ""
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_mode & 0o077:
            raise ArgumentError("%s can be read by others" % path, "chmod 600 %s" % shlex.quote(path))
        token = stream.read(4096).strip()
    if len(token) < MIN_TOKEN or not all(33 <= byte < 127 for byte in token):
        todo = "python3 -c 'import secrets; print(secrets.token_hex(32))' > %s" % shlex.quote(path)
        raise ArgumentError("%s holds no token of %d or more plain characters" % (path, MIN_TOKEN), todo)
    return token.decode()


# --- systemd --------------------------------------------------------------------------


def _told_systemd(healthy: bool) -> None:
    if healthy:
        _notify("WATCHDOG=1")


def _notify(text: str) -> None:
    """Send a state to systemd if it started this process as `Type=notify` (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    # an OSError: systemd does not listen any more, or no file descriptor is free
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)
        sock.sendto(text.encode(), address)


def unit(arguments: argparse.Namespace) -> str:
    """A systemd unit that runs this command as this user."""
    program = os.path.abspath(sys.argv[0])
    start = [program] if program.endswith(".pyz") else ["-m", "deploy"]
    command = [sys.executable] + start + ["serve", os.path.abspath(arguments.bundle)]
    for name in ("role", "device", "threads", "library", "host", "port", "queue"):
        value = getattr(arguments, name)
        if value not in (None, ""):
            command += ["--" + name, str(value)]
    for name in ("unix", "token_file"):
        value = getattr(arguments, name)
        if value:
            command += ["--" + name.replace("_", "-"), os.path.abspath(value)]
    present = [name for name in ("plugdev", "apex") if _has_group(name)]
    runtime = os.path.dirname(os.path.abspath(arguments.unix or "/"))
    inside = runtime.startswith("/run/") and "/" not in runtime[5:]
    return UNIT % {
        "bundle": os.path.basename(arguments.bundle),
        "command": " ".join(_quoted(part) for part in command),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "groups": "SupplementaryGroups=%s\n" % " ".join(present) if present else "",
        "runtime": "RuntimeDirectory=%s\n" % runtime[5:] if inside else "",
    }


def _quoted(part: str) -> str:
    """One word of ExecStart (systemd.service(5)): specifiers and variables are kept from it."""
    escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped == part and not set(part) & set(" \t'") else '"%s"' % escaped


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
