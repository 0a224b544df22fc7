"""Options of the gRPC port, and limits on what all of its clients together may use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.call_budget import CallBudget


class ServerLimits(NamedTuple):
    """Limits of one process. For connections, 0 means no limit; bytes and streams are always limited."""

    max_connections: int = 4096
    max_connections_per_peer: int = 2048
    max_streams: int = 65_536
    max_unfinished_bytes: int = 32 * 2**20
    timeouts: Timeouts = Timeouts()


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
