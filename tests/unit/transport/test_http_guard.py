"""Access control of the HTTP ports, tested on the ASGI app."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.http.connection import CLIENT_CERTIFICATE
from ratelimit_rls.transport.http.guard import HEALTH_PATHS, Guard
from ratelimit_rls.transport.http.hosts import AllowedHosts
from ratelimit_rls.transport.http.tokens import BearerToken

TOKEN = "a-token-of-twenty-letters"


async def page(_: Request) -> Response:
    return PlainTextResponse("done")


APP = Starlette(routes=[Route(path, page, methods=["GET", "POST"]) for path in ("/json", "/healthcheck", "/livez")])


class GuardedApp:
    """An app behind a guard, with the recorded abuse."""

    def __init__(self, *, certificate: bool = False, **options: object) -> None:
        self.abuse = AbuseLog()
        guard = Guard(APP, self.abuse, open_paths=HEALTH_PATHS, **options)  # type: ignore[arg-type]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = {CLIENT_CERTIFICATE: True} if certificate else {}
            await guard(scope, receive, send)

        self._transport = httpx.ASGITransport(app, client=("192.0.2.1", 1234))

    async def post(
        self, path: str = "/json", host: str = "localhost:8080", headers: list[tuple[str, str]] | None = None
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._transport, base_url="http://localhost:8080") as client:
            return await client.post(path, headers=[("Host", host), *(headers or [])], content="{}")


async def test_plain_request_is_allowed() -> None:
    app = GuardedApp(hosts=AllowedHosts())
    assert (await app.post()).text == "done"
    assert not list(app.abuse.measured())


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "https://evil.example")],
        [("Origin", "http://localhost:8080"), ("Origin", "https://evil.example")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site")],
    ],
)
async def test_cross_origin_request_is_rejected(headers: list[tuple[str, str]]) -> None:
    app = GuardedApp(hosts=AllowedHosts())
    rejected = await app.post(headers=headers)
    assert (rejected.status_code, rejected.text) == (403, "pages of other origins may not use this port\n")
    assert app.abuse.count(Abuse.CROSS_ORIGIN) == 1


async def test_cross_origin_request_is_rejected_despite_credentials() -> None:
    app = GuardedApp(client_certificates=True, certificate=True)
    assert (await app.post(headers=[("Origin", "https://evil.example")])).status_code == 403
    assert (await app.post()).status_code == 200


async def test_unknown_host_is_rejected() -> None:
    app = GuardedApp(hosts=AllowedHosts())
    rejected = await app.post(host="evil.example:8080", headers=[("Origin", "http://evil.example:8080")])
    assert rejected.status_code == 421
    assert "RLS_HTTP_ALLOWED_HOSTS" in rejected.text
    assert app.abuse.count(Abuse.UNKNOWN_HOST) == 1
    assert (await GuardedApp().post(host="evil.example")).status_code == 200  # if hosts are not checked


async def test_health_paths_are_open() -> None:
    app = GuardedApp(hosts=AllowedHosts(), token=BearerToken(TOKEN), client_certificates=True)
    for path in HEALTH_PATHS:
        assert (await app.post(path, host="evil.example", headers=[("Origin", "https://a")])).status_code == 200
    assert (await app.post("/healthcheck/")).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", f"Bearer {TOKEN}")], 200),
        ([("Authorization", f"bearer  {TOKEN}")], 200),
        ([], 401),
        ([("Authorization", f"Bearer {TOKEN}x")], 401),
        ([("Authorization", f"Bearer {TOKEN[:-1]}")], 401),
        ([("Authorization", f"Basic {TOKEN}")], 401),
        ([("Authorization", TOKEN)], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", f"Bearer\t{TOKEN}")], 401),
        ([("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")], 401),
    ],
)
async def test_token_is_required(headers: list[tuple[str, str]], status: int) -> None:
    app = GuardedApp(token=BearerToken(TOKEN), hosts=AllowedHosts())
    # With credentials the host is not checked: malicious pages have none.
    answer = await app.post(host="rls.example", headers=headers)
    assert answer.status_code == status
    assert app.abuse.count(Abuse.UNAUTHENTICATED) == (status == 401)
    assert ("www-authenticate" in answer.headers) is (status == 401)


async def test_client_certificate_is_required() -> None:
    without = GuardedApp(client_certificates=True)
    rejected = await without.post()
    assert (rejected.status_code, rejected.text) == (403, "this needs a client certificate\n")
    assert without.abuse.count(Abuse.UNAUTHENTICATED) == 1
    assert (await GuardedApp(client_certificates=True, certificate=True).post()).status_code == 200


async def test_either_credential_suffices() -> None:
    app = GuardedApp(client_certificates=True, token=BearerToken(TOKEN))
    assert (await app.post(headers=[("Authorization", f"Bearer {TOKEN}")])).status_code == 200
    assert (await app.post()).status_code == 401
    assert (
        await GuardedApp(client_certificates=True, token=BearerToken(TOKEN), certificate=True).post()
    ).status_code == 200


async def test_certificate_does_not_replace_a_required_token() -> None:
    assert (await GuardedApp(token=BearerToken(TOKEN), certificate=True).post()).status_code == 401


async def test_closed_path_is_rejected_with_a_reason() -> None:
    app = GuardedApp(closed_paths={"/json": "closed by RLS_HTTP_JSON\n"})
    for path in ("/json", "/%6Ason"):
        rejected = await app.post(path)
        assert (rejected.status_code, rejected.text) == (403, "closed by RLS_HTTP_JSON\n")
    assert (await app.post("/healthcheck")).status_code == 200


def has(token: BearerToken, text: str) -> bool:
    return token.authorizes([(b"authorization", f"Bearer {text}".encode())])


def test_token_file_is_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    token = BearerToken(file=str(file))
    assert has(token, TOKEN)
    other = tmp_path / "other"
    other.write_text("another-token-of-many-letters")
    other.replace(file)
    assert has(token, "another-token-of-many-letters")
    assert not has(token, TOKEN)
    for unusable in ("", "short"):
        other.write_text(unusable)
        other.replace(file)
        assert has(token, "another-token-of-many-letters")
        assert not has(token, unusable)
    file.unlink()
    assert has(token, "another-token-of-many-letters")


def test_invalid_token_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RLS_HTTP_TOKEN_FILE=.*: No such file or directory"):
        BearerToken(file=str(tmp_path / "none"))
    (tmp_path / "token").write_text("short")
    with pytest.raises(SettingsError, match="the token must have at least 20 characters"):
        BearerToken(file=str(tmp_path / "token"))
