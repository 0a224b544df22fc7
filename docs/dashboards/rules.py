"""Which rules refuse, which soon will, and which nobody meets."""

from __future__ import annotations

from docs.dashboards.grafana import Choice, Dashboard, Kind, Level, Panel, Query, Row
from docs.dashboards.queries import EACH, EACH_LEGEND, WHO, in_a_step, most, now, over_the_range, per_second

CHOSEN = 'ratelimit_domain=~"$domain",ratelimit_rule=~"$rule"'
OF_THE_DOMAIN = 'ratelimit_domain=~"$domain"'

WHICH = (
    Choice("domain", "Domain", 'label_values(ratelimit_decisions_total{job=~"$job"}, ratelimit_domain)'),
    Choice(
        "rule",
        "Rule",
        'label_values(ratelimit_decisions_total{job=~"$job",ratelimit_domain=~"$domain"}, ratelimit_rule)',
    ),
)

DECISIONS = "ratelimit.decisions"
EACH_RULE = ("ratelimit.domain", "ratelimit.rule")
RULE_LEGEND = "{{ratelimit_domain}} {{ratelimit_rule}}"
SHOWN = 10
LISTED = 20


def decided(outcome: str) -> str:
    return f'{CHOSEN},ratelimit_outcome="{outcome}"'


def busiest(name: str, where: str = CHOSEN) -> tuple[Query, ...]:
    """Lines of the rules that have most of it."""
    return (Query(most(SHOWN, per_second(name, where, by=EACH_RULE)), RULE_LEGEND),)


def listed(outcome: str) -> tuple[Query, ...]:
    return (Query(most(LISTED, over_the_range(DECISIONS, decided(outcome), by=EACH_RULE))),)


REFUSING = Row(
    "What is refused",
    (
        Panel(
            "Rules that refused most",
            "Descriptors refused in the time shown. `ratelimit-rls top` tells which clients they belong to; labels "
            "never have the values that clients send.",
            "short",
            listed("over_limit"),
            Kind.TABLE,
        ),
        Panel(
            "Refusals",
            "Descriptors refused a second, by rule.",
            "ops",
            busiest(DECISIONS, decided("over_limit")),
        ),
        Panel(
            "Share refused",
            "Of what met the rule. A limit that refuses nearly all is a block; one that never does may be too wide.",
            "percentunit",
            (
                Query(
                    most(
                        SHOWN,
                        f"{per_second(DECISIONS, decided('over_limit'), by=EACH_RULE)}"
                        f" / {per_second(DECISIONS, CHOSEN, by=EACH_RULE)}",
                    ),
                    RULE_LEGEND,
                ),
            ),
        ),
    ),
)

SOON = Row(
    "What soon will be",
    (
        Panel(
            "Near the limit",
            "Hits above NEAR_LIMIT_RATIO of their limit (0.8, unless set otherwise).",
            "ops",
            busiest("ratelimit.near_limit"),
        ),
        Panel(
            "Warned and throttled",
            "Decisions in one of the states of warn_at.",
            "ops",
            (
                Query(
                    most(SHOWN, per_second("ratelimit.states", CHOSEN, by=[*EACH_RULE, "ratelimit.state"])),
                    RULE_LEGEND + " {{ratelimit_state}}",
                ),
            ),
        ),
        Panel(
            "Hits",
            "What was asked for, by rule: a call may take more than one.",
            "ops",
            busiest("ratelimit.hits"),
        ),
    ),
)

ON_TRIAL = Row(
    "On trial",
    (
        Panel(
            "Rules in shadow mode that would have refused most",
            "In the time shown. Nothing here for as long as your traffic repeats itself: the rule can be switched on.",
            "short",
            listed("shadowed"),
            Kind.TABLE,
        ),
        Panel(
            "Would have been refused",
            "Descriptors a second that were over a limit on trial, and passed.",
            "ops",
            busiest(DECISIONS, decided("shadowed")),
        ),
        Panel(
            "Unlimited",
            "Descriptors that met a rule without a limit.",
            "ops",
            busiest(DECISIONS, decided("unlimited")),
        ),
    ),
)

UNMET = Row(
    "What no rule is for",
    (
        Panel(
            "Descriptors without a rule",
            "They pass. `ratelimit-rls explain` tells why a descriptor meets none.",
            "ops",
            (
                Query(
                    most(
                        SHOWN,
                        per_second(
                            DECISIONS,
                            f'{OF_THE_DOMAIN},ratelimit_outcome="no_rule"',
                            by=["ratelimit.domain"],
                        ),
                    ),
                    "{{ratelimit_domain}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Domains without rules",
            "Descriptors of domains that the rules do not have: nearly always the domain in Envoy's filter is another "
            "than in the rules, and nothing is limited.",
            "ops",
            (
                Query(
                    most(SHOWN, per_second("ratelimit.unknown_domains", by=["ratelimit.domain"])),
                    "{{ratelimit_domain}}",
                ),
            ),
            width=12,
        ),
    ),
)

THEMSELVES = Row(
    "The rules themselves",
    (
        Panel(
            "Rules in force",
            "By instance; the lines should be one. /rlconfig of each has the digest, which says whether they are "
            "the same.",
            "short",
            (Query(now("ratelimit.rules.in_force", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Domains",
            "That rules are for, by instance.",
            "short",
            (Query(now("ratelimit.rules.domains", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Age",
            "Since the rules in force were loaded, by instance. After an update all of them should begin anew.",
            "s",
            (Query(now("ratelimit.rules.age", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Updates",
            "Taken and refused, in the time of one step; and how many were refused since the last good one. Above "
            "0 the rules in force are not the newest.",
            "short",
            (
                Query(in_a_step("ratelimit.rules.loads", by=["ratelimit.outcome"]), "{{ratelimit_outcome}}"),
                Query(now("ratelimit.rules.refused", how="max"), "refused since the last good one"),
            ),
            width=6,
            levels=(Level(1, "red"),),
        ),
    ),
)

RULES = Dashboard(
    "ratelimit-rls-rules",
    "Rate limits / Rules",
    "Which rules of ratelimit-rls refuse, which soon will, which are on trial, and what no rule is for.",
    WHO + WHICH,
    (REFUSING, SOON, ON_TRIAL, UNMET, THEMSELVES),
)
