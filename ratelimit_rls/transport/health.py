"""Health of the service, derived from its components and reported over gRPC and HTTP.

There are two states, because orchestrators act on them differently:
  alive     the process listens and is not stopping        gRPC service "", HTTP /livez
  serving   alive, and every component is healthy          gRPC service "ratelimit", HTTP /healthcheck
`alive` does not depend on the store: restarting the process does not bring an unavailable store back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

SERVICE = "ratelimit"
"""Service name of envoyproxy/ratelimit in grpc.health.v1."""

STARTING = "starting"


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """Health of one component."""

    healthy: bool
    detail: str = ""  # may be set for a healthy component, too


class Health:
    """Health of the components and of the process. Use it in the event loop's thread only.

    `components` (redis, config, …) are unhealthy until `set` is called for them.
    """

    def __init__(self, components: Iterable[str] = ()) -> None:
        self._components = {name: ComponentHealth(False, "not ready yet") for name in components}
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
        """Description of the current state in one line; empty if everything is fine."""
        parts = [f"server: {self._phase}"] if self._phase else []
        parts += [
            f"{name}: {one.detail or 'unhealthy'}"
            for name, one in self._components.items()
            if one.detail or not one.healthy
        ]
        return " ".join("; ".join(parts).split())

    def set(self, name: str, healthy: bool, detail: str = "") -> None:
        component = ComponentHealth(healthy, detail)
        if self._components.get(name) != component:
            self._components[name] = component
            self._notify()

    def listening(self) -> None:
        """Report that the ports are open."""
        self._phase = ""
        self._notify()

    def stopping(self) -> None:
        """Report that the process received SIGTERM: clients should use another one, but calls are still served."""
        self._phase = "stopping"
        self._notify()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Remove a listener. Does nothing if it never subscribed, as after a failed start."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
