"""Whether the service can serve, from what its components say; told to gRPC and HTTP alike.

Two questions, kept apart because orchestrators act on them differently:
  alive     the process listens and is not stopping        gRPC service "", HTTP /livez
  serving   alive, and every component is well             gRPC service "ratelimit", HTTP /healthcheck
A process that is restarted because its store is away does not bring the store back, so `alive` never asks the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

SERVICE = "ratelimit"
"""The reference's name for itself in grpc.health.v1."""

STARTING = "starting"


@dataclass(frozen=True, slots=True)
class Component:
    healthy: bool
    detail: str = ""  # a healthy component may have something to say too


class Health:
    """To be used in the event loop's thread only.

    Nothing is well until it says so: `components` (redis, config, …) names whom to wait for before serving.
    """

    def __init__(self, components: Iterable[str] = ()) -> None:
        self._components = {name: Component(False, "not ready yet") for name in components}
        self._phase = STARTING  # "" while listening
        self._listeners: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return not self._phase

    @property
    def serving(self) -> bool:
        return self.alive and all(component.healthy for component in self._components.values())

    @property
    def detail(self) -> str:
        """One line, for people; empty when there is nothing to say."""
        said = [f"server: {self._phase}"] if self._phase else []
        said += [
            f"{name}: {one.detail or 'unhealthy'}"
            for name, one in self._components.items()
            if one.detail or not one.healthy
        ]
        return " ".join("; ".join(said).split())

    def set(self, name: str, healthy: bool, detail: str = "") -> None:
        component = Component(healthy, detail)
        if self._components.get(name) != component:
            self._components[name] = component
            self._tell()

    def listening(self) -> None:
        """The ports are open and calls can be answered."""
        self._phase = ""
        self._tell()

    def stopping(self) -> None:
        """SIGTERM came: no new caller should choose this process, those who did are still served."""
        self._phase = "stopping"
        self._tell()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call back after every change."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """One that never subscribed may say so too: what is stopped may have failed before it had started."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
