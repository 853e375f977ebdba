"""The storage of the trials: a journal file, a database, or Optuna's gRPC proxy in front of one.

A database that is restarted, or a network that is away for a while, does not end a search: calls are repeated for
RETRY_S seconds.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from compress.core.errors import PipelineError, StoreError
from compress.core.files import explain

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

JOURNAL = "journal.log"
DAMAGED = (LookupError, ValueError, TypeError, AttributeError, AssertionError, RecursionError)
"""Errors of Optuna for lines of a journal that it has not written."""
RETRY_S = 300.0
"""Seconds for which a call is repeated if the storage is away."""
QUIET_S = 3.0
"""Seconds after which the user learns that it is away."""
LONGEST_PAUSE_S = 5.0
PROXY_S = 20.0
"""Seconds to wait for a proxy at the start."""
AWAY = (
    *("OperationalError", "InterfaceError", "DisconnectionError", "TimeoutError", "InternalError"),
    "PendingRollbackError",  # the connection was lost in the middle of a transaction
)
"""Errors of SQLAlchemy that mean that the database cannot be reached now."""
OPENINGS = 10
"""Times that a database is opened: processes that create its tables at the same time make each other fail."""
Show = Callable[[str], None]
"""Shows one line to the user."""
ALLOWED = "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, sqlite:///FILE, grpc://HOST:PORT"


def opened(location: str | Path, show: Show = lambda text: None) -> BaseStorage:
    """Return a storage.

    Args:
        location: the URL of a database or of a proxy, or the folder for a journal file.
        show: shows one line, when the storage is away.

    Raises:
        StoreError: the journal is damaged or cannot be written.
        PipelineError: the URL is invalid, a driver is not installed, or the database cannot be reached.
    """
    if isinstance(location, Path):
        return _journal_in(location)
    if urlsplit(location).netloc.count("@") > 1:
        hint = "write %40 for an @ in a user name or a password"
        raise PipelineError("the URL has more than one @", where="--storage", allowed=ALLOWED, hint=hint)
    try:
        if location.startswith("grpc://"):
            return retrying(_proxy(location), show)
        return retrying(_database(location), show)
    except ImportError as error:
        what = f"the storage needs a driver: {error}"
        hint = "pip install 'psycopg[binary]~=3.2'" if location.startswith("postgresql") else ""
        raise PipelineError(what, where="--storage", allowed=ALLOWED, hint=hint) from error
    except Exception as error:
        is_known = isinstance(error, OSError | ValueError | RuntimeError)  # RuntimeError: tables of another version
        if not is_known and not type(error).__module__.startswith(("sqlalchemy", "optuna", "grpc")):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PipelineError(f"the storage cannot be used: {first}", where="--storage", allowed=ALLOWED) from error


def serve(storage: BaseStorage, host: str, port: int, show: Show) -> None:
    """Serve a database to many processes, until it is interrupted. The connections are not encrypted.

    Args:
        storage: the database.
        host: the address to listen on.
        port: the port.
        show: shows one line, once the port is free.

    Raises:
        PipelineError: the port is in use, or the address is not one of this machine.
    """
    import optuna

    try:
        _require_free(host, port)
    except OSError as error:
        what = f"the port {port} of {host} cannot be used: {error.strerror}"
        raise PipelineError(what, where="--port", hint="choose another --port, or correct --host") from error
    show(f"searches use --storage grpc://{host}:{port}; Ctrl-C ends it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the proxy is an experimental feature of Optuna
            optuna.storages.run_grpc_proxy_server(storage, host=host, port=port)
    except RuntimeError as error:
        raise PipelineError(f"the port {port} of {host} cannot be used: {error}", where="--port") from error


def _require_free(host: str, port: int) -> None:
    """Open the port for a moment. gRPC shares the port of another proxy without an error (SO_REUSEPORT).

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended proxy do not matter
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
            probe.listen()


def _database(url: str) -> BaseStorage:
    """Return a database, with its tables."""
    from optuna.storages import RDBStorage, get_storage
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for attempt in range(OPENINGS):
        try:
            return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))
        except (IntegrityError, ProgrammingError, OperationalError):
            if attempt + 1 == OPENINGS:
                raise
            time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError


def _proxy(url: str) -> BaseStorage:
    """Return a client of `python -m compress search-proxy`."""
    from optuna.storages import GrpcStorageProxy

    parts = urlsplit(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is an experimental feature of Optuna
        proxy = GrpcStorageProxy(host=parts.hostname or "localhost", port=parts.port or 13000)
    proxy.wait_server_ready(timeout=PROXY_S)
    return proxy


def retrying(storage: BaseStorage, show: Show) -> BaseStorage:
    """Return a storage that repeats calls while the other one is away.

    A call whose answer was lost may be carried out twice. A trial that is created twice has no owner, and is marked
    failed after its lease; a trial that is finished twice is recognized by its record.
    """
    from optuna.storages import BaseStorage as Base

    next_line = 0.0

    def away(text: str) -> None:
        """Show that the storage is away: once, and not for each call of each thread."""
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + RETRY_S
            show(text)

    def repeated(name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            del self
            return _repeated(storage, away, name, *arguments, **options)

        return call

    def close(self: Any) -> None:
        del self
        backend = getattr(storage, "_backend", None)  # of Optuna's cache in front of a database
        if backend is not None:
            backend.remove_session()
            backend.engine.dispose()
        else:
            cast(Any, storage).close()  # a proxy

    names = [name for name in dir(Base) if not name.startswith("_") and callable(getattr(Base, name))]
    kind = type("RetryingStorage", (Base,), {**{name: repeated(name) for name in names}, "close": close})
    return cast("BaseStorage", kind())


def close(storage: BaseStorage) -> None:
    """Close the connections of a storage; a journal has none."""
    closing = getattr(storage, "close", None)
    if closing is not None:
        closing()


def _repeated(storage: BaseStorage, show: Show, name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of a storage, and again while the storage is away.

    Raises:
        StoreError: it stays away.
    """
    began, pause_s = time.monotonic(), 0.1
    while True:
        try:
            return getattr(storage, name)(*arguments, **options)
        except Exception as error:
            if not _is_away(error):
                raise
            cause = error.__cause__ or error
            first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            if time.monotonic() - began > QUIET_S:
                show(f"the storage of the search is away: {first}; trying again for {RETRY_S:.0f} s")
            if time.monotonic() - began > RETRY_S:
                hint = "start it, and run the same command again"
                raise StoreError(
                    f"the storage of the search has been away for {RETRY_S:.0f} s: {first}", hint=hint
                ) from error
        with suppress(Exception):  # a transaction that was cut off
            storage.remove_session()
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_away(error: Exception) -> bool:
    """Return whether an error means that the storage cannot be reached now."""
    from optuna.exceptions import StorageInternalError

    if isinstance(error, StorageInternalError):
        error = cast(Exception, error.__cause__ or error)
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("sqlalchemy"):
        return name in AWAY
    if module.startswith("grpc"):
        code = getattr(error, "code", lambda: None)()
        return getattr(code, "name", "") in ("UNAVAILABLE", "UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED")
    return False


class JournalLock:
    """A lock for Optuna's journal that the kernel releases when its process ends.

    Args:
        journal: the journal file.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._handle = -1

    def acquire(self) -> bool:
        """Wait for the lock, and remove an incomplete last line, which a power cut or a full disk has left."""
        handle = os.open(f"{self._journal}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            with self._journal.open("ab+") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
                if stream.read() not in (b"", b"\n"):
                    stream.seek(0)
                    stream.truncate(stream.read().rfind(b"\n") + 1)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._handle)


def _journal_in(folder: Path) -> BaseStorage:
    """Return the journal file in a folder as a storage.

    Raises:
        StoreError: it is damaged or cannot be written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        """Optuna's journal with errors for the user."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            """Append lines.

            Raises:
                StoreError: the file cannot be written.
            """
            try:
                super().append_logs(logs)
            except OSError as error:
                raise explain(error, "the journal of the search cannot be written", folder) from error

    path = folder / JOURNAL
    lock = JournalLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        lock.release()
        return JournalStorage(Journal(str(path), cast(Any, lock)))
    except OSError as error:
        raise explain(error, "the journal of the search cannot be used", folder) from error
    except DAMAGED as error:
        hint = "restore it from a copy, or remove it to begin again"
        raise StoreError("the journal of the search is damaged", where=str(path), hint=hint) from error
