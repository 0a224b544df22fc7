#!/bin/sh
# rules.yaml: each user has five requests a minute.
. "$(dirname "$0")/../check.sh"

expect 'six requests of a user' '5x200 1x429' "$(ask -n 6 -H "x-user: $me" "$envoy/")"
expect 'another user' '1x200' "$(ask -H "x-user: $me-too" "$envoy/")"
expect 'there was a handshake' yes "$([ "$(counter cluster.ratelimit.ssl.handshake)" -gt 0 ] && echo yes || echo no)"
expect 'handshakes that failed' 0 "$(counter cluster.ratelimit.ssl.connection_error)"
finish
