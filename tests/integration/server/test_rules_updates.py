"""Valid and invalid updates of rules under load, and starting without rules."""

from __future__ import annotations

from pathlib import Path
from signal import SIGHUP

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Code
from tests.support.closed_loop_clients import ClosedLoopClients
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.service_process import HIT, UNRESTRICTIVE_RULES, ServiceProcess, StartingService

REQUEST = rate_limit_request("roomy", {"all": "hits"})

NO_SUCH_UNIT = UNRESTRICTIVE_RULES.replace("year", "eon")
TIGHTER = UNRESTRICTIVE_RULES.replace("4000000000", "3999999999")


def failure(service: ServiceProcess) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        ask(service.grpc_address, REQUEST)
    return raised.value.code(), raised.value.details() or ""


def replace(path: Path, text: str) -> None:
    """Replace the file atomically, as a deployment does."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.mark.slow
def test_invalid_update_under_load_fails_no_call_and_is_visible(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service, ClosedLoopClients(service.grpc_address, HIT) as load:
        before = service.debug("/rlconfig")

        replace(rules, NO_SUCH_UNIT)

        service.wait_until(lambda: service.stat("ratelimit.service.config_load_error") == 1, "counts a bad update")
        load.wait_for_more(50)
        assert f"{rules}:2:" in service.log()
        rejected = service.debug("/rlconfig")
        assert (
            rejected.body
            == before.body
            == "roomy.all: unit=YEAR requests_per_unit=4000000000, " + ("shadow_mode: false, quota_mode: false\n")
        )
        assert rejected.headers["x-ratelimit-rules-digest"] == before.headers["x-ratelimit-rules-digest"]
        assert rejected.headers["x-ratelimit-rules-failures"] == "1"
        assert "invalid rate limit unit 'eon'" in rejected.headers["x-ratelimit-rules-last-error"]
        health = service.healthcheck()
        assert (health.status, health.body) == (200, "OK")
        assert "config: 1 update(s) rejected: " in health.headers["x-ratelimit-detail"]
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
def test_invalid_rules_at_start_are_reloaded_when_fixed(rules: Path) -> None:
    rules.write_text(NO_SUCH_UNIT)
    with ServiceProcess({"RLS_RULES": rules}) as service:
        assert failure(service) == (grpc.StatusCode.UNAVAILABLE, "no rate limit configuration loaded")
        assert "invalid rate limit unit 'eon'" in service.log()
        assert service.stat("ratelimit.service.config_load_error") == 1
        assert service.stat("ratelimit.service.call.should_rate_limit.service_error") == 1

        replace(rules, UNRESTRICTIVE_RULES)
        service.wait_until(lambda: service.debug("/rlconfig").body != "", "has rules")

        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_start_without_rules_directory_fails_unless_forced(tmp_path: Path) -> None:
    rules = tmp_path / "later"
    with StartingService({"RLS_RULES": rules}) as service:
        assert service.ended() == ExitCode.BAD
        assert f"no rules at {rules}: there is no such file or directory" in service.log()
        assert "Traceback" not in service.log()

    with ServiceProcess({"RLS_RULES": rules, "FORCE_START_WITHOUT_INITIAL_CONFIG": "true"}) as service:
        assert failure(service) == (grpc.StatusCode.UNAVAILABLE, "no rate limit configuration loaded")
        rules.mkdir()
        (rules / "roomy.yaml").write_text(UNRESTRICTIVE_RULES)
        service.wait_until(lambda: service.debug("/rlconfig").body != "", "has rules")
        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_healthy_with_at_least_one_config_loaded_is_not_serving_before(rules: Path) -> None:
    rules.write_text(NO_SUCH_UNIT)
    variables = {"RLS_RULES": rules, "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED": "true"}
    with ServiceProcess(variables, healthy=False) as service:
        assert service.healthcheck().status == 500
        assert "invalid rate limit unit 'eon'" in service.healthcheck().body
        assert [service.health(), service.health("")] == ["NOT_SERVING", "SERVING"]
        replace(rules, UNRESTRICTIVE_RULES)
        service.wait_until(lambda: service.healthcheck().status == 200, "is healthy")
        assert service.health() == "SERVING"


@pytest.mark.slow
def test_sighup_reloads_the_rules(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service:
        # Only a signal reloads files that have not changed.
        for number in range(1, 4):
            service.signal(SIGHUP)
            service.wait_for_log("rules_unchanged", times=number)
        replace(rules, TIGHTER)
        service.signal(SIGHUP)
        service.wait_until(lambda: "3999999999" in service.debug("/rlconfig").body, "has read the rules")


@pytest.mark.slow
def test_file_system_error_is_logged_and_watching_resumes(rules: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(rules.parent)
    with ServiceProcess({"RLS_RULES": link}) as service:
        link.unlink()
        link.symlink_to("x" * 300)  # name too long: a file system error, not a missing file
        service.wait_for_log("rules_follow_failed")
        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK

        rules.write_text(TIGHTER)
        link.unlink()
        link.symlink_to(rules.parent)

        service.wait_until(lambda: "3999999999" in service.debug("/rlconfig").body, "follows the rules again")
