#!/bin/sh
# rules.yaml: each user has five requests a minute.
. "$(dirname "$0")/../check.sh"

expect 'six requests of a user' '5x200 1x429' "$(ask -n 6 -H "x-user: $me" "$envoy/")"
expect 'another user' '1x200' "$(ask -H "x-user: $me-too" "$envoy/")"
expect 'calls that the service did not answer' 0 "$(counter cluster.upstream.ratelimit.error)"
finish
