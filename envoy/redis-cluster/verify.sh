#!/bin/sh
# rules.yaml: ten requests a minute for each user. Two replicas of the service take turns, and count in one cluster.
. "$(dirname "$0")/../check.sh"

# Of the replicas, how many Envoy has asked: after a start, both once it has looked at their health.
asked() {
  ask -n 2 -H "x-user: $me-early-$tries" "$envoy/" > /dev/null
  ask -b "$admin/clusters" | sed -n 's/^ratelimit::.*::rq_success:://p' | grep -c -v '^0$'
}
eventually 'replicas that are asked' 2 asked
for user in a b c d; do # of different slots, so of different nodes
  expect "user $user, of both replicas together" '10x200 1x429' "$(ask -n 11 -H "x-user: $me-$user" "$envoy/")"
done
expect 'calls that the service did not answer' 0 "$(counter cluster.upstream.ratelimit.error)"
finish
