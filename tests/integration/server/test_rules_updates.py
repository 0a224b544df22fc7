"""Rules that change while calls are under way, good and bad, and a start without any."""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGHUP

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Code
from tests.client import ask, rate_limit_request
from tests.launched import HIT, ROOMY, Launched, Watched
from tests.steady import Steady

REQUEST = rate_limit_request("roomy", {"all": "hits"})
POLLED_EVERY_S = 1.0

NO_SUCH_UNIT = ROOMY.replace("year", "eon")
TIGHTER = ROOMY.replace("4000000000", "3999999999")


def failure(service: Watched) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        ask(service.grpc_address, REQUEST)
    return refused.value.code(), refused.value.details()


def replace(path: Path, text: str) -> None:
    """As a deployment does it: never half a file."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.mark.slow
def test_a_bad_update_under_load_fails_no_call_and_is_there_to_be_seen(rules: Path) -> None:
    with Watched({"RLS_RULES": rules}) as service, Steady(service.grpc_address, HIT) as load:
        before = service.debug("/rlconfig")

        replace(rules, NO_SUCH_UNIT)

        service.wait_until(lambda: service.stat("ratelimit.service.config_load_error") == 1, "counts a bad update")
        load.wait_for_more(50)
        assert f"{rules}:2:" in service.log()
        refused = service.debug("/rlconfig")
        assert (
            refused.body
            == before.body
            == "roomy.all: unit=YEAR requests_per_unit=4000000000, " + ("shadow_mode: false, quota_mode: false\n")
        )
        assert refused.headers["x-ratelimit-rules-digest"] == before.headers["x-ratelimit-rules-digest"]
        assert refused.headers["x-ratelimit-rules-failures"] == "1"
        assert "invalid rate limit unit 'eon'" in refused.headers["x-ratelimit-rules-last-error"]
        health = service.healthcheck()
        assert (health.status, health.body) == (200, "OK")
        assert "config: 1 update(s) refused: " in health.headers["x-ratelimit-detail"]
        assert service.health() == "SERVING"

        replace(rules, TIGHTER)

        service.wait_until(lambda: "3999999999" in service.debug("/rlconfig").body, "has the good update")
        load.wait_for_more(50)
        mended = service.debug("/rlconfig").headers
        assert mended["x-ratelimit-rules-failures"] == "0"
        assert "x-ratelimit-rules-last-error" not in mended
        assert "x-ratelimit-detail" not in service.healthcheck().headers
        assert service.stat("ratelimit.service.config_load_success") == 2
        load.stop()
        assert set(load.outcomes) == {Code.OK}


@pytest.mark.slow
def test_rules_that_are_wrong_at_the_start_are_no_reason_to_end_and_mended_ones_are_taken(rules: Path) -> None:
    rules.write_text(NO_SUCH_UNIT)
    with Watched({"RLS_RULES": rules}) as service:
        assert failure(service) == (grpc.StatusCode.UNAVAILABLE, "no rate limit configuration loaded")
        assert "invalid rate limit unit 'eon'" in service.log()
        assert service.stat("ratelimit.service.config_load_error") == 1
        assert service.stat("ratelimit.service.call.should_rate_limit.service_error") == 1

        replace(rules, ROOMY)
        service.wait_until(lambda: service.debug("/rlconfig").body != "", "has rules")

        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_a_start_without_a_rules_directory_is_refused_or_forced(tmp_path: Path) -> None:
    rules = tmp_path / "later"
    with Launched({"RLS_RULES": rules}) as service:
        assert service.ended() == ExitCode.BAD
        assert f"no rules at {rules}: there is no such file or directory" in service.log()
        assert "Traceback" not in service.log()

    with Watched({"RLS_RULES": rules, "FORCE_START_WITHOUT_INITIAL_CONFIG": "true"}) as service:
        assert failure(service) == (grpc.StatusCode.UNAVAILABLE, "no rate limit configuration loaded")
        rules.mkdir()
        (rules / "roomy.yaml").write_text(ROOMY)
        service.wait_until(lambda: service.debug("/rlconfig").body != "", "has rules")
        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_healthy_with_at_least_one_config_loaded_is_not_serving_before(rules: Path) -> None:
    rules.write_text(NO_SUCH_UNIT)
    variables = {"RLS_RULES": rules, "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED": "true"}
    with Watched(variables, healthy=False) as service:
        assert service.healthcheck().status == 500
        assert "invalid rate limit unit 'eon'" in service.healthcheck().body
        assert [service.health(), service.health("")] == ["NOT_SERVING", "SERVING"]
        replace(rules, ROOMY)
        service.wait_until(lambda: service.healthcheck().status == 200, "is healthy")
        assert service.health() == "SERVING"


@pytest.mark.slow
def test_sighup_reads_the_rules_at_once(rules: Path, tmp_path: Path) -> None:
    # The link's directory is watched, the file behind it is only looked at every second.
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked" / "roomy.yaml"
    link.symlink_to(rules)
    with Watched({"RLS_RULES": link}) as service:
        took_s = []
        for number in range(1, 6):
            replace(rules, ROOMY.replace("4000000000", str(number)))
            begun_s = time.monotonic()
            service.signal(SIGHUP)
            wanted = f"requests_per_unit={number},"
            service.wait_until(lambda wanted=wanted: wanted in service.debug("/rlconfig").body, "has read the rules")
            took_s.append(time.monotonic() - begun_s)
    assert max(took_s) < POLLED_EVERY_S / 3, took_s


@pytest.mark.slow
def test_rules_that_cannot_even_be_looked_for_are_told_of_and_followed_again(rules: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(rules.parent)
    with Watched({"RLS_RULES": link}) as service:
        link.unlink()
        link.symlink_to("x" * 300)  # longer than a name can be: not missing, but an error of the file system
        service.wait_for_log("cannot follow the rules")
        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK

        rules.write_text(TIGHTER)
        link.unlink()
        link.symlink_to(rules.parent)

        service.wait_until(lambda: "3999999999" in service.debug("/rlconfig").body, "follows the rules again")
