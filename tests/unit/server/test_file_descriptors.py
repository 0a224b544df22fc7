"""Bounds on connections fit into the descriptors that the process may have."""

from __future__ import annotations

import resource

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.server.file_descriptors import MARGIN, fit_connections, raise_limit
from ratelimit_rls.settings import Settings
from ratelimit_rls.transport.tls_listener import MAX_HANDSHAKES

PORTS = 2
NEEDED = 4096 + PORTS * 1024 + MARGIN


def fitted(limit: int, **settings: object) -> tuple[int, int, list[dict[str, object]]]:
    """The bounds of gRPC and of each HTTP port, and what was logged."""
    with capture_logs() as logs:
        made = fit_connections(Settings(**settings), limit)  # type: ignore[arg-type]
    return made.rls_grpc_max_connections, made.rls_http_max_connections, [dict(entry) for entry in logs]


@pytest.mark.parametrize("limit", [NEEDED, 1_000_000, resource.RLIM_INFINITY])
def test_enough_is_enough(limit: int) -> None:
    assert fitted(limit) == (4096, 1024, [])


def test_the_bound_of_grpc_is_lowered_first_and_the_log_says_so() -> None:
    grpc, http, logs = fitted(5000)
    assert (grpc, http) == (5000 - MARGIN - PORTS * 1024, 1024)
    assert logs == [
        {
            "event": "file_descriptor_limit_low",
            "log_level": "warning",
            "limit": 5000,
            "needed": NEEDED,
            "grpc_max_connections": grpc,
            "http_max_connections": http,
        }
    ]


@pytest.mark.parametrize("limit", [128, 256, 1024, 2048, 6000])
@pytest.mark.parametrize("grpc", [0, 10, 4096])
@pytest.mark.parametrize("http", [0, 10, 1024])
@pytest.mark.parametrize("has_metrics", [False, True])
def test_fitted_connections_need_no_more_descriptors_than_allowed(
    limit: int, grpc: int, http: int, has_metrics: bool
) -> None:
    requested = {"rls_grpc_max_connections": grpc, "rls_http_max_connections": http, "use_prometheus": has_metrics}
    fitting_grpc, fitting_http, logs = fitted(limit, **requested)
    assert fitting_grpc > 0
    assert fitting_http > 0
    assert fitting_grpc + (PORTS + has_metrics) * fitting_http + MARGIN <= limit
    assert fitting_grpc <= (grpc or limit)
    assert fitting_http <= (http or limit)
    assert bool(logs) == (fitting_grpc < grpc or fitting_http < http)


def test_handshakes_take_descriptors_too() -> None:
    files = {"grpc_server_use_tls": True, "grpc_server_tls_cert": "c", "grpc_server_tls_key": "k"}
    grpc, _, logs = fitted(NEEDED, **files)
    assert grpc == 4096 - MAX_HANDSHAKES
    assert len(logs) == 1


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert raise_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
