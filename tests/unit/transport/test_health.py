from __future__ import annotations

from ratelimit_rls.transport.health import Health


def test_not_serving_until_listening_with_healthy_components() -> None:
    health = Health(["redis", "config"])
    assert (health.alive, health.serving) == (False, False)
    assert health.detail == "server: starting; redis: not ready yet; config: not ready yet"
    health.listening()
    assert (health.alive, health.serving) == (True, False)
    health.set("redis", True)
    health.set("config", True)
    assert (health.alive, health.serving, health.detail) == (True, True, "")


def test_stopping_process_is_neither_alive_nor_serving() -> None:
    health = Health()
    health.listening()
    health.stopping()
    assert (health.alive, health.serving, health.detail) == (False, False, "server: stopping")


def test_healthy_component_may_have_a_detail() -> None:
    health = Health()
    health.listening()
    health.set("config", True, "the last update\nwas rejected")
    assert (health.serving, health.detail) == (True, "config: the last update was rejected")


def test_listeners_are_called_for_changes_only() -> None:
    health = Health()
    heard: list[bool] = []

    def listen() -> None:
        heard.append(health.serving)

    health.subscribe(listen)
    health.listening()
    health.set("redis", False)
    health.set("redis", False)
    health.set("redis", True)
    health.unsubscribe(listen)
    health.stopping()
    assert heard == [True, False, True]


def test_unsubscribe_without_subscribe_is_allowed() -> None:
    """A server that failed to start is stopped, too; its own error must be reported."""
    health = Health()
    health.unsubscribe(health.listening)
    health.stopping()
    assert not health.alive
