"""Error replies of Redis and Valkey by what they mean for what was sent."""

from __future__ import annotations

import re
from typing import Any

from ratelimit_rls.errors import one_line
from ratelimit_rls.store.redis.connection import ReplyError

_REDIRECTS = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_NOT_LOADED = ("NOSCRIPT", "ERR Function not found", "ERR Library")
_NO_WRITES_NOW = ("OOM", "NOREPLICAS", "MISCONF")
"""Errors of a server whose memory is full, that has too few replicas, or whose last snapshot failed."""

_NOT_RUN = ("NOSCRIPT", "ERR Function not found", "ERR unknown command", "NOPERM", *_NO_WRITES_NOW)

_RUNS_SCRIPTS = re.compile(r"'(fcall|evalsha|eval|script(\|load)?)'")
_FORBIDDEN = re.compile(r"NOPERM|ACL failure in script|The user executing the script can't")
_COMMAND = re.compile(r"the '(\S+)' command")
_USER = re.compile(r"\b(User \S+|this user) has")
_NO_SCRIPTS = ("ERR unknown command", "ERR Could not find scripting engine")

SPANS_SLOTS = "do not hash to the same slot"
_NOT_LOCAL = ("non local key", "cluster is down", "cluster state is fail")
"""Parts of errors about the slots of keys that a script uses, of Redis 6.2 to 8 and Valkey 9."""


def is_error(reply: Any, prefix: str) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(prefix)


def did_not_run(reply: Any) -> bool:
    """Return True if the server did not even begin to run the script in this form.

    While a server accepts no writes, a function is not run at all, whereas a script may still read. An ACL may allow
    one and not the other. Errors of commands within the script may have the same beginning, but they name the script.
    """
    return isinstance(reply, ReplyError) and str(reply).startswith(_NOT_RUN) and "script:" not in str(reply)


def needs_script(reply: Any) -> bool:
    """Return True if a function was not run because the server accepts no writes now. A script may still read."""
    return did_not_run(reply) and str(reply).startswith(_NO_WRITES_NOW)


def forbids_scripts(reply: Any) -> bool:
    """Return True if this user or this server runs no scripts, or not all commands that the script needs.

    Only an operator can change that. A full memory and a slot that has moved are temporary.
    """
    return isinstance(reply, ReplyError) and bool(_FORBIDDEN.search(str(reply)) or str(reply).startswith(_NO_SCRIPTS))


def explain(error: ReplyError) -> str:
    """Return what an error says and, if an operator has to change something, what would be right.

    The result has no user name. An unknown command is not followed by its arguments, which may be the script.
    """
    text = one_line(_USER.sub("the user has", str(error).partition(", with args beginning with")[0]))
    if text.startswith("NOPERM") and _RUNS_SCRIPTS.search(text):
        return (
            "its user may not run the script with FCALL or EVALSHA: grant +evalsha +eval +script|load, "
            "and on Redis 7 and Valkey +fcall +function|load"
        )
    if text.startswith("NOPERM"):
        return f"{text}; grant what docs/operations.md lists for a dedicated user"
    if _FORBIDDEN.search(text):
        which = _COMMAND.search(text)  # Redis does not say it, Valkey does
        return (
            f"its user may not run {which[1].upper() if which else 'all commands'} in the script: "
            "grant what docs/operations.md lists for a dedicated user"
        )
    if "READONLY" in text:  # Redis 6.2 has it inside the message
        return "it is a replica, which accepts no writes: name its master, or the sentinels with REDIS_TYPE=SENTINEL"
    if text.startswith(_NO_SCRIPTS):
        return f"it runs no Lua scripts ({text}): use Redis 6.2 or later or Valkey, with EVALSHA, EVAL and SCRIPT LOAD"
    return text


def is_slot_error(reply: Any) -> bool:
    """Return True if a run failed because of the slots of its keys. Then it has charged nothing."""
    return isinstance(reply, ReplyError) and (
        str(reply).startswith(_REDIRECTS) or any(words in str(reply) for words in (SPANS_SLOTS, *_NOT_LOCAL))
    )


def indicates_fault(reply: Any) -> bool:
    """Return True if an error may mean that the server is unusable; one that redirects a run, or asks for the script,
    does not."""
    return isinstance(reply, ReplyError) and not str(reply).startswith(_NOT_LOADED) and not is_slot_error(reply)
