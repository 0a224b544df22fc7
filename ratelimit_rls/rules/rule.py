"""Compile a descriptor document to a rule, and report keys that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from ratelimit_rls.core.duration import duration_parser
from ratelimit_rls.core.model import Charge, LeasePolicy, Limit, OnStoreFailure, Rule, Subject
from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.document import DescriptorDocument
from ratelimit_rls.rules.limit import compile_limits, is_unlimited
from ratelimit_rls.rules.penalties import compile_penalty, compile_warn_at
from ratelimit_rls.rules.positioned_fields import Positioned, read_enum
from ratelimit_rls.rules.responses import compile_deny, compile_response_policy
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlNode
from ratelimit_rls.yaml.strict_mapping import StrictMapping

HOT_KEYS = ("lease",)

_LEASE = duration_parser(1_000, 10_000_000)
_MAX_DELAY = duration_parser(1_000, 60_000_000)
DEFAULT_MAX_DELAY_US = 1_000_000


class Action(Enum):
    """Handling of a call that exceeds the limit. LOG_ONLY and ALLOW are synonyms of keys of envoyproxy/ratelimit."""

    REJECT = "reject"
    THROTTLE = "throttle"  # delay the response until the call's slot, if that is soon enough
    LOG_ONLY = "log_only"  # shadow_mode
    ALLOW = "allow"  # unlimited


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """Settings that a rule inherits from its domain, the descriptors above it and the service settings.

    Instances compare by identity; neighbouring rules share one instance.
    """

    charge: Charge | None = None  # the domain's
    default_charge: Charge = Charge.ALWAYS  # for rules that use only keys of envoyproxy/ratelimit
    response_policy: ResponsePolicy = DEFAULT_RESPONSE_POLICY
    deny: DenyResponse | None = None
    on_store_failure: OnStoreFailure | None = None  # the only one that descriptors pass on, too

    def for_descriptor(self, document: DescriptorDocument, found: Findings) -> Inherited:
        """Return the settings for `document` itself and everything below it."""
        own = read_enum("on_store_failure", document.on_store_failure, OnStoreFailure, found)
        return self if own is None else replace(self, on_store_failure=own)


def compile_rule(path: str, document: DescriptorDocument, found: Findings, inherited: Inherited) -> Rule | None:
    """Compile the rule of a descriptor; None if it limits nothing.

    A disabled rule is still validated, so that enabling it cannot fail.
    """
    charge = read_enum("charge", document.charge, Charge, found)
    action = read_enum("action", document.action, Action, found) if document.action else Action.REJECT
    if document.limits is not None and document.rate_limit is not None:
        found.error(document.limits.position, diagnostics.limits_beside_rate_limit())
    limits = compile_limits(document, found, is_queue=action is Action.THROTTLE)
    max_delay_us = _max_delay_us(document, action, limits, charge, found)
    penalty = compile_penalty(document.penalty, found)
    _check_penalty(document, action, found)
    warn_at = compile_warn_at(document.warn_at, found)
    hot = compile_hot(document.hot, limits, found)
    _check_hot(document, action, charge, inherited, found)
    limits_of = read_enum("limits_of", document.limits_of, Subject, found)
    _check_limits_of(document, action, found)
    response_policy = compile_response_policy(document.answer, found)
    deny = compile_deny(document.deny, found)
    written = document.rate_limits
    is_limited = bool(written or limits_of)
    if action is not Action.ALLOW and (not is_limited or (document.enabled and not document.enabled.value)):
        return None
    is_extended = penalty or hot or limits_of or document.limits is not None or any(one.uses_new_key for one in written)
    if action is Action.ALLOW:
        limits = ()
    if action is Action.THROTTLE:
        charge = Charge.ADMITTED
    return Rule(
        path=path,
        limits=limits,
        replaces=frozenset([replaced.value for limit in written for replaced in limit.replaces]),
        charge=charge or inherited.charge or (Charge.ADMITTED if is_extended else inherited.default_charge),
        shadow_mode=is_on(document.shadow_mode) or action is Action.LOG_ONLY,
        quota_mode=is_on(document.quota_mode),
        detailed_metric=is_on(document.detailed_metric),
        metadata=document.metadata.value if document.metadata else None,
        position=document.position,
        max_delay_us=max_delay_us,
        penalty=penalty,
        warn_at=warn_at,
        response_policy=response_policy or inherited.response_policy,
        deny=deny or inherited.deny,
        on_store_failure=inherited.on_store_failure if limits or limits_of else None,
        hot=hot,
        limits_of=limits_of,
    )


def is_on(written: Positioned[bool] | None) -> bool:
    return written is not None and written.value


def _max_delay_us(
    document: DescriptorDocument,
    action: Action | None,
    limits: tuple[Limit, ...],
    charge: Charge | None,
    found: Findings,
) -> int:
    """Return the maximum delay of a call in microseconds; 0 without `action: throttle`."""
    written = document.max_delay
    delay_us = DEFAULT_MAX_DELAY_US
    if written is not None:
        try:
            delay_us = _MAX_DELAY(written.value)
        except ValueError as error:
            found.error(written.position, diagnostics.bad_max_delay(written.value, str(error)))
        if action not in (Action.THROTTLE, None):
            found.error(written.position, diagnostics.max_delay_without_throttle())
    if action is not Action.THROTTLE:
        return 0
    assert document.action is not None
    if charge is Charge.ALWAYS and document.charge is not None:
        found.error(document.charge.position, diagnostics.throttle_with_charge())
    for mode, switch in _modes(document):
        found.error(switch.position, diagnostics.throttle_with(mode))
    if not _has_queue(document, limits):
        found.error(document.action.position, diagnostics.throttle_without_queue())
    return delay_us


def _has_queue(document: DescriptorDocument, limits: tuple[Limit, ...]) -> bool:
    """Return whether a limit can queue calls.

    True if a limit could not be read: that was reported, and its algorithm is unknown.
    """
    countable = [limit for limit in document.rate_limits if not is_unlimited(limit)]
    is_known = len(limits) == len(countable) and not document.is_broken
    # A limit of 0 denies everything. That is a warning elsewhere, and valid with every algorithm.
    return not is_known or any(limit.algorithm.has_burst or limit.requests_per_unit == 0 for limit in limits)


def _check_penalty(document: DescriptorDocument, action: Action | None, found: Findings) -> None:
    if document.penalty is None:
        return
    for mode, _ in _modes(document):
        found.error(document.penalty.position, diagnostics.penalty_with(mode))
    if action is Action.LOG_ONLY:
        found.error(document.penalty.position, diagnostics.penalty_with("action: log_only"))


def _check_hot(
    document: DescriptorDocument, action: Action | None, charge: Charge | None, inherited: Inherited, found: Findings
) -> None:
    if document.hot is None:
        return
    if document.charge is not None and charge is Charge.ALWAYS:
        found.error(document.charge.position, diagnostics.hot_with_charge())
    elif document.charge is None and inherited.charge is Charge.ALWAYS:
        found.error(document.hot.position, diagnostics.hot_in_charging_domain())
    for mode, switch in _modes(document):
        found.error(switch.position, diagnostics.hot_with(mode))
    if document.action is not None and action in (Action.THROTTLE, Action.LOG_ONLY):
        found.error(document.action.position, diagnostics.hot_with(f"action: {document.action.value}"))
    elif document.action is not None and action is Action.ALLOW:
        found.error(document.action.position, diagnostics.hot_without_limit("action: allow"))
    for key, watcher in (("penalty", document.penalty), ("warn_at", document.warn_at)):
        if watcher is not None:
            found.error(watcher.position, diagnostics.hot_with(key))
    unlimited = document.rate_limit.unlimited if document.rate_limit else None
    if unlimited is not None and unlimited.value:
        found.error(unlimited.position, diagnostics.hot_without_limit("unlimited"))


def _check_limits_of(document: DescriptorDocument, action: Action | None, found: Findings) -> None:
    written = document.limits_of
    if written is None:
        return
    if action is Action.ALLOW:
        found.error(written.position, diagnostics.limits_of_with("action: allow", "nothing is limited there"))
    if document.hot is not None:
        found.error(written.position, diagnostics.limits_of_with("hot", "a lease is taken of a limit that all share"))
    if is_on(document.share_threshold):
        found.error(written.position, diagnostics.limits_of_with("share_threshold", "each has a counter of its own"))


def _modes(document: DescriptorDocument) -> Iterator[tuple[str, Positioned[bool]]]:
    """Yield the enabled modes in which a limit does not deny calls by itself."""
    for mode, written in (("shadow_mode", document.shadow_mode), ("quota_mode", document.quota_mode)):
        if written is not None and written.value:
            yield mode, written


def compile_hot(written: Positioned[YamlNode] | None, limits: Iterable[Limit], found: Findings) -> LeasePolicy | None:
    """Compile `hot` to a lease policy: how long hits taken in advance may be kept. None if it is absent or invalid."""
    if written is None:
        return None
    errors_before = len(found.errors)
    fields = StrictMapping(written.value, HOT_KEYS, found, unsupported={"split": diagnostics.split_not_supported()})
    lease_us = fields.read("lease", _LEASE)
    if len(found.errors) > errors_before:  # an unknown key may be a misspelt `lease`
        return None
    node = fields.required("lease", "lease: 100ms")
    if node is None or lease_us is None:
        return None
    shortest_us = min((limit.window_us for limit in limits), default=2 * lease_us)
    if shortest_us < 2 * lease_us:
        found.error(node, diagnostics.lease_too_long(lease_us, shortest_us))
    return LeasePolicy(lease_us)
