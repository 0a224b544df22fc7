"""Comparison of the two readers of RateLimitRequests, on random rules and messages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from math import inf
from random import Random
from typing import Any, NamedTuple

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.entitlements import Block, EntitlementValidity
from ratelimit_rls.core.model import Limit, Purpose, Subject, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.protos.messages import RateLimitRequest
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder

DOMAIN = "d%/"
KEYS = ("a", "user", "tier", "k:/%")
VALUES = ("a", "b", "ab", "a/b", "%", "a:b", "{~ }", "10.0.0.1", "::1", "*")
UNLIKELY_VALUES = ("", "é", "ä" * 63, "x" * 100, "x" * 118, "x" * 127, "x" * 128, "/" * 110)
BYTES = b"\x00\x01\x02\x03\x05\x08\x0a\x10\x12\x18\x1a\x22\x7f\x80\xff"
"""Tags, lengths and parts of long numbers: what can change the meaning of a message."""

POLICIES = (Policy(), Policy(key_prefix="p%:{x}"), Policy(shadow_mode=True), Policy(quota_mode=True))
STORE = EmbeddedStore()


class ValueEntitlement(NamedTuple):
    limits: tuple[Limit, ...] | None
    source: str = "custom"
    block: Block | None = None
    until_s: float = inf
    stale: bool = False


TIER_LIMITS = (Limit(7, Unit.MINUTE), Limit(70, Unit.DAY))


class ValueEntitlements:
    """Subjects whose values decide what they are entitled to: a tier, limits of their own, a block, or nothing."""

    def of(self, kind: Subject, subject: str, tier: str) -> ValueEntitlement:
        match subject[:1]:
            case "a":
                return ValueEntitlement(TIER_LIMITS, "tier gold")
            case "b":
                return ValueEntitlement((Limit(len(subject), Unit.HOUR),))
            case "1":
                return ValueEntitlement(None, "", Block("reason"))
            case _:
                return ValueEntitlement((Limit(1, Unit.HOUR),) if tier == "a" else None, "")


class Readers:
    """Two codecs of one rate limiter, so that the same request has the same plan template in both.

    One uses the compiled reader, the other only the general one.
    """

    def __init__(self, rules: bytes, policy: Policy, purpose: Purpose) -> None:
        active = ActiveRules()
        active.swap(compile_documents({"f": rules}).tree, digest="", files=1, loaded_at=datetime.now(UTC))
        limiter = RateLimiter(
            active,
            STORE,
            Metrics(),
            policy,
            entitlements=ValueEntitlements(),
            usage_recorder=UsageRecorder(sample=0, max_waiting=1),
        )
        self._codec, self._general = (RlsCodec(limiter, purpose=purpose) for _ in range(2))

    def compare(self, messages: Iterable[bytes]) -> int:
        """Assert that both prepare each message alike. Return to how many the compiled reader applied a rule."""
        return sum([self.compare_one(message) for message in messages])

    def compare_one(self, message: bytes) -> bool:
        """Assert that both prepare a message alike. Return whether the compiled reader applied a rule."""
        assert self._codec._reader is not None
        read = self._codec._reader.read(message)
        compiled, expected = outcome(self._codec, message), outcome(self._general, message, is_general=True)
        assert compiled == expected, message
        return read is not None and any(read.tags)


def outcome(codec: RlsCodec, message: bytes, *, is_general: bool = False) -> tuple[object, ...] | str:
    """Return what a request is prepared to, without objects that are equal to themselves only, or its error."""
    try:
        call, response_template, request_id = codec._decode_any(message) if is_general else codec.decode(message)
    except BadRequest as error:
        return str(error)
    template, metric_counters, prepared, valid, usage_entry = call
    assert usage_entry is not None
    entitlements = valid._entitlements if isinstance(valid, EntitlementValidity) else ()
    recorded = usage_entry.caller, usage_entry.rule
    if template.rejection is not None:  # such a template belongs to one request
        return repr(template), entitlements, recorded, request_id
    return template, metric_counters, prepared, entitlements, recorded, response_template, request_id


class RandomRules:
    """Random rules, with their readers and requests that mostly match them."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self._descriptors = random_level(self._chance, depth=0)
        sharding = self._chance.choice(["descriptor", "domain", {"key": "user"}, {"key": "a"}])
        document = {"domain": DOMAIN, "shard_by": sharding, "descriptors": self._descriptors}
        purpose = self._chance.choice([Purpose.DECIDE, Purpose.DECIDE, Purpose.LOOK, Purpose.REPORT])
        self.readers = Readers(json.dumps(document).encode(), self._chance.choice(POLICIES), purpose)

    def messages(self, number: int) -> list[bytes]:
        return [random_message(self._chance, self._descriptors) for _ in range(number)]

    def compare(self, messages: int = 20) -> int:
        """Compare both readers on random messages. Return to how many the compiled reader applied a rule."""
        sent = self.messages(messages)
        return self.readers.compare([*sent, *[mutated(self._chance, message) for message in sent], *sent])


def random_level(chance: Random, depth: int) -> list[dict[str, Any]]:
    """Return the descriptors of one level of rules."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(chance.randint(1, 5)):
        one: dict[str, Any] = {"key": chance.choice(KEYS) if chance.random() < 0.97 else "a*", **_selection(chance)}
        identity = json.dumps([one.get(name) for name in ("key", "value", "match")])
        if chance.random() < 0.7:
            one |= _limits(chance)
            if "share_threshold" in one:
                one.pop("limits_of", None)
            if chance.random() < 0.15:
                one["detailed_metric"] = True
        if chance.random() < 0.1:
            one["value_to_metric"] = True
        if depth < 2 and chance.random() < 0.4:
            one["descriptors"] = random_level(chance, depth + 1)
        found[identity] = one
    return list(found.values())


def _selection(chance: Random) -> dict[str, Any]:
    value = chance.choice(VALUES)
    return chance.choice(
        [
            {},
            {},
            {"value": value},
            {"value": value + "*"},
            {"value": value + "*", "share_threshold": True},
            {"match": {"prefix": value}},
            {"match": {"cidr": "10.0.0.0/8"}, "share_threshold": True},
            {"match": {"regex": "a.*"}},
        ]
    )


def _limits(chance: Random) -> dict[str, Any]:
    limit = {"unit": chance.choice(["second", "day"]), "requests_per_unit": chance.randint(0, 9)}
    return chance.choice(
        [
            {"rate_limit": limit},
            {"rate_limit": limit | {"name": "n"}},
            {"rate_limit": {"unlimited": True}},
            {"rate_limit": limit | {"replaces": [{"name": "n"}]}},
            {"rate_limit": limit | {"algorithm": "gcra"}, "penalty": {"after": 2, "within": "1m", "multipliers": [2]}},
            {"rate_limit": {"unit": "month", "requests_per_unit": 3, "calendar": True, "timezone": "Europe/Berlin"}},
            *[{"rate_limit": limit, "limits_of": "user"}] * 3,
            {"limits": [limit | {"unit": "hour"}, limit | {"unit": "minute", "name": "n"}]},
        ]
    )


def random_message(chance: Random, rules: list[dict[str, Any]]) -> bytes:
    """Return a request whose descriptors mostly follow a path of the rules."""
    request = RateLimitRequest(domain=DOMAIN if chance.random() < 0.97 else chance.choice(["", "other"]))
    request.hits_addend = chance.choice((0, 0, 0, 0, 1, 2, 16)) if chance.random() < 0.95 else chance.choice((17, 300))
    for _ in range(chance.choice((1, 1, 2, 3, 4)) if chance.random() < 0.98 else 0):
        descriptor = request.descriptors.add()
        for key, value in _entries(chance, rules):
            descriptor.entries.add(key=key, value=value)
        if chance.random() < 0.01:
            descriptor.hits_addend.value = chance.randint(0, 3)
    return bytes(request.SerializeToString())


def _entries(chance: Random, rules: list[dict[str, Any]]) -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    while rules and (not entries or chance.random() < 0.9):
        rule = chance.choice(rules)
        likely = rule.get("value") or rule.get("match", {}).get("prefix") or chance.choice(VALUES)
        value = likely.replace("*", chance.choice(VALUES)) if chance.random() < 0.7 else chance.choice(VALUES)
        if chance.random() < 0.01:
            value = chance.choice(UNLIKELY_VALUES)
        key = rule["key"].replace("*", "b") if chance.random() < 0.98 else chance.choice((*KEYS, "c", ""))
        entries.append((key, value))
        rules = rule.get("descriptors", [])
    if chance.random() < 0.05:
        entries.append((chance.choice(KEYS), chance.choice(VALUES)))
    return entries


def mutated(chance: Random, message: bytes) -> bytes:
    """Return a message with a few bytes changed, removed, inserted or repeated."""
    changed = bytearray(message)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(changed) + 1)
        end = min(len(changed), at + chance.choice((0, 1, 1, 2, 5)))
        more = bytes(chance.choices(BYTES, k=chance.randint(0, 2)))
        changed[at:end] = changed[at:end] * 2 if chance.random() < 0.1 else more
    if changed and chance.random() < 0.3:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.readers", description=__doc__)
    parser.add_argument("--rules", type=int, default=16_000, help="sets of random rules (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: %(default)s)")
    chosen = parser.parse_args()
    applied = sum([RandomRules(seed).compare() for seed in range(chosen.first, chosen.first + chosen.rules)])
    print(f"{chosen.rules:,} sets of rules: both readers agree; the compiled one applied rules to {applied:,} messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
