"""The only module that imports redis-py: its connections, not yet connected, and its errors.

redis-py is large, so this module is imported when the first connection is made.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisTls

__all__ = ["RedisError", "new_connection"]


async def new_connection(address: RedisAddress, username: str, password: str) -> AbstractConnection:
    options: dict[str, Any] = {
        "db": address.database,
        "username": username or None,
        "password": password or None,
        # Each would apply to one step; `connect` has one timeout for all of them.
        "socket_connect_timeout": None,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if address.path:
        return UnixDomainSocketConnection(path=address.path, **options)
    options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    return Connection(**options) if address.tls is None else await _over_tls(address.tls, options)


async def _over_tls(tls: RedisTls, options: dict[str, Any]) -> AbstractConnection:
    connection = SSLConnection(
        ssl_ca_certs=tls.ca_file or None,
        ssl_certfile=tls.certificate_file or None,
        ssl_keyfile=tls.key_file or None,
        ssl_check_hostname=tls.check_hostname,
        **options,
    )
    try:
        # This reads the files, including the system's CAs, and the connection uses the result.
        await asyncio.to_thread(connection.ssl_context.get)
    except OSError as exc:  # includes ssl.SSLError
        files = ", ".join(filter(None, [tls.ca_file, tls.certificate_file, tls.key_file]))
        raise StoreUnavailable(f"cannot use the TLS files for Redis ({files}): {exc}") from exc
    return connection
