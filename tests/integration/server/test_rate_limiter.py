"""The RateLimiter API of a whole process: over mTLS, with several clients, and behind the middleware."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ratelimit_rls.client import AsyncRateLimiterClient, RateLimiterClient, RateLimiterError, Tls
from ratelimit_rls.client.asgi import RateLimitMiddleware, Scope
from ratelimit_rls.protos.messages import CHECK_RATE_LIMIT, LimiterCheckRequest, LimiterCheckResponse
from tests.support.certificates import Authority
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

RULES = """\
domain: shop
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 100}
  - key: ip
    rate_limit: {unit: year, requests_per_unit: 3, algorithm: gcra}
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "shop.yaml"
    path.write_text(RULES)
    return path


def test_applications_and_envoy_share_one_counter_in_redis(rules: Path, any_redis: RedisServer) -> None:
    settings = {
        "RLS_RULES": rules,
        "REDIS_URL": any_redis.address,
        "RLS_LIMITER_DOMAIN": "shop",
    }
    with ServiceProcess(settings) as service, RateLimiterClient(service.grpc_address, timeout_s=10) as client:
        with ThreadPoolExecutor(8) as pool:
            allowed = sum(pool.map(lambda _: client.check("ann", endpoint="/a").allowed, range(90)))
        for left in range(9, 4, -1):
            response = ask(service.grpc_address, rate_limit_request("shop", {"user": "ann"}))
            assert response.statuses[0].limit_remaining == left
        assert allowed == 90
        assert client.check("ann", cost=5).remaining == 0
        denied = client.check("ann")
        assert (denied.allowed, denied.reason, denied.current_count) == (False, "over_limit", 101)
        assert client.remaining("ann").limits[0].remaining == 0
        assert int(service.stat("ratelimit_server.CheckRateLimit.total_requests")) == 92
        with pytest.raises(RateLimiterError, match=r"UNIMPLEMENTED: .*RLS_DATABASE_URL"):
            client.reset("ann")
        assert [bytes(key) for key in any_redis.cli("KEYS", "*")] == [b"rl:{shop/user=ann}:fixed_window:31536000"]


async def test_asgi_middleware_with_a_real_service(rules: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (certificate, key), (own_certificate, own_key) = authority.issue("limiter"), authority.issue("shop")
    settings = {
        "RLS_RULES": rules,
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": certificate,
        "GRPC_SERVER_TLS_KEY": key,
        "GRPC_CLIENT_TLS_CACERT": authority.ca_path,
    }
    tls = Tls(authority.ca_path.read_bytes(), own_certificate.read_bytes(), own_key.read_bytes(), "limiter")

    async def hello(request: Request) -> Response:
        return PlainTextResponse("hello")

    def by_address(scope: Scope) -> tuple[str, str]:
        return "ip", scope["client"][0]

    with ServiceProcess(settings) as service:
        limiter = AsyncRateLimiterClient(service.grpc_address, domain="shop", timeout_s=10, on_error="deny", tls=tls)
        app = RateLimitMiddleware(
            Starlette(routes=[Route("/a", hello)]),
            limiter,
            by_address,  # type: ignore[arg-type]
            exempt=lambda scope: scope["path"] == "/healthz",
        )
        transport = httpx.ASGITransport(app, client=("2001:db8::1", 1))
        async with limiter, httpx.AsyncClient(transport=transport, base_url="http://shop") as browser:
            answers = [await browser.get("/a") for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0"]
            denied = answers[-1]
            assert int(denied.headers["retry-after"]) == denied.json()["error"]["retry_after"] > 0
            assert denied.json()["error"]["rule"] == "shop.ip"

            leaving = asyncio.create_task(browser.get("/a"))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert (await browser.get("/a")).status_code == 429

            service.stop()
            closed = await browser.get("/a")
            assert (closed.status_code, closed.json()["error"]["reason"]) == (503, "no_answer")
            assert (await browser.get("/healthz")).status_code == 404  # response of the application


def test_clock_skew_is_counted_and_logged_once(rules: Path) -> None:
    request = LimiterCheckRequest(identifier="ann", dimension="USER", domain="shop", timestamp=1_000_000)
    with ServiceProcess({"RLS_RULES": rules}) as service, grpc.insecure_channel(service.grpc_address) as channel:
        for _ in range(2):
            answer = channel.unary_unary(CHECK_RATE_LIMIT)(request.SerializeToString(), timeout=10)  # type: ignore[var-annotated]
            assert LimiterCheckResponse.FromString(answer).allowed
        assert service.stat("ratelimit.limiter.clock_skew") == 2
        assert service.log().count("client_clock_skewed") == 1


TOKEN = "the-first-token-of-all"


def test_api_keys_blocks_and_resets_apply(tmp_path: Path, any_redis: RedisServer) -> None:
    rules = tmp_path / "shop.yaml"
    rules.write_text(
        "domain: shop\ndescriptors: [{key: user, limits_of: user, rate_limit: {unit: year, requests_per_unit: 100}}]\n"
    )
    admin_port = free_port()
    settings = {
        "RLS_RULES": rules,
        "RLS_LIMITER_DOMAIN": "shop",
        "RLS_DATABASE_URL": f"sqlite:///{tmp_path}/records.db",
        "RLS_ADMIN_PORT": admin_port,
        "RLS_ADMIN_TOKEN": TOKEN,
        "REDIS_URL": any_redis.address,
    }
    url, token = f"http://127.0.0.1:{admin_port}/api/v1", {"authorization": f"Bearer {TOKEN}"}
    with (
        ServiceProcess(settings) as service,
        httpx.Client(base_url=url, headers=token) as admin,
        RateLimiterClient(service.grpc_address, timeout_s=10, token=TOKEN) as client,
    ):
        admin.put("/tiers/gold", json={"limits": [{"unit": "year", "requests_per_unit": 3}]}).raise_for_status()
        admin.put("/users/bob", json={"tier": "gold"}).raise_for_status()
        made = admin.post("/keys", json={"user_id": "bob"}).raise_for_status().json()

        def looks(reason: str) -> bool:
            return client.check(made["key"], "api_key", cost=0).reason == reason

        service.wait_until(lambda: looks(""), "knows the key")
        answers = [client.check(made["key"], "api_key") for _ in range(4)]
        assert [(answer.limit, answer.remaining) for answer in answers] == [(3, 2), (3, 1), (3, 0), (3, 0)]
        assert not client.check("bob").allowed
        assert client.reset("bob") == 1
        assert client.check("bob").remaining == 2
        admin.put("/users/bob/block", json={"reason": "fraud"}).raise_for_status()
        service.wait_until(lambda: looks("blocked"), "blocks")
        admin.delete(f"/keys/{made['key_id']}").raise_for_status()
        service.wait_until(lambda: looks("unauthorized"), "forgets the key")
        audit = admin.get("/audit").text
        assert '"action":"reset"' in audit
        assert [bytes(key) for key in any_redis.cli("KEYS", "rl:{shop*")] == [
            b"rl:{shop/user=bob}:fixed_window:31536000"
        ]
        assert made["key"] not in service.log() + audit
        with (
            RateLimiterClient(service.grpc_address, timeout_s=10, token="rla_forged") as forger,
            pytest.raises(RateLimiterError, match="UNAUTHENTICATED"),
        ):
            forger.reset("bob")


def test_documented_example_runs(rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    (program,) = re.findall(r"<!-- run -->\n```python\n(.*?)```", page, re.DOTALL)
    rules.write_text(RULES.replace("domain: shop", "domain: demo"))
    with ServiceProcess({"RLS_RULES": rules}) as service:
        patient = f'"{service.grpc_address}", timeout_s=20'  # the default includes the time to connect, 0.25 s
        exec(program.replace('"localhost:8081"', patient), {})
    assert capsys.readouterr().out == "demo.user 99 of 100 each year\n"
