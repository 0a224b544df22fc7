"""Unauthorised requests to the admin API of a real server: every route of its OpenAPI document, with every wrong
token, and with tokens whose role is too low. What is rejected changes nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from typing import Any, NamedTuple

import grpc
import pytest

from ratelimit_rls.admin.http.app import documented_app
from ratelimit_rls.identity.key_format import new_secret
from ratelimit_rls.protos.messages import RESET_LIMIT, ResetRequest
from tests.hostile.envoy_calls import EnvoyCalls
from tests.support.admin import KEY_SECRET, TOKEN, ServiceWithDatabase, yearly_limit
from tests.support.grpc_client import Reply
from tests.support.jwt_factory import b64
from tests.support.service_process import UNRESTRICTIVE_RULES

pytestmark = pytest.mark.slow

RULE = "domain: stored\ndescriptors: [{key: path, rate_limit: {unit: day, requests_per_unit: 5}}]\n"
USER, TIER = "alice", "gold"
OPEN = {("GET", "/healthz")}
"""Paths that need no token. Every other path of the document must need one."""

READING = {"/api/v1/counters/peek", "/api/v1/decisions/explain", "/api/v1/decisions/simulate"}
"""POSTs that change nothing."""

FOR_ADMINISTRATORS = "/api/v1/tokens"
LISTS = ("rules", "tiers", "users", "keys", "blocks", "audit")


class Route(NamedTuple):
    method: str
    path: str
    """Path template of the OpenAPI document."""

    @property
    def is_change(self) -> bool:
        return self.method != "GET" and self.path not in READING

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes(document: Mapping[str, Any]) -> set[Route]:
    return {Route(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


DOCUMENTED = routes(documented_app().openapi())
GUARDED = sorted(DOCUMENTED - OPEN)
CHANGES = [route for route in GUARDED if route.is_change]
READS = [route for route in GUARDED if not route.is_change and not route.path.startswith(FOR_ADMINISTRATORS)]


@dataclass
class GuardedApi:
    """A server with one resource of each kind, and valid, expired and revoked tokens."""

    service: ServiceWithDatabase
    ids: dict[str, str]
    """Values of path parameters by the names of the document."""

    read: str
    write: str
    revoked: str
    api_key: str

    def __post_init__(self) -> None:
        self._addresses = count()

    @classmethod
    def new(cls, service: ServiceWithDatabase) -> GuardedApi:
        admin = service.admin
        admin.put_tier(TIER, 100)
        admin.put_user(USER, tier=TIER)
        key = admin.add_key(USER)
        rule_id = admin.add_rule("stored", RULE)
        made = {role: admin.do("POST", "/tokens", {"name": role, "role": role}) for role in ("read", "write", "admin")}
        token_id = made["write"]["token_id"]
        admin.do("DELETE", f"/tokens/{made['admin']['token_id']}")
        ids = {"name": TIER, "user_id": USER, "key_id": key.key_id, "rule_id": rule_id, "token_id": token_id}
        tokens = [made[role]["token"] for role in ("read", "write", "admin")]
        return cls(service, ids, *tokens, key.text)  # type: ignore[call-arg]

    def address(self) -> str:
        """Return an address that was not used before: one with too many failed logins receives only 429."""
        number = next(self._addresses)
        return f"127.2.{number // 250}.{number % 250 + 1}"

    def send(
        self, method: str, target: str, headers: Mapping[str, str | bytes], body: object = None, address: str = ""
    ) -> Reply:
        source = (address or self.address(), 0)
        connection = HTTPConnection("127.0.0.1", self.service.admin_port, timeout=10, source_address=source)
        try:
            connection.putrequest(method, target)
            sent = b"" if method == "GET" else json.dumps(body or {}).encode()
            usual = {"Content-Type": "application/json", "Content-Length": str(len(sent))}
            for name, value in {**usual, **headers}.items():
                connection.putheader(name, value)
            connection.endheaders(sent)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)
        finally:
            connection.close()

    def ask(self, route: Route, headers: Mapping[str, str | bytes], query: str = "") -> Reply:
        return self.send(route.method, route.path.format(**self.ids) + query, headers)

    def listed(self) -> dict[str, Any]:
        """Return all resources and all audit entries."""
        return {noun: self.service.admin.do("GET", f"/{noun}?limit=100")["items"] for noun in LISTS}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedApi]:
    """One server for all attacks. Afterwards nothing has changed, and it still answers administrators and callers."""
    directory = tmp_path_factory.mktemp("admin")
    (directory / "roomy.yaml").write_text(UNRESTRICTIVE_RULES)
    url = f"sqlite:///{directory / 'records.db'}"
    with ServiceWithDatabase(url, {"RLS_RULES": directory / "roomy.yaml", "LOG_LEVEL": "debug"}) as running:
        api = GuardedApi.new(running)
        before = api.listed()
        yield api
        assert api.listed() == before
        with EnvoyCalls(running.grpc_address) as calls:
            assert calls.should_rate_limit("roomy", [("all", "innocent")]).statuses[0].limit_remaining
        log = running.log()
        assert "Traceback" not in log
        for secret in (TOKEN, KEY_SECRET, api.read, api.write, api.revoked, api.api_key):
            assert secret not in log


def bearer(token: str) -> dict[str, str | bytes]:
    return {"Authorization": f"Bearer {token}"}


def other_ending(text: str) -> str:
    return text[:-1] + ("A" if text[-1] != "A" else "B")


def basic(user: str, password: str) -> dict[str, str | bytes]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


WRONG: dict[str, Callable[[GuardedApi], Mapping[str, str | bytes]]] = {
    "no token": lambda _: {},
    "an empty token": lambda _: bearer(""),
    "the scheme alone": lambda _: {"Authorization": "Bearer"},
    "an unknown token": lambda _: bearer(new_secret("rla").text),
    "a known id with another secret": lambda api: bearer(other_ending(api.write)),
    "an id alone": lambda api: bearer(api.write.rpartition("_")[0]),
    "a revoked token": lambda api: bearer(api.revoked),
    "an API key": lambda api: bearer(api.api_key),
    "the API key as a token of administrators": lambda api: bearer("rla" + api.api_key[3:]),
    "part of the first token": lambda _: bearer(TOKEN[:-1]),
    "more than the first token": lambda _: bearer(TOKEN + "x"),
    "the first token in capitals": lambda _: bearer(TOKEN.upper()),
    "the key secret": lambda _: bearer(KEY_SECRET),
    "the first token as a password": lambda _: basic("admin", TOKEN),
    "the first token without a scheme": lambda _: {"Authorization": TOKEN},
    "the first token in a cookie": lambda _: {"Cookie": f"token={TOKEN}; Authorization=Bearer {TOKEN}"},
    "the first token in another header": lambda _: {"X-Api-Key": TOKEN, "X-Auth-Token": TOKEN},
    "a name from a proxy": lambda _: {"X-Forwarded-User": "admin", "X-Remote-User": "admin", "X-Role": "admin"},
    "an address of this machine from a proxy": lambda _: {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"},
    "a token of 8 KiB": lambda _: bearer("rla_" + "x" * 8192),
    "a token that is not ASCII": lambda _: {"Authorization": b"Bearer rla_\xff\xfe"},
    "a JSON Web Token": lambda _: bearer(f"{b64({'alg': 'none'})}.{b64({'sub': 'admin', 'role': 'admin'})}."),
    "SQL": lambda _: bearer("' OR 1=1 --"),
}


@pytest.mark.parametrize("route", GUARDED, ids=str)
@pytest.mark.parametrize("credentials", WRONG.values(), ids=WRONG.keys())
def test_wrong_token_opens_no_route(
    api: GuardedApi, route: Route, credentials: Callable[[GuardedApi], Mapping[str, str | bytes]]
) -> None:
    rejected = api.ask(route, credentials(api))

    assert rejected.status == 401
    assert rejected.headers["www-authenticate"].startswith("Bearer")
    assert json.loads(rejected.body)["type"] == "urn:ratelimit-rls:problem:unauthorized"


@pytest.mark.parametrize("route", GUARDED, ids=str)
def test_token_in_the_query_opens_no_route(api: GuardedApi, route: Route) -> None:
    assert api.ask(route, {}, f"?token={TOKEN}&access_token={TOKEN}").status == 401


@pytest.mark.parametrize("route", CHANGES, ids=str)
def test_read_only_token_changes_nothing(api: GuardedApi, route: Route) -> None:
    rejected = api.ask(route, bearer(api.read))
    assert (rejected.status, json.loads(rejected.body)["type"]) == (403, "urn:ratelimit-rls:problem:forbidden")


@pytest.mark.parametrize("role", ["read", "write"])
@pytest.mark.parametrize("route", [route for route in GUARDED if route.path.startswith(FOR_ADMINISTRATORS)], ids=str)
def test_tokens_are_for_administrators_alone(api: GuardedApi, route: Route, role: str) -> None:
    """Otherwise a token with the role write could create one with a higher role."""
    token = api.read if role == "read" else api.write
    assert api.ask(route, bearer(token)).status == 403


@pytest.mark.parametrize("route", READS, ids=str)
def test_read_only_token_opens_what_only_reads(api: GuardedApi, route: Route) -> None:
    """Valid and invalid requests are treated equally."""
    assert api.ask(route, bearer(api.read)).status in (200, 400, 422)


def test_document_that_is_served_has_the_same_routes(api: GuardedApi) -> None:
    assert routes(json.loads(api.send("GET", "/openapi.json", {}).body)) == DOCUMENTED
    assert len(GUARDED) >= 39
    assert len(CHANGES) >= 20


DETOURS = {
    "two slashes before": ("GET", "//api/v1/users"),
    "two slashes within": ("GET", "/api/v1//users"),
    "a slash behind": ("GET", "/api/v1/users/"),
    "capitals": ("GET", "/API/V1/users"),
    "dots": ("GET", "/healthz/../api/v1/users"),
    "escaped dots": ("GET", "/healthz/%2e%2e/api/v1/users"),
    "an escaped slash": ("GET", "/api/v1%2Fusers"),
    "an escaped letter": ("GET", "/%61pi/v1/users"),
    "a parameter of a segment": ("GET", "/healthz;/api/v1/users"),
    "a NUL": ("GET", "/api/v1/users%00"),
    "an open path in the query": ("GET", "/api/v1/users?/healthz"),
    "a whole URL": ("GET", "http://127.0.0.1/api/v1/users"),
    "another version": ("GET", "/api/v2/users"),
    "no version": ("GET", "/api/users"),
    "HEAD": ("HEAD", "/api/v1/users"),
    "OPTIONS": ("OPTIONS", "/api/v1/users"),
    "TRACE": ("TRACE", "/api/v1/users"),
    "PROPFIND": ("PROPFIND", "/api/v1/users"),
    "small letters": ("get", "/api/v1/users"),
    "an unknown method": ("GETS", "/api/v1/users"),
    "a file": ("GET", "/../../../../etc/passwd"),
    "debugging": ("GET", "/debug/pprof"),
}


@pytest.mark.parametrize(("method", "target"), DETOURS.values(), ids=DETOURS.keys())
def test_detour_leads_nowhere_without_a_token(api: GuardedApi, method: str, target: str) -> None:
    rejected = api.send(method, target, {})
    assert rejected.status in (400, 401, 404, 405)
    assert USER not in rejected.body


OVERRIDES: dict[str, tuple[Mapping[str, str | bytes], str]] = {
    "X-HTTP-Method-Override": ({"X-HTTP-Method-Override": "DELETE"}, ""),
    "X-HTTP-Method": ({"X-HTTP-Method": "DELETE"}, ""),
    "X-Method-Override": ({"X-Method-Override": "DELETE"}, ""),
    "_method": ({}, "?_method=DELETE"),
    "X-Original-URL": ({"X-Original-URL": "/api/v1/tokens", "X-Rewrite-URL": "/api/v1/tokens"}, ""),
}


@pytest.mark.parametrize(("headers", "query"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_read_stays_a_read(api: GuardedApi, headers: Mapping[str, str | bytes], query: str) -> None:
    """Headers and parameters that name another method, path or client have no effect."""
    response = api.ask(Route("GET", "/api/v1/users/{user_id}"), {**bearer(api.read), **headers}, query)
    assert response.status in (200, 400, 422)
    assert api.ask(Route("GET", "/api/v1/users/{user_id}"), bearer(api.read)).status == 200


@pytest.mark.parametrize("origin", ["https://attacker.test", "null", "http://127.0.0.1.attacker.test"])
def test_page_of_another_origin_is_rejected_even_with_a_token(api: GuardedApi, origin: str) -> None:
    for route in (Route("GET", "/api/v1/users"), Route("DELETE", "/api/v1/users/{user_id}")):
        assert api.ask(route, {**bearer(api.write), "Origin": origin}).status == 403


RESETS: dict[str, tuple[Callable[[GuardedApi], str | None], grpc.StatusCode]] = {
    "no token": (lambda _: None, grpc.StatusCode.UNAUTHENTICATED),
    "an empty token": (lambda _: "Bearer ", grpc.StatusCode.UNAUTHENTICATED),
    "an unknown token": (lambda _: f"Bearer {new_secret('rla').text}", grpc.StatusCode.UNAUTHENTICATED),
    "a revoked token": (lambda api: f"Bearer {api.revoked}", grpc.StatusCode.UNAUTHENTICATED),
    "an API key": (lambda api: f"Bearer {api.api_key}", grpc.StatusCode.UNAUTHENTICATED),
    "part of the first token": (lambda _: f"Bearer {TOKEN[:-1]}", grpc.StatusCode.UNAUTHENTICATED),
    "a read-only token": (lambda api: f"Bearer {api.read}", grpc.StatusCode.PERMISSION_DENIED),
}


@pytest.mark.parametrize(("credentials", "code"), RESETS.values(), ids=RESETS.keys())
def test_counters_are_not_reset_over_grpc(
    api: GuardedApi, credentials: Callable[[GuardedApi], str | None], code: grpc.StatusCode
) -> None:
    sent = credentials(api)
    metadata = (("authorization", sent),) if sent is not None else ()
    request = ResetRequest(identifier=USER, dimension="USER", domain="roomy").SerializeToString()
    with grpc.insecure_channel(api.service.grpc_address) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(RESET_LIMIT)(request, metadata=metadata, timeout=10)
    assert raised.value.code() is code


def test_only_the_guessing_address_is_locked_out(api: GuardedApi) -> None:
    attacker, route = api.address(), Route("GET", "/api/v1/users")
    statuses = [api.send("GET", route.path, bearer(new_secret("rla").text), address=attacker).status for _ in range(20)]
    assert {*statuses} == {401, 429}
    assert statuses == sorted(statuses), "once locked out, it stays so"
    assert api.ask(route, bearer(api.read)).status == 200
    assert api.send("GET", route.path, bearer(api.read), address=attacker).status == 200, "a token in use is known"


def test_right_token_changes_what_it_may(api: GuardedApi) -> None:
    """Sends a dry run, which succeeds and changes nothing."""
    route = Route("PUT", "/api/v1/tiers/{name}")
    body = {"limits": [yearly_limit(7)]}
    target = route.path.format(**api.ids) + "?dry_run=true"
    assert api.send(route.method, target, bearer(api.read), body).status == 403
    for token in (api.write, TOKEN):
        done = api.send(route.method, target, bearer(token), body)
        assert (done.status, json.loads(done.body)["limits"][0]["requests_per_unit"]) == (200, 7)
