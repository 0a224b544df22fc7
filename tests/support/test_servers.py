"""Server fixtures behave as the tests expect."""

from __future__ import annotations

import pytest
import redis

from tests.support.process import Process
from tests.support.servers import ONCE, RedisServer, redis_binaries


def test_each_redis_starts_empty_and_responds(redis_server: RedisServer) -> None:
    assert redis_server.cli("DBSIZE") == 0

    redis_server.cli("SET", "left", "over")

    assert redis_server.cli("GET", "left") == b"over"


def test_each_redis_is_empty_again_for_the_next_test(redis_server: RedisServer) -> None:
    assert redis_server.cli("DBSIZE") == 0


def test_paused_redis_responds_after_resume(any_redis: RedisServer) -> None:
    any_redis.pause()
    with pytest.raises(redis.TimeoutError):
        any_redis.cli("PING", timeout_s=0.05)

    any_redis.resume()

    assert any_redis.cli("PING")


def test_restarted_redis_keeps_its_port_and_loses_its_data(any_redis: RedisServer) -> None:
    any_redis.cli("SET", "a", "1")
    address = any_redis.address

    any_redis.stop()
    any_redis.start()

    assert (any_redis.address, any_redis.cli("GET", "a")) == (address, None)


@pytest.mark.parametrize("name", redis_binaries())
def test_passwords_users_and_databases_work(name: str) -> None:
    with RedisServer(redis_binaries()[name], password="s3cret", users={"edge": "pw"}, databases=3) as server:
        client = redis.Redis(unix_socket_path=str(server.unix_socket), username="edge", password="pw", db=2)
        with client:
            assert client.ping()
            with pytest.raises(redis.ResponseError, match="DB index"):
                client.execute_command("SELECT", 3)
        with redis.Redis(port=server.port, retry=ONCE) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


class NeverReady(Process):
    def command(self) -> list[str]:
        return ["sleep", "600"]

    def ready(self) -> bool:
        raise TimeoutError


def test_process_that_does_not_become_ready_is_stopped() -> None:
    process = NeverReady("sleeper")
    with pytest.raises(TimeoutError), process:
        pass

    assert not process.running
    assert not process.directory.exists()
