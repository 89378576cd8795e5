"""API keys and their tenants. A key is never stored, compared or logged as such.

A tenant is HMAC-SHA256(server secret, key): stable over restarts as long as the secret file stays, and useless for guessing
keys without it. Two keys are two tenants, and tenants never share cache blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kveik.errors import BadValue, NotAuthorized, Refused, Unreachable
from kveik.server.envelope import error_response
from kveik.words import counted

log = logging.getLogger(__name__)

SECRET_BYTES = 32
OPEN_PATHS = frozenset({"/", "/status", "/health", "/metrics", "/version", "/docs", "/openapi.json"})
"""Paths without a key: for browsers, probes and scrapers. They show counts and names, never a request's content."""


def tenant_secret(path: Path) -> bytes:
    """Returns the secret in the file; creates one, readable by its owner alone, where there is none.

    Safe against a second server that starts at the same moment: the first link wins, and both read the same file.

    Its errors name the path: they appear at the start, and clients never see them.

    Raises:
        Unreachable: the file can neither be read nor created.
        BadValue: the file holds fewer than 16 bytes.
    """
    try:
        if not path.exists():
            _make_secret(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise Unreachable(
            f"The tenant secret {path} (--tenant-secret-file) cannot be read or created: {error.strerror}. Give another path."
        ) from error
    if len(secret) < 16:
        raise BadValue(
            f"The tenant secret {path} (--tenant-secret-file) has {counted(len(secret), 'byte')}. Give one of at least 16.",
            param="tenant_secret_file",
        )
    if path.stat().st_mode & 0o077:
        log.warning("tenant secret readable by other users (chmod 600 restricts it): path=%s", path)
    return secret


def _make_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode())
            file.flush()
            os.fsync(file.fileno())
        # A link fails where the file exists; a rename would replace the secret that another server has read.
        try:
            os.link(draft, path)
        except FileExistsError:
            log.debug("tenant secret created by another server first: path=%s", path)
    finally:
        draft.unlink()


class Tenants:
    """Keys with access. Without keys every call is served, as the one tenant b\"\"."""

    def __init__(self, keys: Sequence[str], secret: bytes) -> None:
        self._secret = secret
        self._digests = tuple(self.of_key(key) for key in keys)

    def tenant(self, authorization: bytes | None) -> bytes:
        """Returns the tenant of an Authorization header, whose bytes are compared with the keys' UTF-8.

        Raises:
            NotAuthorized: keys are configured, and the header holds none of them.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise NotAuthorized("This server needs an API key. Send it as `Authorization: Bearer KEY`.")
        presented = self._digest(key.strip())
        # Every digest is compared, each in constant time, so that the time reveals nothing about any key.
        equal = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not any(equal):
            raise NotAuthorized("Incorrect API key provided. Send one of this server's keys.")
        return presented

    def of_key(self, key: str) -> bytes:
        """Returns the tenant of a key."""
        return self._digest(key.encode())

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


class Authenticate:
    """ASGI: refuses calls without a key, except to open paths; writes the tenant into the request's state.

    OPTIONS passes as well: it lists methods and nothing else, and browsers and proxies send it without a key.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, refused: Callable[[Refused], None]) -> None:
        self._app = app
        self._tenants = tenants
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            try:
                tenant = self._tenants.tenant(dict(scope["headers"]).get(b"authorization"))
            except NotAuthorized as error:
                self._refused(error)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)
