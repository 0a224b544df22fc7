"""Normalisation of the request's host: all spellings of one host must share a counter.

No action of Envoy can transform text, and CEL has no string functions where rate limits use it. So a Lua filter of a
few lines writes the name to dynamic metadata, where the `metadata` action finds it. Clients cannot write there.
"""

from __future__ import annotations

from ratelimit_rls.envoy_config.api import Any, DataSource, HttpFilter, Lua
from ratelimit_rls.envoy_config.value_sources import MetadataAction

HOST_METADATA = MetadataAction("ratelimit-rls", ("host",))

NAME = "ratelimit-rls.host"

SCRIPT = """\
function envoy_on_request(handle)
  local host = handle:headers():get(":authority")
  if host then
    host = host:lower():gsub("^.*@", ""):gsub(":%d*$", ""):gsub("%.$", "")
    handle:streamInfo():dynamicMetadata():set("ratelimit-rls", "host", host)
  end
end
"""
"""Lower-cases the host, and removes user info, port and trailing dot."""


def host_filter() -> HttpFilter:
    config = Lua(default_source_code=DataSource(inline_string=SCRIPT))
    return HttpFilter(name=NAME, typed_config=Any.pack(config))
