"""Who may call which route: user keys for inference, admin keys for control, loopback where no admin key is set.

    route      no admin key set            admin key set
    user       any user or admin key; open when no user key is set
    control    loopback only               admin key
    numbers    loopback only               admin key, or loopback

Keys are kept and compared as SHA-256 digests in constant time, all of them each time. Routers name one of the three
functions at the end as a dependency; nothing else decides about access, but for FastDeploy's routes of expert
balancing, which also take a login in their bodies (`dialects/eplb.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request

from headrace.errors import AuthenticationFailed, PermissionDenied
from headrace.processing.inputs import RequestOptions
from headrace.server.context import context_of

FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


class Role(Enum):
    NOBODY = "nobody"
    USER = "user"
    ADMIN = "admin"


class KeyRing:
    """The digests of the keys that the server was started with."""

    def __init__(self, user_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        self._user = tuple(map(_digest, user_keys))
        self._admin = tuple(map(_digest, admin_keys))

    @property
    def has_user_keys(self) -> bool:
        return bool(self._user)

    @property
    def has_admin_keys(self) -> bool:
        return bool(self._admin)

    def role(self, key: str | None) -> Role:
        if not key:
            return Role.NOBODY
        digest = _digest(key)
        is_admin = _is_any(digest, self._admin)
        is_user = _is_any(digest, self._user)
        return Role.ADMIN if is_admin else Role.USER if is_user else Role.NOBODY


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_any(digest: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)  # no early end: the time says nothing about which one
    return found


def presented_key(connection: HTTPConnection) -> str | None:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY`. Header bytes arrive as Latin-1; a key is UTF-8."""
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = connection.headers.get("x-api-key", "")
    return key.strip().encode("latin-1").decode("utf-8", "surrogateescape") or None


def key_digest(connection: HTTPConnection) -> bytes:
    """Whose request it is, for what only its sender may see again. Without a key it is everybody's."""
    return _digest(presented_key(connection) or "")


def salted(request: Request, options: RequestOptions) -> RequestOptions:
    """With --cache-salt-by-key the salt of the prefix cache comes from the key too: one that a client sends can be
    copied by another, a key cannot."""
    if not context_of(request).config.server.cache_salt_by_key:
        return options
    salt = hmac.digest(key_digest(request), (options.cache_salt or "").encode(), "sha256")
    return replace(options, cache_salt=salt.hex())


def is_local(connection: HTTPConnection) -> bool:
    """From this machine, and neither through a proxy nor from a web page of another origin in a local browser."""
    if connection.client is None or any(name in connection.headers for name in FORWARDING_HEADERS):
        return False
    origin = connection.headers.get("origin")
    if origin is not None and not _is_own_page(origin, connection.headers.get("host", "")):
        return False
    return _is_loopback(connection.client.host)


def _is_own_page(origin: str, host: str) -> bool:
    """A page that this server itself gave, by an address that no foreign name server can point here."""
    name = urlsplit(f"//{host}").hostname or ""
    return origin.partition("://")[2] == host and (name == "localhost" or _is_loopback(name))


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _role(request: Request) -> Role:
    return context_of(request).keys.role(presented_key(request))


def is_admin(request: Request) -> bool:
    """Whether it has an admin key."""
    return _role(request) is Role.ADMIN


async def require_user(request: Request) -> None:
    if context_of(request).keys.has_user_keys and _role(request) is Role.NOBODY:
        raise _no_key(request, "This route needs an API key")


async def require_admin(request: Request) -> None:
    keys = context_of(request).keys
    if not keys.has_admin_keys:
        if not is_local(request):
            raise PermissionDenied("No admin key is set, so control routes answer on this machine's loopback only.")
        return
    _need_admin_key(request)


async def require_numbers(request: Request) -> None:
    keys = context_of(request).keys
    if is_local(request):
        return
    if not keys.has_admin_keys:
        raise PermissionDenied("No admin key is set, so this route answers on this machine's loopback only.")
    _need_admin_key(request)


def _need_admin_key(request: Request) -> None:
    role = _role(request)
    if role is Role.USER:
        raise PermissionDenied("This route needs an admin key; a user key was given.")
    if role is not Role.ADMIN:
        raise _no_key(request, "This route needs an admin key")


def _no_key(request: Request, need: str) -> AuthenticationFailed:
    given = "the one given is not known" if presented_key(request) else "none was given"
    return AuthenticationFailed(f"{need} (Authorization: Bearer KEY); {given}.")
