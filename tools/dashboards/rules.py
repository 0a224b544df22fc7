"""Dashboard of the rules: which deny, which are near their limit, which are in shadow mode, and what matches none."""

from __future__ import annotations

from tools.dashboards.grafana import Choice, Dashboard, Kind, Level, Panel, Query, Row
from tools.dashboards.queries import EACH, EACH_LEGEND, WHO, in_a_step, most, now, over_the_range, per_second

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
TOP = 10
LISTED = 20


def decided(outcome: str) -> str:
    return f'{CHOSEN},ratelimit_outcome="{outcome}"'


def busiest(name: str, where: str = CHOSEN) -> tuple[Query, ...]:
    """Return a query for the rules with the highest rate."""
    return (Query(most(TOP, per_second(name, where, by=EACH_RULE)), RULE_LEGEND),)


def listed(outcome: str) -> tuple[Query, ...]:
    return (Query(most(LISTED, over_the_range(DECISIONS, decided(outcome), by=EACH_RULE))),)


DENYING = Row(
    "Denials",
    (
        Panel(
            "Rules with most denials",
            "Descriptors denied in the selected time range. `ratelimit-rls top` shows their clients; labels never "
            "contain values that clients send.",
            "short",
            listed("over_limit"),
            Kind.TABLE,
        ),
        Panel(
            "Denials by rule",
            "Descriptors denied per second, by rule.",
            "ops",
            busiest(DECISIONS, decided("over_limit")),
        ),
        Panel(
            "Share denied",
            "Share of the descriptors that matched the rule. A limit that denies nearly all is a block; one that never "
            "denies may be too high.",
            "percentunit",
            (
                Query(
                    most(
                        TOP,
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
    "Near the limit",
    (
        Panel(
            "Hits near the limit",
            "Hits per second above NEAR_LIMIT_RATIO of their limit (default 0.8).",
            "ops",
            busiest("ratelimit.near_limit"),
        ),
        Panel(
            "Warned and throttled",
            "Decisions per second in one of the states of warn_at.",
            "ops",
            (
                Query(
                    most(TOP, per_second("ratelimit.warning_states", CHOSEN, by=[*EACH_RULE, "ratelimit.state"])),
                    RULE_LEGEND + " {{ratelimit_state}}",
                ),
            ),
        ),
        Panel(
            "Hits",
            "Hits per second, by rule: a call may have more than one.",
            "ops",
            busiest("ratelimit.hits"),
        ),
    ),
)

ON_TRIAL = Row(
    "Shadow mode",
    (
        Panel(
            "Rules in shadow mode with most would-be denials",
            "In the selected time range. A rule without entries over a full cycle of your traffic can be enforced.",
            "short",
            listed("shadowed"),
            Kind.TABLE,
        ),
        Panel(
            "Would-be denials",
            "Descriptors per second that exceeded a limit in shadow mode, and passed.",
            "ops",
            busiest(DECISIONS, decided("shadowed")),
        ),
        Panel(
            "Unlimited",
            "Descriptors per second that matched a rule without a limit.",
            "ops",
            busiest(DECISIONS, decided("unlimited")),
        ),
    ),
)

UNMET = Row(
    "Unmatched",
    (
        Panel(
            "Descriptors without a rule",
            "Descriptors per second that match no rule; they pass. `ratelimit-rls explain` shows why.",
            "ops",
            (
                Query(
                    most(
                        TOP,
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
            "Descriptors per second of domains without rules; they pass. Usually the domain in Envoy's filter differs "
            "from the domain in the rules.",
            "ops",
            (
                Query(
                    most(TOP, per_second("ratelimit.unknown_domains", by=["ratelimit.domain"])),
                    "{{ratelimit_domain}}",
                ),
            ),
            width=12,
        ),
    ),
)

THEMSELVES = Row(
    "Rules",
    (
        Panel(
            "Rules in force",
            "Number of rules, by instance; it should be equal. /rlconfig of each instance has the digest, which "
            "identifies the rules.",
            "short",
            (Query(now("ratelimit.rules.in_force", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Domains",
            "Number of domains with rules, by instance.",
            "short",
            (Query(now("ratelimit.rules.domains", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Age",
            "Time since the rules in force were loaded, by instance. An update should reset all of them.",
            "s",
            (Query(now("ratelimit.rules.age", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Updates",
            "Accepted and rejected updates per step, and rejected updates since the last valid one. If that is above "
            "0, the rules in force are not the latest.",
            "short",
            (
                Query(in_a_step("ratelimit.rules.loads", by=["ratelimit.outcome"]), "{{ratelimit_outcome}}"),
                Query(now("ratelimit.rules.rejected_updates", how="max"), "rejected since the last valid update"),
            ),
            width=6,
            levels=(Level(1, "red"),),
        ),
    ),
)

RULES = Dashboard(
    "ratelimit-rls-rules",
    "Rate limits / Rules",
    "Which rules of ratelimit-rls deny, which are near their limit, which are in shadow mode, and what matches no "
    "rule.",
    WHO + WHICH,
    (DENYING, SOON, ON_TRIAL, UNMET, THEMSELVES),
)
