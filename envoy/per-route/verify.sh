#!/bin/sh
# envoy.yaml: the route determines the limits of a request; rules.yaml has their values.
. "$(dirname "$0")/../check.sh"

expect 'a route without a word: the limit of the host' '6x200 1x429' "$(ask -n 7 -H "x-user: $me-a" "$envoy/")"
expect '/search: a limit of its own instead' '2x200 1x429' "$(ask -n 3 -H "x-user: $me-b" "$envoy/search")"
expect 'which has left that of the host alone' '6x200 1x429' "$(ask -n 7 -H "x-user: $me-b" "$envoy/")"
expect '/upload: both, the smaller denies' '4x200 1x429' "$(ask -n 5 -H "x-user: $me-c" "$envoy/upload")"
expect 'and that of the host was spent, too' '1x200 1x429' "$(ask -n 2 -H "x-user: $me-c" "$envoy/")"
expect '/export: a domain of its own' '1x200 1x429' "$(ask -n 2 -H "x-user: $me-d" "$envoy/export")"
expect '/health: the service is not called' '9x200' "$(ask -n 9 -H "x-user: $me-a" "$envoy/health")"
finish
