"""REDIS_… and REDIS_PERSECOND_…: the servers they name, errors and warnings."""

from __future__ import annotations

import traceback

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import RedisServers
from ratelimit_rls.settings.redis_address import RedisAddress, RedisTls
from tests.unit.conftest import Read

SECRET = "hush"
REDIS = {"REDIS_URL": "localhost:6379"}
SECOND = {**REDIS, "REDIS_PERSECOND": "true", "REDIS_PERSECOND_URL": "second:6379"}


def servers(read: Read, **environ: str) -> RedisServers:
    found = read(**environ).redis
    assert found is not None
    return found


def credentials(address: RedisAddress | None) -> tuple[str, str]:
    assert address is not None
    return address.username, address.password.get_secret_value()


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"REDIS_URL": "cache:6379"}, "redis://cache:6379"),
        ({"REDIS_URL": ":6379"}, "redis://localhost:6379"),
        ({"REDIS_URL": "[::1]:6379"}, "redis://[::1]:6379"),
        ({"REDIS_URL": "cache:6379", "REDIS_SOCKET_TYPE": "tcp"}, "redis://cache:6379"),
        ({"REDIS_URL": "cache:6379", "REDIS_SOCKET_TYPE": "tcp4"}, "redis://cache:6379"),
        ({"REDIS_URL": "/run/redis.sock"}, "unix:///run/redis.sock"),
        ({"REDIS_URL": "/run/redis.sock", "REDIS_SOCKET_TYPE": "unix"}, "unix:///run/redis.sock"),
        ({"REDIS_URL": "redis.sock", "REDIS_SOCKET_TYPE": "unix"}, "unix://redis.sock"),
        ({"REDIS_URL": "redis://cache"}, "redis://cache:6379"),
        ({"REDIS_URL": "redis://me:hush@cache:7000/3"}, "redis://me@cache:7000/3"),
        ({"REDIS_URL": "redis://cache?db=3&username=me&password=hush"}, "redis://me@cache:6379/3"),
        ({"REDIS_URL": "unix://me:hush@/run/redis.sock?db=2"}, "unix://me@/run/redis.sock?db=2"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "you:loud"}, "redis://you@cache:6379"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "loud"}, "redis://cache:6379"),
        ({"REDIS_URL": "rediss://me:hush@cache:7000/3"}, "rediss://me@cache:7000/3"),
        ({"REDIS_URL": "cache:6379", "REDIS_TLS": "true"}, "rediss://cache:6379"),
        ({"REDIS_URL": "redis://cache", "REDIS_TLS": "true"}, "rediss://cache:6379"),
        ({"REDIS_URL": "cache:6379", "REDIS_TYPE": "Single"}, "redis://cache:6379"),
    ],
)
def test_single_server_url(read: Read, environ: dict[str, str], address: str) -> None:
    found = servers(read, **environ)
    assert (found.kind, str(found), len(found.addresses)) == ("single", address, 1)


@pytest.mark.parametrize("environ", [{}, {"REDIS_URL": ""}, {"REDIS_SOCKET_TYPE": "tcp"}])
def test_embedded_store_without_redis_url(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).redis is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"REDIS_URL": "a:1,b:2"}, "redis://a:1,redis://b:2"),
        ({"REDIS_URL": "a:1, b:2", "REDIS_TYPE": "cluster"}, "redis://a:1,redis://b:2"),
        ({"REDIS_URL": "a:1", "REDIS_TYPE": "CLUSTER"}, "redis://a:1"),
        ({"REDIS_URL": "redis://a,redis://b:2/0"}, "redis://a:6379,redis://b:2"),
        ({"REDIS_URL": "rediss://a:1,b:2"}, "rediss://a:1,rediss://b:2"),
        ({"REDIS_URL": "a:1,b:2", "REDIS_TLS": "true"}, "rediss://a:1,rediss://b:2"),
        ({"REDIS_URL": "redis://me:hush@a:1,b:2"}, "redis://me@a:1,redis://me@b:2"),
        ({"REDIS_URL": "[::1]:1,[::1]:2", "REDIS_SOCKET_TYPE": "tcp"}, "redis://[::1]:1,redis://[::1]:2"),
    ],
)
def test_cluster_url(read: Read, environ: dict[str, str], text: str) -> None:
    found = servers(read, **environ)
    assert (found.kind, str(found), found.master, found.data) == ("cluster", text, "", None)


def test_cluster_nodes_share_credentials_and_tls(read: Read) -> None:
    """Nodes that are discovered later need the same credentials and TLS."""
    by_url = servers(read, REDIS_URL="redis://me:hush@a:1,b:2")
    assert [credentials(node) for node in by_url.addresses] == [("me", "hush")] * 2
    by_auth = servers(read, REDIS_URL="redis://me:hush@a:1,b:2", REDIS_AUTH="you:loud")
    assert [credentials(node) for node in by_auth.addresses] == [("you", "loud")] * 2
    by_file = servers(read, REDIS_URL="redis://me:hush@a:1,b:2", REDIS_AUTH_FILE="/run/auth")
    assert [(credentials(node), node.auth_file) for node in by_file.addresses] == [(("", ""), "/run/auth")] * 2


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"REDIS_URL": "main,a:1,b:2"}, "main,redis://a:1,redis://b:2"),
        ({"REDIS_URL": "main, a:1", "REDIS_TYPE": "Sentinel"}, "main,redis://a:1"),
        ({"REDIS_URL": "main,rediss://a,b:2"}, "main,rediss://a:6379,rediss://b:2"),
        ({"REDIS_URL": "main,a:1", "REDIS_TLS": "1"}, "main,rediss://a:1"),
    ],
)
def test_sentinel_url(read: Read, environ: dict[str, str], text: str) -> None:
    found = servers(read, **environ)
    assert (found.kind, str(found), found.master) == ("sentinel", text, "main")
    assert found.data is not None
    assert found.data.tls == found.addresses[0].tls


def test_sentinels_and_master_have_own_credentials(read: Read) -> None:
    both = servers(read, REDIS_URL="main,a:1,b:2", REDIS_AUTH="me:hush", REDIS_SENTINEL_AUTH="guard:loud")
    assert [credentials(sentinel) for sentinel in both.addresses] == [("guard", "loud")] * 2
    assert credentials(both.data) == ("me", "hush")

    by_url = servers(read, REDIS_URL="main,redis://guard:loud@a:1,b:2", REDIS_AUTH_FILE="/run/auth")
    assert [(credentials(one), one.auth_file) for one in by_url.addresses] == [(("guard", "loud"), "")] * 2
    assert by_url.data == RedisAddress(auth_file="/run/auth")


@pytest.mark.parametrize(
    ("environ", "username", "password"),
    [
        ({"REDIS_URL": "redis://me:h%40sh@cache"}, "me", "h@sh"),
        ({"REDIS_URL": "redis://:a%2Cb@cache"}, "", "a,b"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "loud"}, "", "loud"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "you:l:oud"}, "you", "l:oud"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH_FILE": "/run/auth"}, "", ""),
        ({"REDIS_URL": "cache:1"}, "", ""),
    ],
)
def test_redis_auth_replaces_credentials_of_url(
    read: Read, environ: dict[str, str], username: str, password: str
) -> None:
    address = servers(read, **environ).addresses[0]
    assert credentials(address) == (username, password)
    assert address.auth_file == environ.get("REDIS_AUTH_FILE", "")


def test_tls_files(read: Read) -> None:
    files = {
        "REDIS_TLS_CACERT": "/ca",
        "REDIS_TLS_CLIENT_CERT": "/cert",
        "REDIS_TLS_CLIENT_KEY": "/key",
        "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION": "true",
    }
    tls = RedisTls("/ca", "/cert", "/key", check_hostname=False)
    assert servers(read, REDIS_URL="a:1", REDIS_TLS="true", **files).addresses[0].tls == tls
    assert servers(read, REDIS_URL="rediss://a:1", **files).addresses[0].tls == tls
    assert servers(read, REDIS_URL="rediss://a:1").addresses[0].tls == RedisTls()
    assert servers(read, REDIS_URL="a:1", **files).addresses[0].tls is None


def test_persecond_redis_url(read: Read) -> None:
    settings = read(
        REDIS_URL="first:6379",
        REDIS_AUTH="hush",
        REDIS_TLS_CACERT="/ca",
        REDIS_PERSECOND="true",
        REDIS_PERSECOND_TYPE="SENTINEL",
        REDIS_PERSECOND_SOCKET_TYPE="tcp",
        REDIS_PERSECOND_URL="main,a:1",
        REDIS_PERSECOND_AUTH="me:loud",
        REDIS_PERSECOND_SENTINEL_AUTH="guard",
        REDIS_PERSECOND_TLS="true",
    )
    second = settings.redis_persecond_servers
    assert second is not None
    assert (str(settings.redis), str(second)) == ("redis://first:6379", "main,rediss://a:1")
    assert (credentials(second.addresses[0]), credentials(second.data)) == (("", "guard"), ("me", "loud"))
    assert second.addresses[0].tls == RedisTls("/ca")
    assert settings.warnings() == []


def test_persecond_redis_is_off_by_default(read: Read) -> None:
    assert read(**REDIS).redis_persecond_servers is None
    assert read(**SECOND).redis_persecond_servers == RedisServers("single", (RedisAddress("second"),))
    assert read(**{**SECOND, "REDIS_PERSECOND": "false"}).redis_persecond_servers is None


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        # single address
        (
            {**REDIS, "REDIS_SOCKET_TYPE": "udp"},
            "REDIS_SOCKET_TYPE='udp' is not a network; use tcp, tcp4, tcp6 or unix",
        ),
        ({**REDIS, "REDIS_SOCKET_TYPE": "unix"}, "REDIS_URL is host:port, but REDIS_SOCKET_TYPE=unix"),
        ({"REDIS_URL": "/r.sock", "REDIS_SOCKET_TYPE": "tcp"}, "REDIS_URL is a socket path, but REDIS_SOCKET_TYPE=tcp"),
        ({"REDIS_URL": "localhost"}, "REDIS_URL has no port"),
        ({"REDIS_URL": "localhost:port"}, "REDIS_URL has no port"),
        ({"REDIS_URL": "::1:6379"}, "REDIS_URL has an IPv6 address without brackets"),
        ({"REDIS_URL": "http://localhost"}, "REDIS_URL has a scheme other than redis, rediss or unix"),
        ({"REDIS_URL": "redis://localhost/zero"}, "REDIS_URL has a database that is not a number"),
        (
            {"REDIS_URL": "redis://localhost?tls=1"},
            "REDIS_URL has a parameter that is not one of db, username, password",
        ),
        ({"REDIS_URL": "redis://:6379"}, "REDIS_URL names no host"),
        ({"REDIS_URL": "redis://h:port"}, "REDIS_URL is not a valid URL"),
        ({"REDIS_URL": "unix://tmp/r.sock"}, "REDIS_URL names no socket"),
        ({"REDIS_URL": "u:p@localhost:6379"}, "REDIS_URL has credentials but no scheme"),
        ({"REDIS_URL": "/r.sock", "REDIS_TLS": "true"}, "REDIS_TLS=true is not valid for a Unix socket"),
        # type
        ({"REDIS_TYPE": "ring"}, "REDIS_TYPE='ring': Unrecognized redis type ring; use SINGLE, CLUSTER or SENTINEL"),
        ({"REDIS_TYPE": "cluster"}, "REDIS_TYPE=cluster needs REDIS_URL"),
        ({"REDIS_TYPE": "SINGLE", "REDIS_URL": "a:1,b:2"}, "REDIS_URL is a list, but REDIS_TYPE=SINGLE"),
        ({"REDIS_TYPE": "sentinel", "REDIS_URL": "a:1"}, "Expected master name and a list of urls for the sentinels"),
        ({"REDIS_TYPE": "sentinel", "REDIS_URL": "a:1,b:2"}, "REDIS_URL: Expected master name and a list of urls"),
        # lists
        ({"REDIS_URL": "a:1,b"}, "REDIS_URL: element 2 has no port; use host:port"),
        ({"REDIS_URL": "a:1,,b:2"}, "REDIS_URL: element 2 is empty; use host:port,host:port,…"),
        ({"REDIS_URL": "main,a"}, "REDIS_URL: element 2 has no port"),
        ({"REDIS_URL": "/a.sock,b:1"}, "REDIS_URL: element 1 is a socket path; in a list, use host:port"),
        (
            {"REDIS_URL": "a:1,b:2", "REDIS_SOCKET_TYPE": "unix"},
            "REDIS_SOCKET_TYPE=unix is not valid for the nodes of a cluster",
        ),
        ({"REDIS_URL": "main,b:2", "REDIS_SOCKET_TYPE": "unix"}, "REDIS_SOCKET_TYPE=unix is not valid for sentinels"),
        ({"REDIS_URL": "redis://a/1,b:2"}, "REDIS_URL names a database, but a cluster has only database 0; remove it"),
        (
            {"REDIS_URL": "redis://a/1", "REDIS_TYPE": "CLUSTER"},
            "REDIS_URL names a database, but a cluster has only database 0",
        ),
        ({"REDIS_URL": "main,redis://a/1"}, "REDIS_URL names a database, but sentinels have none"),
        ({"REDIS_URL": "redis://x:1@a,redis://y:1@b"}, "REDIS_URL has more than one user or password"),
        # combinations
        ({**REDIS, "REDIS_AUTH": "x", "REDIS_AUTH_FILE": "/f"}, "REDIS_AUTH and REDIS_AUTH_FILE are both set"),
        ({**REDIS, "REDIS_TLS_CLIENT_CERT": "c"}, "REDIS_TLS_CLIENT_CERT is set without REDIS_TLS_CLIENT_KEY"),
        ({**REDIS, "REDIS_TLS_CLIENT_KEY": "k"}, "REDIS_TLS_CLIENT_KEY is set without REDIS_TLS_CLIENT_CERT"),
        ({**REDIS, "REDIS_TIMEOUT": "0s"}, "REDIS_TIMEOUT='0s' is too small"),
        # second Redis
        ({**REDIS, "REDIS_PERSECOND": "true"}, "REDIS_PERSECOND=true needs REDIS_PERSECOND_URL"),
        ({"REDIS_PERSECOND": "true", "REDIS_PERSECOND_URL": "a:1"}, "REDIS_PERSECOND=true needs REDIS_URL"),
        ({**SECOND, "REDIS_PERSECOND_TYPE": "ring"}, "REDIS_PERSECOND_TYPE='ring': Unrecognized redis type ring"),
        ({**SECOND, "REDIS_PERSECOND_URL": "a"}, "REDIS_PERSECOND_URL has no port"),
        (
            {**SECOND, "REDIS_PERSECOND_SOCKET_TYPE": "unix"},
            "REDIS_PERSECOND_URL is host:port, but REDIS_PERSECOND_SOCKET_TYPE=unix",
        ),
        (
            {**SECOND, "REDIS_PERSECOND_AUTH": "x", "REDIS_PERSECOND_AUTH_FILE": "/f"},
            "REDIS_PERSECOND_AUTH and REDIS_PERSECOND_AUTH_FILE are both set",
        ),
    ],
)
def test_invalid_redis_settings_are_rejected(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**environ)
    (line,) = str(raised.value).splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"REDIS_AUTH": "hush"}, "REDIS_AUTH has no effect without REDIS_URL: the embedded store is used"),
        ({"REDIS_AUTH_FILE": "/f"}, "REDIS_AUTH_FILE has no effect without REDIS_URL"),
        ({"REDIS_SENTINEL_AUTH": "hush"}, "REDIS_SENTINEL_AUTH has no effect without REDIS_URL"),
        ({"REDIS_TLS": "true"}, "REDIS_TLS has no effect without REDIS_URL"),
        ({**REDIS, "REDIS_SENTINEL_AUTH": "hush"}, "REDIS_SENTINEL_AUTH has no effect without sentinels in REDIS_URL"),
        ({**REDIS, "REDIS_TLS_CACERT": "/ca"}, "REDIS_TLS_CACERT has no effect without REDIS_TLS=true or rediss://"),
        ({**REDIS, "REDIS_PERSECOND_URL": "a:1"}, "REDIS_PERSECOND_URL has no effect without REDIS_PERSECOND=true"),
        ({**REDIS, "REDIS_PERSECOND_TIMEOUT": "1s"}, "REDIS_PERSECOND_TIMEOUT has no effect without REDIS_PERSECOND"),
        (
            {**SECOND, "REDIS_PERSECOND_SENTINEL_AUTH": "hush"},
            "REDIS_PERSECOND_SENTINEL_AUTH has no effect without sentinels in REDIS_PERSECOND_URL",
        ),
    ],
)
def test_unused_redis_settings_warn(read: Read, environ: dict[str, str], sentence: str) -> None:
    (warning,) = read(**environ).warnings()
    assert sentence in warning


@pytest.mark.parametrize("second_url", ["rediss://second", "second:1"])
def test_tls_files_do_not_warn_if_either_redis_uses_tls(read: Read, second_url: str) -> None:
    warnings = read(**{**SECOND, "REDIS_PERSECOND_URL": second_url, "REDIS_TLS_CACERT": "/ca"}).warnings()
    assert len(warnings) == (second_url == "second:1")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hush@cache",
        "redis://me:hush@cache/x",
        "rediss://me:hush@cache:port",
        "redis://me:hush@[cache",
        "redis://cache?secret=hush",
        "me:hush@cache:6379",
        "redis://me:hush@a,redis://me:hush2@b",
        "redis://me:hu,hush@cache",
        "redis://me:hush@a/1,b:1",
        "me:hush,a:1",
        "main,me:hush@a:1",
        "main,redis://me:hush@a/1",
        "hush",
    ],
)
def test_error_about_url_has_no_secret(read: Read, url: str) -> None:
    for prefix in ("REDIS_", "REDIS_PERSECOND_"):
        with pytest.raises(SettingsError, match=f"{prefix}URL") as raised:
            read(**{**SECOND, f"{prefix}URL": url, f"{prefix}AUTH": SECRET, "GRPC_PORT": "x"})
        assert SECRET not in str(raised.value) + "".join(traceback.format_exception(raised.value))
