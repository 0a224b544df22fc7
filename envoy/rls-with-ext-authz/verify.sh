#!/bin/sh
# rules.yaml: ext_authz determines the plan of an API key and rejects requests without a key; the rate limit filter counts by plan.
. "$(dirname "$0")/../check.sh"

expect 'no key: rejected by ext_authz, with its status' '1x401' "$(ask "$envoy/reports")"
expect 'a key of the free plan' '2x200 1x429' "$(ask -n 3 -H "x-api-key: free-$me" "$envoy/reports")"
expect 'a key of the gold plan' '4x200 1x429' "$(ask -n 5 -H "x-api-key: gold-$me" "$envoy/reports")"
expect 'another page of the free plan' '1x200' "$(ask -H "x-api-key: free-$me" "$envoy/")"
expect 'what ext_authz lets a key do anywhere' '15x200 1x429' "$(ask -n 16 -H "x-api-key: busy-$me" "$envoy/")"
expect 'and one of the gold plan' '20x200 1x429' "$(ask -n 21 -H "x-api-key: gold-busy-$me" "$envoy/")"
finish
