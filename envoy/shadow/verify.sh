#!/bin/sh
# rules.yaml: three requests a minute for each user, in shadow mode, and for each team, enforced.
. "$(dirname "$0")/../check.sh"

# would_deny: hits above the limit in shadow mode, as counted by the service
would_deny() {
  ask -b "$debug/stats" | sed -n 's/^ratelimit\.service\.rate_limit\.edge\.user\.shadow_mode: //p'
}
before=$(would_deny)
expect 'a limit in shadow mode denies no request' '6x200' "$(ask -n 6 -H "x-user: $me" "$envoy/")"
expect 'the response says that nothing remains' 0 "$(ask -h x-ratelimit-remaining -H "x-user: $me" "$envoy/")"
expect 'the service has counted the hits it would deny' 4 $(($(would_deny) - ${before:-0}))
expect 'an enforced limit denies requests' '3x200 3x429' "$(ask -n 6 -H "x-team: $me" "$envoy/")"

over=$(counter cluster.upstream.ratelimit.over_limit)
expect 'configure Envoy to enforce nothing' '1x200' "$(ask -X POST "$admin/runtime_modify?ratelimit.enforced=0")"
expect 'requests over the limit pass now' '6x200' "$(ask -n 6 -H "x-team: $me" "$envoy/")"
expect 'and counted by Envoy' 6 $(($(counter cluster.upstream.ratelimit.over_limit) - over))
expect 'configure Envoy to enforce again' '1x200' "$(ask -X POST "$admin/runtime_modify?ratelimit.enforced=100")"
expect 'and denies requests again' '1x429' "$(ask -H "x-team: $me" "$envoy/")"
finish
