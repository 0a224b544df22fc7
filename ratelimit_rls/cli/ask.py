"""`ask`: send a rate limit request to a running server, as Envoy does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import click

from ratelimit_rls.cli.descriptor_options import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import MAX_HITS, Code, Descriptor, Unit

_EXAMPLES = """\b
Examples:
  # which response would Envoy get for alice?
  $ ratelimit-rls ask --domain edge --descriptor user=alice
  # spend three hits at once, over mTLS, and exit with 1 if that is over the limit
  $ ratelimit-rls ask --server rls:8081 --cacert ca.crt --cert me.crt --key me.key \\
      --domain edge --descriptor plan=free,user=alice --hits 3 --fail-over-limit"""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class _Tls:
    """Certificate files. If all are None, the system's CAs are trusted and no client certificate is sent."""

    cacert: Path | None
    cert: Path | None
    key: Path | None


@click.command(epilog=_EXAMPLES, short_help="Send a rate limit request to a running server.")
@click.option(
    "--server",
    default="localhost:8081",
    show_default=True,
    metavar="HOST:PORT|unix:PATH",
    help="Address of the server's gRPC port.",
)
@descriptor_options
@click.option(
    "--hits",
    type=click.IntRange(0, MAX_HITS),
    metavar="N",
    help="Hits to spend on each descriptor; 0 spends nothing. [default: 1]",
)
@click.option("--refund", is_flag=True, help="Refund the hits instead of spending them.")
@click.option(
    "--times", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Send the request N times."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of each request, in seconds.",
)
@click.option("--fail-over-limit", is_flag=True, help="Exit with 1 if any response is OVER_LIMIT.")
@click.option("--fail-no-limit", is_flag=True, help="Exit with 1 if no limit applies to some descriptor.")
@click.option("--tls", is_flag=True, help="Use TLS; implied by --cacert and --cert.")
@click.option("--cacert", type=_FILE, help="CA of the server's certificate (PEM).  [default: the system's CAs]")
@click.option("--cert", type=_FILE, help="Client certificate (PEM); needs --key.")
@click.option("--key", type=_FILE, help="Private key of the client certificate (PEM).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format; json prints one line per response.",
)
def ask(
    server: str,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    hits: int | None,
    refund: bool,
    times: int,
    timeout_s: float,
    fail_over_limit: bool,
    fail_no_limit: bool,
    tls: bool,
    cacert: Path | None,
    cert: Path | None,
    key: Path | None,
    form: str,
) -> ExitCode:
    """Send a rate limit request to a running server, as Envoy does.

    The request is a real one: it spends hits.
    """
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key must be given together")
    parsed = parse_descriptors(descriptors, entries)
    credentials = _Tls(cacert, cert, key) if tls or cacert or cert else None
    request = _request(domain, parsed, hits, refund)
    codes: Counter[str] = Counter()
    unlimited = False
    try:
        for response in _responses(server, credentials, request, times, timeout_s):
            fields = _response_fields(response, parsed)
            codes[fields["code"]] += 1
            unlimited |= any(status["limit"] is None for status in fields["statuses"])
            click.echo(json.dumps(fields) if form == "json" else _text(fields, parsed))
    except _NoResponse as error:
        click.echo(f"Error: {error}", err=True)
        return error.exit_code
    if times > 1 and form == "text":
        click.echo(", ".join(f"{count} {code}" for code, count in codes.items()))
    bad = (fail_over_limit and codes[Code.OVER_LIMIT.name]) or (fail_no_limit and unlimited)
    return ExitCode.BAD if bad else ExitCode.DONE


class _NoResponse(Exception):
    """The call failed: the server, or its store, is unavailable (UNAVAILABLE), or it rejected the request."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _responses(server: str, tls: _Tls | None, request: Any, times: int, timeout_s: float) -> Iterator[Any]:
    import grpc

    from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse

    with _channel(server, tls) as channel:
        call = channel.unary_unary(
            SHOULD_RATE_LIMIT,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=RateLimitResponse.FromString,
        )
        for _ in range(times):
            try:
                response = call(request, timeout=timeout_s)
            except grpc.RpcError as error:
                match error.code():
                    case grpc.StatusCode.UNAVAILABLE:
                        message = f"{server} is unavailable: {error.details()}"
                        raise _NoResponse(message, ExitCode.UNREACHABLE) from error
                    case grpc.StatusCode.DEADLINE_EXCEEDED:
                        message = f"{server} did not respond within {timeout_s:g} s"
                        raise _NoResponse(message, ExitCode.UNREACHABLE) from error
                    case code:
                        raise _NoResponse(
                            f"{server} responded with {code.name}: {error.details()}", ExitCode.BAD
                        ) from error
            yield response


def _request(domain: str, parsed: tuple[Descriptor, ...], hits: int | None, refund: bool) -> Any:
    from ratelimit_rls.protos.messages import RateLimitRequest

    request = RateLimitRequest(domain=domain)
    for descriptor in parsed:
        added = request.descriptors.add(is_negative_hits=refund)
        for key, value in descriptor.entries:
            added.entries.add(key=key, value=value)
        if hits is not None:  # on the descriptor, where 0 means 0; on the request 0 would mean 1
            added.hits_addend.value = hits
    return request


def _channel(server: str, tls: _Tls | None) -> Any:
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(server, options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.cacert.read_bytes() if tls.cacert else None,
        private_key=tls.key.read_bytes() if tls.key else None,
        certificate_chain=tls.cert.read_bytes() if tls.cert else None,
    )
    return grpc.secure_channel(server, credentials, options)


def _response_fields(response: Any, parsed: tuple[Descriptor, ...]) -> dict[str, Any]:
    """Return the response as plain values, in the order of the descriptors."""
    return {
        "code": _name(Code, response.overall_code),
        "statuses": [
            {
                "descriptor": [list(entry) for entry in descriptor.entries],
                "code": _name(Code, status.code),
                "limit": _limit(status.current_limit) if status.HasField("current_limit") else None,
                "remaining": status.limit_remaining,
                "reset_s": status.duration_until_reset.seconds if status.HasField("duration_until_reset") else None,
            }
            for descriptor, status in zip(parsed, response.statuses, strict=False)
        ],
        "headers": [[header.key, header.value] for header in response.response_headers_to_add],
    }


def _limit(limit: Any) -> dict[str, Any]:
    return {"name": limit.name, "requests_per_unit": limit.requests_per_unit, "unit": _name(Unit, limit.unit)}


def _name(enum: type[IntEnum], number: int) -> str:
    """Return the name of an enum value, or the number itself for a value that this version does not know."""
    return enum(number).name if number in enum._value2member_map_ else str(number)


def _text(fields: dict[str, Any], parsed: tuple[Descriptor, ...]) -> str:
    names = [format_descriptor(descriptor) for descriptor in parsed]
    width = max(map(len, names))
    lines = [_colored(fields["code"])]
    for name, status in zip(names, fields["statuses"], strict=False):
        limit = status["limit"]
        details = "no limit"
        if limit:
            details = f"{limit['requests_per_unit']}/{limit['unit'].lower()}, {status['remaining']} left"
            details += "" if status["reset_s"] is None else f", resets in {status['reset_s']}s"
        lines.append(f"  {name:<{width}}  {_colored(status['code'])}  {details}")
    lines.extend(f"  {key}: {value}" for key, value in fields["headers"])
    return "\n".join(lines)


def _colored(code: str) -> str:
    return click.style(code, fg={"OK": "green", "OVER_LIMIT": "red"}.get(code, "yellow"))
