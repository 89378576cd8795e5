"""Address of the remote tier: checks of it as it was typed, and the part that may be shown.

    redis[s]://[user[:password]@]host[:port][/database][?option=value&…]        valkey and valkeys are other names
    unix://[user[:password]@]/socket[?db=database]

A message never repeats what may be part of a password.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kveik.errors import BadValue

SCHEMES = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix"}
"""Scheme -> the client's name of it."""

_TLS: dict[str, Callable[[str], bool]] = {
    "ssl_ca_certs": bool,
    "ssl_ca_path": bool,
    "ssl_certfile": bool,
    "ssl_keyfile": bool,
    "ssl_password": bool,
    "ssl_cert_reqs": lambda value: value in ("none", "optional", "required"),
    "ssl_check_hostname": lambda value: value.lower() in ("true", "false"),
}

OPTIONS: dict[str, dict[str, Callable[[str], bool]]] = {
    "redis": {"client_name": lambda value: value.isascii() and value.isalnum()},
    "rediss": {"client_name": lambda value: value.isascii() and value.isalnum(), **_TLS},
    "unix": {"db": lambda value: value.isascii() and value.isdigit()},
}
"""Per scheme, options that are passed on to the client, and their check; any other would change the stored records, or be an
error at every call."""


def client_address(url: str) -> str:
    """The address as the client wants it. Raises BadValue for one that would not work."""
    scheme, _, rest = url.partition("://")
    parts = _parts(url)
    if scheme not in SCHEMES or not (parts.path if scheme == "unix" else parts.hostname) or parts.fragment:
        raise _bad("must look like redis://host:6379/0, rediss:// for TLS; special characters of a password as %40")
    if "@" in parts.path or "@" in parts.query:
        raise _bad("has an @ behind the host: special characters of a user or password are written as %2F or %3F")
    _check_port(parts)
    if scheme != "unix" and not _is_database(parts.path):
        raise _bad(f"names the database {parts.path[1:51]!r}; behind the host there may be a number, as in redis://host:6379/0")
    _check_options(parts, OPTIONS[SCHEMES[scheme]])
    return f"{SCHEMES[scheme]}://{rest}"


def shown(url: str) -> str:
    """A checked address as it may be logged: without user, password and options."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{'' if parts.port is None else f':{parts.port}'}{parts.path}"


def _bad(what: str) -> BadValue:
    return BadValue(f"The address --kv-remote {what}.", param="kv_remote")


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        # Its message holds the address, and that may hold a password.
        raise _bad("is none: the brackets of an IPv6 host do not fit, as they do in redis://[::1]:6379/0") from None


def _check_port(parts: SplitResult) -> None:
    try:
        valid = parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        port = parts.netloc.rpartition(":")[2]
        named = f" {port[:20]}" if port.isascii() and port.isdigit() else ""
        raise _bad(f"names the port{named}; it must be a number from 1 to 65535")


def _is_database(path: str) -> bool:
    number = path[1:]
    return not number or (number.isascii() and number.isdigit() and len(number) < 10)


def _check_options(parts: SplitResult, known: dict[str, Callable[[str], bool]]) -> None:
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise _bad(f"has the option {name[:50]!r}; {parts.scheme}:// knows {', '.join(known)}")
        if not known[name](value):
            raise _bad(f"has a value for {name} that it cannot have")
