"""`ask`: one question to a running server, as Envoy would put it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import click

from ratelimit_rls.cli.descriptor import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import MAX_HITS, Code, Descriptor, Unit

_EXAMPLES = """\b
Examples:
  # what would Envoy be told about alice?
  $ ratelimit-rls ask --domain edge --descriptor user=alice
  # spend three at once, over mTLS, and fail the script if that is too much
  $ ratelimit-rls ask --server rls:8081 --cacert ca.crt --cert me.crt --key me.key \\
      --domain edge --descriptor plan=free,user=alice --hits 3 --fail-over-limit"""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class _Tls:
    """Files of certificates; None of all of them means the system's CAs and no certificate of our own."""

    cacert: Path | None
    cert: Path | None
    key: Path | None


@click.command(epilog=_EXAMPLES)
@click.option(
    "--server", default="localhost:8081", show_default=True, metavar="HOST:PORT|unix:PATH", help="Whom to ask."
)
@descriptor_options
@click.option(
    "--hits", type=click.IntRange(0, MAX_HITS), metavar="N", help="Of every descriptor; 0 looks and spends nothing."
)
@click.option("--refund", is_flag=True, help="Give the hits back.")
@click.option("--times", type=click.IntRange(min=1), default=1, metavar="N", help="Ask this often.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    help="Of each call.",
)
@click.option("--fail-over-limit", is_flag=True, help="Exit with 1 if any answer is OVER_LIMIT.")
@click.option("--fail-no-limit", is_flag=True, help="Exit with 1 if any descriptor has no limit.")
@click.option("--tls", is_flag=True, help="Use TLS; the next three say so, too.")
@click.option("--cacert", type=_FILE, help="CA of the server's certificate (PEM); default: the system's.")
@click.option("--cert", type=_FILE, help="Certificate to show to the server (PEM).")
@click.option("--key", type=_FILE, help="Its private key (PEM).")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="json: one line an answer.")
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
    """Ask a running server, as Envoy would.

    It is a real call: hits are spent.
    """
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key belong together")
    asked = parse_descriptors(descriptors, entries)
    credentials = _Tls(cacert, cert, key) if tls or cacert or cert else None
    request = _request(domain, asked, hits, refund)
    codes: Counter[str] = Counter()
    unlimited = False
    try:
        for response in _responses(server, credentials, request, times, timeout_s):
            answer = _answer(response, asked)
            codes[answer["code"]] += 1
            unlimited |= any(status["limit"] is None for status in answer["statuses"])
            click.echo(json.dumps(answer) if form == "json" else _text(answer, asked))
    except _NoAnswer as fault:
        click.echo(f"Error: {fault}", err=True)
        return fault.exit_code
    if times > 1 and form == "text":
        click.echo(", ".join(f"{count} {code}" for code, count in codes.items()))
    bad = (fail_over_limit and codes[Code.OVER_LIMIT.name]) or (fail_no_limit and unlimited)
    return ExitCode.BAD if bad else ExitCode.DONE


class _NoAnswer(Exception):
    """The server is away (or its own dependency is: it then says UNAVAILABLE), or does not like the question."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _responses(server: str, tls: _Tls | None, request: Any, times: int, timeout_s: float) -> Iterator[Any]:
    import grpc

    from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse

    with _channel(server, tls) as channel:
        call = channel.unary_unary(
            SHOULD_RATE_LIMIT,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=RateLimitResponse.FromString,
        )
        for _ in range(times):
            try:
                response = call(request, timeout=timeout_s)
            except grpc.RpcError as fault:
                match fault.code():
                    case grpc.StatusCode.UNAVAILABLE:
                        message = f"{server} is unavailable: {fault.details()}"
                        raise _NoAnswer(message, ExitCode.UNREACHABLE) from fault
                    case grpc.StatusCode.DEADLINE_EXCEEDED:
                        message = f"{server} did not answer within {timeout_s:g} s"
                        raise _NoAnswer(message, ExitCode.UNREACHABLE) from fault
                    case code:
                        raise _NoAnswer(f"{server} answered {code.name}: {fault.details()}", ExitCode.BAD) from fault
            yield response


def _request(domain: str, asked: tuple[Descriptor, ...], hits: int | None, refund: bool) -> Any:
    from ratelimit_rls.transport.grpc.messages import RateLimitRequest

    request = RateLimitRequest(domain=domain)
    for descriptor in asked:
        added = request.descriptors.add(is_negative_hits=refund)
        for key, value in descriptor.entries:
            added.entries.add(key=key, value=value)
        if hits is not None:  # on the descriptor, where 0 means 0: on the request it would mean 1
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


def _answer(response: Any, asked: tuple[Descriptor, ...]) -> dict[str, Any]:
    """The response as plain values, in the order of the descriptors."""
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
            for descriptor, status in zip(asked, response.statuses, strict=False)
        ],
        "headers": [[header.key, header.value] for header in response.response_headers_to_add],
    }


def _limit(limit: Any) -> dict[str, Any]:
    return {"name": limit.name, "requests_per_unit": limit.requests_per_unit, "unit": _name(Unit, limit.unit)}


def _name(enum: type[IntEnum], number: int) -> str:
    """Its name; the number itself if the server knows more than we do."""
    return enum(number).name if number in enum._value2member_map_ else str(number)


def _text(answer: dict[str, Any], asked: tuple[Descriptor, ...]) -> str:
    names = [format_descriptor(descriptor) for descriptor in asked]
    width = max(map(len, names))
    lines = [_colored(answer["code"])]
    for name, status in zip(names, answer["statuses"], strict=False):
        limit = status["limit"]
        told = "no limit"
        if limit:
            told = f"{limit['requests_per_unit']}/{limit['unit'].lower()}, {status['remaining']} left"
            told += "" if status["reset_s"] is None else f", resets in {status['reset_s']}s"
        lines.append(f"  {name:<{width}}  {_colored(status['code'])}  {told}")
    lines.extend(f"  {key}: {value}" for key, value in answer["headers"])
    return "\n".join(lines)


def _colored(code: str) -> str:
    return click.style(code, fg={"OK": "green", "OVER_LIMIT": "red"}.get(code, "yellow"))
