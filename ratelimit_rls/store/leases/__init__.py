"""Hot counters served from hits taken in advance (docs/adr/0014)."""

from ratelimit_rls.store.leases.store import Leases

__all__ = ["Leases"]
