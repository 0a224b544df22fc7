#!/bin/sh
# rules.yaml: each client address has five requests a minute for each kind of page, each user's pages twenty.
. "$(dirname "$0")/../check.sh"

expect 'six users, six invented addresses: one kind of page, one client' '5x200 1x429' \
  "$(ask -n 6 -H 'X-Forwarded-For: 203.0.113.{n}' "$envoy/users/$me-{n}")"
expect 'the denial says why' yes \
  "$(ask -b "$envoy/users/$me-7" | grep -q '"code":429' && echo yes || echo no)"
expect 'another kind of page' '1x200' "$(ask "$envoy/users/$me-1/orders/1")"
finish
