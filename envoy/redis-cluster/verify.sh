#!/bin/sh
# rules.yaml: ten requests a minute for each user. Two replicas of the service take turns, and count in one cluster.
. "$(dirname "$0")/../check.sh"

# The number of replicas that Envoy has called: both, once it has checked their health after a start.
asked() {
  ask -n 2 -H "x-user: $me-early-$tries" "$envoy/" > /dev/null
  ask -b "$admin/clusters" | sed -n 's/^ratelimit::.*::rq_success:://p' | grep -c -v '^0$'
}
eventually 'replicas that Envoy calls' 2 asked
for user in a b c d; do # in different slots, so on different nodes
  expect "user $user, of both replicas together" '10x200 1x429' "$(ask -n 11 -H "x-user: $me-$user" "$envoy/")"
done
expect 'calls that the service did not answer' 0 "$(counter cluster.upstream.ratelimit.error)"
finish
