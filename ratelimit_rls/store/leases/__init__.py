"""Hot counters served from hits taken in advance (docs/adr/0014-leases.md)."""

from ratelimit_rls.store.leases.leasing_store import LeasingStore

__all__ = ["LeasingStore"]
