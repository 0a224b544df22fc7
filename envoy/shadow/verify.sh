#!/bin/sh
# rules.yaml: three requests a minute for each user, on trial, and for each team, in earnest.
. "$(dirname "$0")/../check.sh"

# would_refuse: hits above the limit on trial, as the service has counted them
would_refuse() {
  ask -b "$debug/stats" | sed -n 's/^ratelimit\.service\.rate_limit\.edge\.user\.shadow_mode: //p'
}
before=$(would_refuse)
expect 'a limit on trial refuses nobody' '6x200' "$(ask -n 6 -H "x-user: $me" "$envoy/")"
expect 'the answer says that nothing is left' 0 "$(ask -h x-ratelimit-remaining -H "x-user: $me" "$envoy/")"
expect 'the service has counted what it would refuse' 4 $(($(would_refuse) - ${before:-0}))
expect 'a limit in earnest refuses' '3x200 3x429' "$(ask -n 6 -H "x-team: $me" "$envoy/")"

over=$(counter cluster.upstream.ratelimit.over_limit)
expect 'Envoy is told to enforce nothing' '1x200' "$(ask -X POST "$admin/runtime_modify?ratelimit.enforced=0")"
expect 'refusals are passes now' '6x200' "$(ask -n 6 -H "x-team: $me" "$envoy/")"
expect 'and counted by Envoy' 6 $(($(counter cluster.upstream.ratelimit.over_limit) - over))
expect 'Envoy is told to enforce again' '1x200' "$(ask -X POST "$admin/runtime_modify?ratelimit.enforced=100")"
expect 'and refuses again' '1x429' "$(ask -H "x-team: $me" "$envoy/")"
finish
