"""Connections to other hosts: OpenSSH with a key, without passwords, and only to known hosts."""

from __future__ import annotations

from collections.abc import Sequence

CONNECT_TIMEOUT_S = 15
"""A board that is switched off is reported after this time, not after the minutes of TCP."""
_SETTINGS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "ServerAliveInterval=15")


def command(host: str, there: str, options: Sequence[str] = ()) -> list[str]:
    """Return the arguments of `ssh` that run a command on a host.

    Args:
        host: its name, with or without `user@`; what begins with a dash is not an option.
        there: a line for the login shell there: everything in it must be quoted.
        options: more options of ssh.
    """
    settings = (part for setting in _SETTINGS for part in ("-o", setting))
    return ["ssh", "-T", *settings, *options, "--", host, there]
