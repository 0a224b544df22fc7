#!/bin/sh
# rules.yaml: /limited has five requests a minute, and each user twenty to all paths together.
. "$(dirname "$0")/../check.sh"

expect 'six requests to /limited' '5x200 1x429' "$(ask -n 6 "$envoy/limited")"
expect 'Envoy marks the denial' true "$(ask -h x-envoy-ratelimited "$envoy/limited")"
expect 'and says what is left' 0 "$(ask -h x-ratelimit-remaining "$envoy/limited")"
expect 'a user anywhere else' '20x200 1x429' "$(ask -n 21 -H "x-user: $me" "$envoy/page/{n}")"
expect 'another user' '1x200' "$(ask -H "x-user: $me-too" "$envoy/page/1")"
finish
