"""Bounds and reasons in docs/security.md match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ratelimit_rls.admin import rate_limits
from ratelimit_rls.core import credential_resolution
from ratelimit_rls.database import database
from ratelimit_rls.database.usage import writer
from ratelimit_rls.h2 import call_headers, connection, frame_handlers, header_blocks, hpack, streams
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.h2.flood_budgets import ALLOWANCES
from ratelimit_rls.identity import jwt
from ratelimit_rls.pipeline import message_bounds
from ratelimit_rls.protos.messages import RESET_LIMIT
from ratelimit_rls.server import file_descriptors
from ratelimit_rls.settings.catalogue import VARIABLES
from ratelimit_rls.telemetry import abuse, line_limits, metrics
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.tls import key_updates
from ratelimit_rls.transport import sockets, tls_listener
from ratelimit_rls.transport.grpc import (
    backlog,
    call_proxy,
    health_check,
    protocol,
    reset_limit,
    standard_services,
)
from ratelimit_rls.transport.http import json_bounds, limits, loop_share, parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/security.md").read_text()
DEFAULTS = {variable.name: variable.default for variable in VARIABLES}
HTTP = limits.HttpLimits()


def tables(first_cell: str) -> list[list[str]]:
    """Return the rows of all tables whose header starts with a text."""
    found = re.findall(rf"^\| {first_cell} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found
    return [[cell.strip() for cell in row.strip("|").split("|")] for rows in found for row in rows.splitlines()]


def size(count: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    raise AssertionError(f"{count} bytes is no round size")


def seconds(count: float) -> str:
    return f"{count:g}s"


FIXED: dict[str, list[int | str]] = {
    "TLS handshakes under way, and of a peer": [tls_listener.MAX_HANDSHAKES, tls_listener.MAX_HANDSHAKES_PER_PEER],
    "TLS handshake": [seconds(tls_listener.HANDSHAKE_TIMEOUT_S)],
    "TLS 1.3 KeyUpdate messages of a connection: at once, and more each second": [
        key_updates.MAX_KEY_UPDATES,
        key_updates.KEY_UPDATES_PER_SECOND,
    ],
    "connections that wait to be accepted": [sockets.LISTEN_BACKLOG],
    "bytes of unfinished messages of a connection": [size(frame_handlers.MAX_UNFINISHED_BYTES)],
    "calls of a connection that wait to be decided": [size(backlog.PAUSE_BYTES)],
    "… that were read or unpacked at once": [size(backlog.MAX_CONNECTION_BYTES)],
    "calls that wait to be decided": [size(backlog.MAX_BACKLOG_BYTES)],
    "calls that wait to be decided before large reads wait": [backlog.MAX_READ_AHEAD, size(protocol.LARGE_READ_BYTES)],
    "different credentials in the entries of an RLS request": [credential_resolution.MAX_CREDENTIALS],
    "calls of a connection that are being decided, cancelled ones included": [streams.MAX_DECIDED_SHARE],
    "header fields of a call": [hpack.MAX_FIELDS],
    "fields, and table size updates, of a header block": [hpack.MAX_FIELDS_READ, hpack.MAX_SIZE_UPDATES],
    "a header block, as sent": [size(header_blocks.MAX_BLOCK_BYTES), header_blocks.MAX_BLOCK_FRAMES],
    "a header list, decoded": [size(header_blocks.MAX_LIST_BYTES)],
    "connection preface": [seconds(Timeouts().preface_s)],
    "a frame or a header block to its end": [seconds(Timeouts().frame_s)],
    "input that waits for its turn, to its end, once some of it has been read": [seconds(Timeouts().frame_s)],
    "a socket that takes nothing": [seconds(Timeouts().write_s)],
    "TCP keepalive: idle, interval, probes": [
        seconds(sockets.KEEPALIVE_IDLE_S),
        seconds(sockets.KEEPALIVE_INTERVAL_S),
        sockets.KEEPALIVE_PROBES,
    ],
    "proxied calls a second of a peer": [call_proxy.MAX_PROXIED_CALLS_PER_SECOND_OF_PEER],
    "proxied calls under way of a connection, of a peer and of the process": [
        call_proxy.MAX_PROXIED_CALLS_OF_CONNECTION,
        call_proxy.MAX_PROXIED_CALLS_OF_PEER,
        call_proxy.MAX_PROXIED_CALLS,
    ],
    "`ResetLimit` under way": [reset_limit.MAX_CONCURRENT_CALLS],
    "all messages of a proxied call": [size(call_proxy.MAX_PROXIED_CALL_BYTES)],
    "messages of a proxied call, and of reflection": [
        standard_services.MAX_MESSAGES[RESET_LIMIT],
        standard_services.MAX_REFLECTION_MESSAGES,
    ],
    "a health check": [size(health_check.MAX_CHECK_BYTES)],
    "an ext_authz check": [size(message_bounds.MAX_MESSAGE_BYTES)],
    "a message of `RateLimiter`, and its fields": [
        size(message_bounds.MAX_LIMITER_MESSAGE_BYTES),
        message_bounds.MAX_LIMITER_FIELDS,
    ],
    "values of `-bin` metadata, decoded for relayed calls and the request id only": [call_headers.MAX_BINARY_VALUES],
    "header blocks of a connection that are remembered": [
        header_blocks.MAX_CACHED_BLOCKS,
        size(header_blocks.MAX_CACHED_BYTES),
    ],
    "a JSON Web Token": [size(jwt.MAX_TOKEN_LENGTH)],
    "request line and header fields": [size(limits.MAX_HEAD_BYTES), limits.MAX_HEADER_FIELDS],
    "a head to its end": [seconds(HTTP.head_s)],
    "a body to its end, and between two bytes of it": [seconds(HTTP.body_s), seconds(HTTP.body_idle_s)],
    "an answer that is not read": [seconds(HTTP.write_stall_s)],
    "an idle connection": [seconds(HTTP.keep_alive_s)],
    "bytes of unfinished requests of all HTTP ports": [size(limits.MAX_BUFFERED_BYTES)],
    "the rest of a body whose answer was sent": [seconds(HTTP.drain_s), size(limits.MAX_DRAINED_BYTES)],
    "requests of all HTTP ports that are begun in a turn of the loop": [loop_share.MAX_READS_PER_ITERATION],
    "chunks of a body: free, then bytes a chunk on average": [parser.FREE_CHUNKS, parser.MIN_CHUNK_BYTES],
    "values in a body of `/json`": [json_bounds.MAX_VALUES],
    "admin API, for each token a minute": [rate_limits.READS_PER_MINUTE, rate_limits.WRITES_PER_MINUTE],
    "failed log-ins of an address a minute, admin API and gRPC together": [rate_limits.FAILED_LOGINS_PER_MINUTE],
    "series of metrics by names that clients choose": [metrics.MAX_PATHS],
    "lines of `client_abuse` in the log a second": [abuse.LOG_LINES_PER_SECOND],
    "lines of gRPC's library in the log a minute": [line_limits.MAX_LINES_PER_MINUTE],
}


@pytest.mark.parametrize("row", tables("what"), ids=lambda row: row[0])
def test_documented_bound_equals_the_code(row: list[str]) -> None:
    what, setting, default, _ = row
    stated = re.findall(r"`([^`]+)`", default)
    if setting == "fixed":
        assert stated == [str(value) for value in FIXED[what]]
    else:
        assert stated == [DEFAULTS[setting.strip("`")]]


def test_every_fixed_bound_is_documented() -> None:
    assert {row[0] for row in tables("what") if row[1] == "fixed"} == set(FIXED)


@pytest.mark.parametrize("name", [name for name in DEFAULTS if re.match(r"RLS_(GRPC_|HTTP_)?MAX_", name)])
def test_every_configurable_bound_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_documented_setting_exists() -> None:
    named = set(re.findall(r"\b(?:RLS|GRPC|REDIS|DEBUG|PROMETHEUS)_[A-Z0-9_]+\b", PAGE))
    assert named - set(DEFAULTS) == set()


def test_every_documented_chart_value_exists() -> None:
    values = yaml.safe_load((ROOT / "charts/ratelimit-rls/values.yaml").read_text())
    parts = "|".join(name for name, value in values.items() if isinstance(value, dict) and name != "settings")
    for path in re.findall(rf"`((?:{parts})(?:\.[a-zA-Z]+)+)`", PAGE):
        found = values
        for key in path.split("."):
            assert key in found, path
            found = found[key]


def test_documented_floods_have_budgets() -> None:
    stated = {row[4].strip("`"): tuple(map(float, row[1:4])) for row in tables("frames")}
    assert stated == {reason.value: tuple(allowance) for reason, allowance in ALLOWANCES.items()}
    assert f"DATA under {frame_handlers.TINY_DATA_BYTES} bytes" in PAGE
    assert f"{frame_handlers.FIELD_BYTES} bytes of a block count as one more" in PAGE
    assert f"not within {connection.ANNOUNCED_S:g} s of a lower limit" in PAGE
    fast_ms = round(connection.RAPID_RESET_S * 1000)
    assert f"calls given up within {fast_ms} to {2 * fast_ms} ms" in PAGE


def test_documented_file_descriptors_equal_the_code() -> None:
    handshakes, margin = tls_listener.MAX_HANDSHAKES, file_descriptors.MARGIN
    sentence = f"{handshakes} for handshakes on each port with TLS, and {margin} for everything else"
    assert sentence in " ".join(PAGE.split())


def test_documented_database_bounds_equal_the_code() -> None:
    for sentence in (
        f"has {database.TRANSACTION_TIMEOUT_S:g} s for administrators "
        f"and {database.BACKGROUND_TIMEOUT_S:g} s for records",
        f"at most {database.LOCK_TIMEOUT_S:g} s (records {database.BACKGROUND_LOCK_TIMEOUT_S:g} s) for SQLite's lock",
        f"at most {database.MAX_CONNECTIONS} connections",
        f"written {writer.ROWS_PER_TRANSACTION} rows at a time",
        f"about {backlog.MAX_ITERATION_WEIGHT:,} descriptors",
    ):
        assert sentence in " ".join(PAGE.split())


def test_every_abuse_reason_is_documented_once() -> None:
    assert sorted(row[0].strip("`") for row in tables("reason")) == sorted(Abuse)


def test_every_documented_abuse_reason_exists() -> None:
    cells = [row[3] for row in tables("what")]
    named = {name for cell in cells for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    assert named <= {*Abuse, "_other"}


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        name, _, anchor = target.partition("#")
        text = (ROOT / "docs" / name).read_text() if name else PAGE
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, target
