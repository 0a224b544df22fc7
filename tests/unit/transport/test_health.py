from __future__ import annotations

from ratelimit_rls.transport.health import Health


def test_nothing_serves_before_it_listens_and_every_component_is_well() -> None:
    health = Health(["redis", "config"])
    assert (health.alive, health.serving) == (False, False)
    assert health.detail == "server: starting; redis: not ready yet; config: not ready yet"
    health.listening()
    assert (health.alive, health.serving) == (True, False)
    health.set("redis", True)
    health.set("config", True)
    assert (health.alive, health.serving, health.detail) == (True, True, "")


def test_a_stopping_process_is_neither_alive_nor_serving() -> None:
    health = Health()
    health.listening()
    health.stopping()
    assert (health.alive, health.serving, health.detail) == (False, False, "server: stopping")


def test_a_healthy_component_may_have_something_to_say() -> None:
    health = Health()
    health.listening()
    health.set("config", True, "the last update\nwas refused")
    assert (health.serving, health.detail) == (True, "config: the last update was refused")


def test_listeners_hear_of_changes_only() -> None:
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


def test_a_listener_that_never_subscribed_may_unsubscribe() -> None:
    """As a server does that is stopped because it could not start: its own error is the one to be told."""
    health = Health()
    health.unsubscribe(health.listening)
    health.stopping()
    assert not health.alive
