"""What a descriptor says of the calls that meet it: its rule. What contradicts itself is told here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ratelimit_rls.core.model import Charge, Limit, Rule
from ratelimit_rls.core.span import span_within
from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.answer import compile_style
from ratelimit_rls.rules.deny import compile_deny
from ratelimit_rls.rules.document import DescriptorDocument, Written
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.limit import compile_limits, is_unlimited
from ratelimit_rls.rules.watchers import compile_penalty, compile_warn_at

_MAX_DELAY = span_within(1_000, 60_000_000)
DEFAULT_MAX_DELAY_US = 1_000_000


class Action(Enum):
    """What becomes of a call that does not fit. LOG_ONLY and ALLOW are other words for what the reference has."""

    REJECT = "reject"
    THROTTLE = "throttle"  # it is held until its slot comes, if that is soon enough
    LOG_ONLY = "log_only"  # shadow_mode
    ALLOW = "allow"  # unlimited


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a rule takes from its domain and the settings where it says nothing itself."""

    charge: Charge | None = None  # the domain's
    default_charge: Charge = Charge.ALWAYS  # of rules in the reference's grammar alone
    style: AnswerStyle = PLAIN
    deny: Deny | None = None


def compile_rule(path: str, document: DescriptorDocument, found: Findings, inherited: Inherited) -> Rule | None:
    """None where nothing is limited. What is switched off is still read, so that switching it on holds no surprise."""
    charge = read_charge(document.charge, found)
    action = _action(document, found)
    if document.limits is not None and document.rate_limit is not None:
        found.error(document.limits.position, offences.limits_beside_rate_limit())
    limits = compile_limits(document, found, is_queue=action is Action.THROTTLE)
    max_delay_us = _max_delay_us(document, action, limits, charge, found)
    penalty = compile_penalty(document.penalty, found)
    _check_penalty(document, action, found)
    warn_at = compile_warn_at(document.warn_at, found)
    style = compile_style(document.answer, found)
    deny = compile_deny(document.deny, found)
    written = document.rate_limits
    if action is not Action.ALLOW and (not written or (document.enabled and not document.enabled.value)):
        return None
    is_ours = penalty or document.limits is not None or any(limit.uses_new_key for limit in written)
    if action is Action.THROTTLE:
        charge = Charge.ADMITTED
    return Rule(
        path=path,
        limits=() if action is Action.ALLOW else limits,
        replaces=frozenset(replaced.value for limit in written for replaced in limit.replaces),
        charge=charge or inherited.charge or (Charge.ADMITTED if is_ours else inherited.default_charge),
        shadow_mode=is_on(document.shadow_mode) or action is Action.LOG_ONLY,
        quota_mode=is_on(document.quota_mode),
        detailed_metric=is_on(document.detailed_metric),
        metadata=document.metadata.value if document.metadata else None,
        position=document.position,
        max_delay_us=max_delay_us,
        penalty=penalty,
        warn_at=warn_at,
        style=style or inherited.style,
        deny=deny or inherited.deny,
    )


def is_on(written: Written[bool] | None) -> bool:
    return written is not None and written.value


def read_charge(written: Written[str] | None, found: Findings) -> Charge | None:
    if written is None:
        return None
    if written.value not in offences.CHARGES:
        found.error(written.position, offences.unknown_charge(written.value))
        return None
    return Charge(written.value)


def _action(document: DescriptorDocument, found: Findings) -> Action | None:
    """None after an error."""
    written = document.action
    if written is None:
        return Action.REJECT
    names = [action.value for action in Action]
    if written.value not in names:
        found.error(written.position, offences.unknown_action(written.value, names))
        return None
    return Action(written.value)


def _max_delay_us(
    document: DescriptorDocument,
    action: Action | None,
    limits: tuple[Limit, ...],
    charge: Charge | None,
    found: Findings,
) -> int:
    """How long calls are held at most; 0 where none is."""
    written = document.max_delay
    delay_us = DEFAULT_MAX_DELAY_US
    if written is not None:
        try:
            delay_us = _MAX_DELAY(written.value)
        except ValueError as error:
            found.error(written.position, offences.bad_max_delay(written.value, str(error)))
        if action not in (Action.THROTTLE, None):
            found.error(written.position, offences.max_delay_without_throttle())
    if action is not Action.THROTTLE:
        return 0
    assert document.action is not None
    if charge is Charge.ALWAYS and document.charge is not None:
        found.error(document.charge.position, offences.throttle_with_charge())
    for mode, switch in _modes(document):
        found.error(switch.position, offences.throttle_with(mode))
    if not _has_queue(document, limits):
        found.error(document.action.position, offences.throttle_without_queue())
    return delay_us


def _has_queue(document: DescriptorDocument, limits: tuple[Limit, ...]) -> bool:
    """Also where a limit could not be read: that was told, and what it would have been is not known."""
    countable = [limit for limit in document.rate_limits if not is_unlimited(limit)]
    is_known = len(limits) == len(countable) and not document.is_broken
    # A limit of 0 refuses everything, which is pointed out, and is right whatever the algorithm.
    return not is_known or any(limit.algorithm.has_burst or limit.requests_per_unit == 0 for limit in limits)


def _check_penalty(document: DescriptorDocument, action: Action | None, found: Findings) -> None:
    if document.penalty is None:
        return
    for mode, _ in _modes(document):
        found.error(document.penalty.position, offences.penalty_with(mode))
    if action is Action.LOG_ONLY:
        found.error(document.penalty.position, offences.penalty_with("action: log_only"))


def _modes(document: DescriptorDocument) -> Iterator[tuple[str, Written[bool]]]:
    """Those that are switched on, under which a limit alone refuses nobody."""
    for mode, written in (("shadow_mode", document.shadow_mode), ("quota_mode", document.quota_mode)):
        if written is not None and written.value:
            yield mode, written
