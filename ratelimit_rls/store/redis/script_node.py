"""One Redis server that runs the script: runs are sent together, and replies arrive in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Algorithm, Charge, DescriptorPlan, Limit, PlanTemplate, Step, Unit
from ratelimit_rls.errors import StoreTimeout, StoreUnusable
from ratelimit_rls.store.lua_script import function_library, function_name, script, script_sha
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError
from ratelimit_rls.store.redis.reconnecting import Connect, PendingReplies, ReconnectingConnection
from ratelimit_rls.store.redis.reply_errors import SPANS_SLOTS, did_not_run, explain, forbids_scripts, is_error
from ratelimit_rls.store.redis.resp import bulk, bulk_value, command
from ratelimit_rls.store.script_codec import DEFAULT_IDEMPOTENCY_S, EncodedPlan, encode_batch, jitter_line, make_layout


class ScriptRun(NamedTuple):
    """Plans that one run of the script decides."""

    plans: Sequence[EncodedPlan[bytes]]
    spans_slots: bool = False  # its keys are in several slots of a server of a cluster


Arguments = tuple[int, bytes]
"""The number of arguments of a run, and their encoding from the number of keys on."""


class StartedRuns(NamedTuple):
    """Runs that were sent to a node."""

    sent: PendingReplies
    arguments: Sequence[Arguments]  # of each run
    other_forms: Sequence[Callable[[Arguments], bytes]]  # to send if the node lacks the first
    asking: bool


_SERVER_TIME = bulk(b"")
_ASKING = command(b"ASKING")

_PROBE_STEPS = (Step(Limit(2**31, Unit.SECOND, Algorithm.FIXED_WINDOW, 0), 1, Charge.ADMITTED),)
_PROBE = make_layout(PlanTemplate("", True, _PROBE_STEPS, (DescriptorPlan(None, _PROBE_STEPS, 1),)), bulk, bulk_value)
"""The charge of one hit, with which a new connection is tried. It takes the same path as nearly all calls."""

FREED_CHANNEL = b"rl:freed"
"""The channel for the keys of refunded or deleted counters (after the key prefix)."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options that apply to every server of a deployment."""

    timeout_s: float = 1.0
    connect_timeout_s: float = 10.0
    jitter_ms: int = 0
    idempotency_s: int = DEFAULT_IDEMPOTENCY_S
    key_prefix: bytes = b""
    must_write: bool = True  # connect only to servers that accept writes; not needed to inspect or delete counters
    clock: Callable[[], int] | None = None  # for tests; by default the server's own time is used
    on_connection: Callable[[bool], None] = lambda connected: None
    on_unusable: Callable[[str], None] = lambda reason: None  # see ReconnectingConnection

    @property
    def channel(self) -> bytes:
        return self.key_prefix + FREED_CHANNEL


class ScriptNode:
    """A connection to one server on which the script is loaded: as a function if the server has them, or as a script.

    A function costs Redis about half of what a script does when calls come alone, because its definitions run once.
    """

    def __init__(self, name: str, connect: Connect, options: RedisOptions, *, must_write: bool = True) -> None:
        """`must_write`: use a connection only if the server accepts a charge, so not to a replica.

        On a cluster a key belongs to one server, and the slot map identifies the masters.
        """
        self._options = options
        self._must_write = must_write
        self._has_function = False
        self.spans_slots = True  # whether one run may use several slots of this server
        self._jitter = jitter_line(options.jitter_ms)
        self.connection = ReconnectingConnection(
            name,
            connect,
            self._handshake,
            timeout_s=options.timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            on_connection=options.on_connection,
            on_unusable=options.on_unusable,
        )

    async def _handshake(self, connection: PipelinedConnection, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._load(connection)
                if self._options.must_write:
                    await self._probe(connection)
        except TimeoutError as exc:
            raise StoreTimeout(
                f"Redis at {self.connection.name} did not load the script within {timeout_s:g} s"
            ) from exc

    async def _load(self, connection: PipelinedConnection) -> None:
        """Load the function and the script. Raises StoreUnusable if neither is possible."""
        commands = (_load_function(), command(b"SCRIPT", b"LOAD", script()))
        function, loaded = await asyncio.gather(*map(connection.send, commands))
        if isinstance(loaded, ReplyError):
            raise self._unusable(loaded)
        # Redis 6.2 has no functions, and an ACL, a full memory or a read-only server may forbid to load one.
        self._has_function = not isinstance(function, ReplyError) or "already exists" in str(function)

    async def _probe(self, connection: PipelinedConnection) -> None:
        """Charge a counter that no call uses, as `run_script` does. Raises StoreUnusable if that is not allowed.

        A node of a cluster need not have this counter, but it checks first what the user may do.
        """
        key = self._options.key_prefix + b"rl:probe"
        arguments = self._arguments(ScriptRun([EncodedPlan((bulk(key),), _PROBE)]))
        for form in (_fcall, _evalsha, _eval) if self._has_function else (_evalsha, _eval):
            reply = await connection.send(form(arguments))
            if not did_not_run(reply):
                break
            self._has_function = self._has_function and not forbids_scripts(reply)
        if isinstance(reply, ReplyError) and (self._must_write or forbids_scripts(reply)):
            raise self._unusable(reply)
        deleted = await connection.send(command(b"DEL", key))
        if forbids_scripts(deleted):  # a run that could not undo a charge would leave it behind
            raise self._unusable(deleted)

    def _unusable(self, error: ReplyError) -> StoreUnusable:
        return StoreUnusable(self.connection.name, f"{explain(error)}{error_hint(error)}")

    async def run_script(self, runs: Sequence[ScriptRun]) -> list[Any]:
        """Run the script for each element of `runs`, and return its reply, a ReplyError or a StoreError.

        Raises StoreUnavailable without a connection.
        """
        started = self.start_runs(runs)
        with started.sent:
            return await self.finish_runs(started)

    def start_runs(self, runs: Sequence[ScriptRun], *, asking: bool = False) -> StartedRuns:
        """Send runs, so that several nodes run theirs at the same time. Raises StoreUnavailable without a connection.

        `asking`: the slot is being moved to this node, which accepts only commands after ASKING.
        """
        arguments = [self._arguments(run) for run in runs]
        form, *others = (_fcall, _evalsha, _eval) if self._has_function else (_evalsha, _eval)
        return StartedRuns(self._send([form(one) for one in arguments], asking), arguments, others, asking)

    async def finish_runs(self, started: StartedRuns) -> list[Any]:
        """Return the replies to runs as `run_script` does. Only what the server did not run is sent again."""
        sent, arguments, other_forms, asking = started
        replies = await sent.replies()
        if asking:
            replies = replies[1::2]
        if ReplyError not in map(type, replies):
            return replies
        for form in other_forms:
            again = [at for at, reply in enumerate(replies) if did_not_run(reply)]
            if not again:
                break
            if form is _evalsha:
                await self._restore_function(replies[again[0]])
            with self._send([form(arguments[at]) for at in again], asking) as sent:
                own = await sent.replies()
                for at, reply in zip(again, own[1::2] if asking else own, strict=True):
                    replies[at] = reply
        if any(isinstance(reply, ReplyError) and SPANS_SLOTS in str(reply) for reply in replies):
            self.spans_slots = False  # the server accepts no such runs at all, which depends on its version
        return replies

    async def _restore_function(self, error: ReplyError) -> None:
        """Load the function that was deleted, or that a new master never had. Give it up if it is not allowed."""
        if is_error(error, "NOPERM"):
            self._has_function = False
        elif is_error(error, "ERR Function not found"):
            with self.connection.send([_load_function()]) as sent:
                await sent.replies()

    def _send(self, commands: Sequence[bytes], asking: bool) -> PendingReplies:
        return self.connection.send(
            [prefix for one in commands for prefix in (_ASKING, one)] if asking else commands,
        )

    def _arguments(self, run: ScriptRun) -> Arguments:
        options = self._options
        now_us = options.clock() if options.clock else None
        # Only calendar windows depend on the time of this process.
        time_us = time.time_ns() // 1000 if now_us is None else now_us
        keys, text = encode_batch(run.plans, time_us, options.idempotency_s, spans_slots=run.spans_slots)
        now = [] if now_us is None else [bulk(b"%d" % now_us)]
        if run.spans_slots:  # the keys that a script declares must be in one slot
            parts = [bulk(b"1"), keys[0], bulk(self._jitter + text), *(now or [_SERVER_TIME]), *keys[1:]]
        else:
            parts = [bulk(b"%d" % len(keys)), *keys, bulk(self._jitter + text), *now]
        return len(parts), b"".join(parts)

    async def close(self) -> None:
        await self.connection.close()


def error_hint(error: ReplyError) -> str:
    """Return advice for an error of a server that is configured as a single one."""
    return "; the server is a node of a cluster: set REDIS_TYPE=CLUSTER" if str(error).startswith("MOVED") else ""


def _load_function() -> bytes:
    return command(b"FUNCTION", b"LOAD", function_library())


def _fcall(arguments: Arguments) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$5\r\nFCALL\r\n%s%s" % (count + 2, bulk(function_name()), packed)


def _evalsha(arguments: Arguments) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$7\r\nEVALSHA\r\n%s%s" % (count + 2, bulk(script_sha()), packed)


def _eval(arguments: Arguments) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$4\r\nEVAL\r\n%s%s" % (count + 2, bulk(script()), packed)
