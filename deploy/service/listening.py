"""The end of a listening socket, without a reset of connections that wait to be accepted.

The kernel resets every connection in the queue of a listener that is closed. So new connections are kept out first,
those in the queue are accepted, and then the listener is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

SO_ATTACH_FILTER = 26
_FILTER = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone is the first packet of a new connection
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # let every other packet through
)
"""A classic BPF program (Linux: Documentation/networking/filter.rst): code, jump if true, jump if false, value."""


def keep_out(listener: socket.socket) -> bool:
    """Keep new connections out of a listener, and leave those that have begun.

    A client that connects over TCP repeats its first packet after a second, and is then refused.

    Returns:
        Whether the system can do that. If not, a connection that is made while the listener is closed is reset.
    """
    if listener.family == getattr(socket, "AF_UNIX", None):
        with contextlib.suppress(OSError):
            os.unlink(listener.getsockname())
        return True
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in _FILTER))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_FILTER), ctypes.addressof(program))
        )
    except OSError:
        return False
    return True
