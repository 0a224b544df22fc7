"""h11 parser with additional limits on requests."""

from __future__ import annotations

import h11

from ratelimit_rls.transport.http.limits import MAX_HEAD_BYTES, MAX_HEADER_FIELDS

FREE_CHUNKS = 1000
MIN_CHUNK_BYTES = 256
"""Minimum average size of the chunks after FREE_CHUNKS. A chunk costs about 10 µs, whatever its size: a body of
one-byte chunks would block the event loop for seconds."""

_OVERHEAD_BYTES = 4  # of a header field: colon, space and line end


class RequestParser(h11.Connection):
    """h11 connection that raises h11.RemoteProtocolError for requests beyond our limits, too; it must then be
    closed."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.error: h11.RemoteProtocolError | None = None
        self.requests = 0  # so far
        self._chunks = 0  # of this request
        self._body_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.requests += 1
                self._chunks = self._body_bytes = 0
                _check_head(event)
            elif isinstance(event, h11.Data):
                self._count_chunk(len(event.data))
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _count_chunk(self, size: int) -> None:
        self._chunks += 1
        self._body_bytes += size
        if self._chunks > FREE_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            raise h11.RemoteProtocolError(
                f"too many small chunks: after {FREE_CHUNKS}, they must average {MIN_CHUNK_BYTES} bytes"
            )


def _check_head(request: h11.Request) -> None:
    names = set()
    size = len(request.method) + len(request.target)
    for name, value in request.headers:
        names.add(name)
        size += len(name) + len(value) + _OVERHEAD_BYTES
    if len(request.headers) > MAX_HEADER_FIELDS:
        raise h11.RemoteProtocolError(f"at most {MAX_HEADER_FIELDS} header fields are allowed", error_status_hint=431)
    if size > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"at most {MAX_HEAD_BYTES} bytes of headers are allowed", error_status_hint=431)
    if names >= {b"content-length", b"transfer-encoding"}:
        # RFC 9112, section 6.1: request smuggling, if a proxy uses one of them and the server the other.
        raise h11.RemoteProtocolError("a request must not have both Content-Length and Transfer-Encoding")
