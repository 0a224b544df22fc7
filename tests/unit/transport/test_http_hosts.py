"""Detection of requests from web pages by their headers."""

from __future__ import annotations

import pytest

from ratelimit_rls.transport.http.hosts import AllowedHosts, is_cross_origin

HOST = (b"host", b"localhost:8080")


@pytest.mark.parametrize(
    "fields",
    [
        [HOST],
        [],
        [HOST, (b"origin", b"http://localhost:8080")],
        [HOST, (b"origin", b"http://LOCALHOST:8080")],
        [(b"host", b"localhost.:8080"), (b"origin", b"http://localhost:8080")],
        [HOST, (b"origin", b"http://localhost.:8080")],
        # A proxy in front terminates TLS, or listens on the default port.
        [(b"host", b"rls.example"), (b"origin", b"https://rls.example")],
        [(b"host", b"rls.example"), (b"origin", b"http://rls.example:80")],
        [(b"host", b"rls.example:443"), (b"origin", b"https://rls.example")],
        [(b"host", b"[::1]:8080"), (b"origin", b"http://[::1]:8080")],
        [HOST, (b"sec-fetch-site", b"same-origin")],
        [HOST, (b"sec-fetch-site", b"none")],
    ],
)
def test_same_origin_requests_are_accepted(fields: list[tuple[bytes, bytes]]) -> None:
    assert not is_cross_origin(fields)


@pytest.mark.parametrize(
    "fields",
    [
        [HOST, (b"origin", b"http://evil.example")],
        [HOST, (b"origin", b"http://localhost:3000")],
        [HOST, (b"origin", b"http://localhost")],
        [HOST, (b"origin", b"null")],
        [HOST, (b"origin", b"")],
        [HOST, (b"origin", b"localhost:8080")],
        [HOST, (b"origin", b"file://localhost:8080")],
        [HOST, (b"origin", b"http://localhost:8080/path")],
        [HOST, (b"origin", b"http://localhost:8080@evil.example")],
        [HOST, (b"origin", b"http://evil.example#localhost:8080")],
        [HOST, (b"origin", b"http://localhost:8080, http://evil.example")],
        [HOST, (b"origin", b"http://localhost:8080"), (b"origin", b"http://evil.example")],
        [HOST, (b"origin", b"http://localhost:8080"), (b"origin", b"http://localhost:8080")],
        [(b"origin", b"http://localhost:8080")],
        [HOST, HOST, (b"origin", b"http://localhost:8080")],
        [HOST, (b"sec-fetch-site", b"cross-site")],
        [HOST, (b"sec-fetch-site", b"same-site")],
        [HOST, (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"cross-site")],
        [HOST, (b"sec-fetch-site", b"same-origin"), (b"origin", b"http://evil.example")],
        [(b"host", b"rls.example:80"), (b"origin", b"https://rls.example")],
    ],
)
def test_cross_origin_requests_are_detected(fields: list[tuple[bytes, bytes]]) -> None:
    assert is_cross_origin(fields)


def allows(host: str, *listed: str) -> bool:
    return AllowedHosts(listed).allow([(b"host", host.encode("latin-1"))])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8080",
        "LOCALHOST.",
        "app.localhost",
        "127.0.0.1:8080",
        "10.1.2.3",
        "[::1]:8080",
        "[fe80::1%eth0]",
        "[::ffff:10.0.0.1]",
        "ratelimit",
        "ratelimit_cluster:8080",
        "ratelimit.prod.svc",
        "ratelimit.prod.svc:8080",
        "ratelimit.prod.svc.cluster.local",
        "ratelimit.prod.svc.cluster.local.:8080",
        "printer.local",
        "vm.c.project.internal",
        "nas.home.arpa",
    ],
)
def test_internal_host_names_are_allowed(host: str) -> None:
    assert allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evilsvc.example",
        "my.evillocal",
        "",
        ":8080",
        ".",
        "localhost:8080:8080",
        "localhost@evil.example",
        "localhost, evil.example",
        "local host",
        "[::1",
        "localhost:99999999",
        "\xe9vil.example",
    ],
)
def test_public_host_names_are_not_allowed(host: str) -> None:
    assert not allows(host)


def test_configured_host_names_are_allowed() -> None:
    assert allows("rls.example.com:8080", "rls.example.com")
    assert allows("RLS.example.com.", "rls.Example.com.")
    assert not allows("a.rls.example.com", "rls.example.com")
    assert allows("a.b.example.com", "*.example.com")
    assert not allows("example.com", "*.example.com")
    assert not allows("evilexample.com", "*.example.com")
    assert allows("evil.example", "*")
    assert not allows("evil.example", "")


def test_host_may_be_missing_but_not_repeated() -> None:
    hosts = AllowedHosts()
    assert hosts.allow([])
    assert not hosts.allow([(b"host", b"localhost"), (b"host", b"localhost")])
