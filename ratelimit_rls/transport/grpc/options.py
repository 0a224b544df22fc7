"""Options of the gRPC port."""

from __future__ import annotations

from dataclasses import dataclass, field

from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.call_budget import CallBudget
from ratelimit_rls.transport.grpc.server_limits import ServerLimits


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """Settings of the gRPC port."""

    target: str  # "host:port" or "unix:/path"
    socket_mode: int | None = None  # mode of a Unix socket; None: as the umask sets it
    tls: TlsFiles | None = None
    runtime_dir: str = ""
    request_id_metadata: str = ""  # metadata key of the request id; "": none
    reuse_port: bool = False
    max_concurrent_streams: int = 1024
    # None: unlimited.
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    call_budget: CallBudget | None = None
    batch_window_s: float = 0.0  # how long calls may wait for others while the process is busy
