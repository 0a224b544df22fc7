"""The host of a request as one name: what is the same host to an upstream must not have a counter for each spelling.

No action of Envoy's can change a text, and CEL has no functions on texts where rate limits use it. So a filter of our
own, a few lines of Lua, leaves the name where the `metadata` action finds it. No client can put anything there.
"""

from __future__ import annotations

from ratelimit_rls.envoy_config.api import Any, DataSource, HttpFilter, Lua
from ratelimit_rls.envoy_config.source import Metadata

HOST_METADATA = Metadata("ratelimit-rls", ("host",))

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
"""In lower case; without a user's name, a port, and the dot that a full name may end with."""


def host_filter() -> HttpFilter:
    config = Lua(default_source_code=DataSource(inline_string=SCRIPT))
    return HttpFilter(name=NAME, typed_config=Any.pack(config))
