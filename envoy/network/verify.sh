#!/bin/sh
# rules.yaml: five connections a minute from each address. Each request here is a connection of its own.
. "$(dirname "$0")/../check.sh"

closed=$(counter ratelimit.tcp_ingress.cx_closed)
expect 'seven connections' '5x200 2xclosed' "$(ask -n 7 "$envoy/")"
expect 'Envoy has closed' 2 $(($(counter ratelimit.tcp_ingress.cx_closed) - closed))
expect 'calls that the service did not answer' 0 "$(counter ratelimit.tcp_ingress.error)"
finish
