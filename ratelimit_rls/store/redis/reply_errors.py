"""Error replies of Redis and Valkey by what they mean for what was sent."""

from __future__ import annotations

from typing import Any

from ratelimit_rls.store.redis.connection import ReplyError

_REDIRECTS = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_NOT_LOADED = ("NOSCRIPT", "ERR Function not found", "ERR Library")
_NOT_RUN = ("NOSCRIPT", "ERR Function not found", "NOPERM", "OOM")

SPANS_SLOTS = "do not hash to the same slot"
_NOT_LOCAL = ("non local key", "cluster is down", "cluster state is fail")
"""Parts of errors about the slots of keys that a script uses, of Redis 6.2 to 8 and Valkey 9."""


def is_error(reply: Any, prefix: str) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(prefix)


def did_not_run(reply: Any) -> bool:
    """Return True if the server did not even begin to run the script in this form.

    While memory is full, a function is not run at all, whereas a script may still read. An ACL may allow one and not
    the other. Errors of commands within the script may have the same beginning, but they name the script.
    """
    return isinstance(reply, ReplyError) and str(reply).startswith(_NOT_RUN) and "script:" not in str(reply)


def is_slot_error(reply: Any) -> bool:
    """Return True if a run failed because of the slots of its keys. Then it has charged nothing."""
    return isinstance(reply, ReplyError) and (
        str(reply).startswith(_REDIRECTS) or any(words in str(reply) for words in (SPANS_SLOTS, *_NOT_LOCAL))
    )


def indicates_fault(reply: Any) -> bool:
    """Return True if an error may mean that the server is unusable; one that redirects a run, or asks for the script,
    does not."""
    return isinstance(reply, ReplyError) and not str(reply).startswith(_NOT_LOADED) and not is_slot_error(reply)
