"""Who may call what: user, admin and no keys, from loopback and elsewhere, through proxies and browsers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.server.keys import KeyRing, Role
from headrace.testing.front_end import FrontEnd

Make = Callable[..., FrontEnd]
USER, ADMIN = {"Authorization": "Bearer user-1"}, {"Authorization": "Bearer admin-1"}
BOTH = {"api_key": ("user-1", "user-2"), "admin_key": ("admin-1",)}
ABROAD = "192.0.2.7"

INFERENCE = ("GET", "/v1/models")
CONTROL = ("POST", "/v1/control/reset_prefix_cache")
NUMBERS = ("GET", "/metrics")
LOAD = ("GET", "/v1/load")


async def status(
    front_end: FrontEnd, route: tuple[str, str], headers: dict[str, str] | None = None
) -> tuple[int, str | None]:
    response = await front_end.http.request(*route, headers=headers)
    error = response.json()["error"]["code"] if response.status_code >= 400 else None
    return response.status_code, error


OK = (200, None)
UNAUTHORISED = (401, "invalid_api_key")
FORBIDDEN = (403, "permission_denied")


async def test_without_keys_inference_is_open_and_control_is_local(make: Make) -> None:
    local, abroad = make(), make(host=ABROAD)
    for route in (INFERENCE, CONTROL, NUMBERS, LOAD):
        assert await status(local, route) == OK
    assert await status(abroad, INFERENCE) == OK
    for route in (CONTROL, NUMBERS, LOAD):
        assert await status(abroad, route) == FORBIDDEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
async def test_every_loopback_address_is_local(make: Make, host: str) -> None:
    assert await status(make(host=host), CONTROL) == OK


async def test_with_keys_each_route_wants_its_own(make: Make) -> None:
    for host in ("127.0.0.1", ABROAD):
        front_end = make(host=host, server=BOTH)
        assert await status(front_end, INFERENCE) == UNAUTHORISED
        assert await status(front_end, INFERENCE, {"Authorization": "Bearer wrong"}) == UNAUTHORISED
        assert await status(front_end, INFERENCE, USER) == OK
        assert await status(front_end, INFERENCE, {"Authorization": "bearer user-2"}) == OK
        assert await status(front_end, INFERENCE, {"x-api-key": "user-1"}) == OK
        assert await status(front_end, INFERENCE, ADMIN) == OK
        assert await status(front_end, CONTROL) == UNAUTHORISED
        assert await status(front_end, CONTROL, USER) == FORBIDDEN
        assert await status(front_end, CONTROL, ADMIN) == OK


async def test_numbers_are_open_on_loopback_and_want_an_admin_elsewhere(make: Make) -> None:
    local, abroad = make(server=BOTH), make(host=ABROAD, server=BOTH)
    for route in (NUMBERS, LOAD):
        assert await status(local, route) == OK
        assert await status(abroad, route) == UNAUTHORISED
        assert await status(abroad, route, USER) == FORBIDDEN
        assert await status(abroad, route, ADMIN) == OK


async def test_probes_need_no_key(make: Make) -> None:
    front_end = make(host=ABROAD, server=BOTH)
    for path in ("/livez", "/readyz", "/health", "/ping", "/version", "/health_generate"):
        assert await status(front_end, ("GET", path)) == OK


async def test_a_refused_request_is_not_read_and_never_reaches_the_engine(make: Make) -> None:
    front_end = make(server=BOTH)
    response = await front_end.http.post("/v1/completions", content=b"not json")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
async def test_what_a_local_proxy_forwards_is_not_local(make: Make, header: str) -> None:
    assert await status(make(), CONTROL, {header: "127.0.0.1"}) == FORBIDDEN


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://evil.example", "127.0.0.1:8000", FORBIDDEN),  # a page of another site posts to this machine
        ("http://evil.example:8000", "evil.example:8000", FORBIDDEN),  # and one whose name was made to point here
        ("null", "127.0.0.1:8000", FORBIDDEN),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", OK),
        ("http://localhost:8000", "localhost:8000", OK),
        ("http://[::1]:8000", "[::1]:8000", OK),
    ],
)
async def test_a_browser_on_this_machine_is_not_a_way_in(
    make: Make, origin: str, host: str, expected: tuple[int, str | None]
) -> None:
    assert await status(make(), CONTROL, {"origin": origin, "host": host}) == expected


async def test_cors_answers_for_the_named_origins_alone(make: Make) -> None:
    front_end = make(server={"cors_origin": ("https://app.example",), **BOTH})
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await front_end.http.options("/v1/completions", headers={"origin": "https://app.example", **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = await front_end.http.options("/v1/completions", headers={"origin": "https://other.example", **asks})
    assert "access-control-allow-origin" not in other.headers
    refused = await front_end.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in (await make().http.get("/v1/models", headers=asks)).headers


def test_roles() -> None:
    keys = KeyRing(["u", "both"], ["a", "both"])
    assert [keys.role(key) for key in ("u", "a", "both", "x", "", None)] == [
        Role.USER, Role.ADMIN, Role.ADMIN, Role.NOBODY, Role.NOBODY, Role.NOBODY,
    ]  # fmt: skip


async def test_keys_beyond_ascii(make: Make) -> None:
    front_end = make(server={"api_key": ("schl\u00fcssel",)})
    sent = {b"authorization": "Bearer schl\u00fcssel".encode()}
    assert (await front_end.http.get("/v1/models", headers=sent)).status_code == 200
    sent = {b"authorization": b"Bearer \xff\xfe"}
    assert (await front_end.http.get("/v1/models", headers=sent)).status_code == 401


def test_an_empty_key_opens_nothing() -> None:
    keys = KeyRing([""], [""])
    assert keys.has_user_keys
    assert keys.role("") is Role.NOBODY


async def test_with_salts_by_key_no_key_can_use_anothers_prefixes(make: Make) -> None:
    both = {"Authorization": "Bearer user-1"}, {"Authorization": "Bearer user-2"}

    async def salts(front_end: FrontEnd, **fields: str) -> list[str | None]:
        found = []
        for headers in (*both, both[0]):
            for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/generate", {"text": "Hi"})):
                await front_end.post(path, {**body, **fields}, headers=headers)
                found.append(front_end.submit.cache_salt)
        return found

    assert await salts(make(server=BOTH)) == [None] * 6
    front_end = make(server=BOTH | {"cache_salt_by_key": True})
    first, same, second, _, again, _ = await salts(front_end)
    assert first is not None
    assert len(first) == 64
    assert first == same == again != second
    salted = await salts(front_end, cache_salt="mine", extra_key="mine")
    assert salted[0] not in (first, salted[2], "mine"), "the client's own salt counts too"
