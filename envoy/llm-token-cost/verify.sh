#!/bin/sh
# rules.yaml: 100 tokens an hour for each user. The upstream reports the tokens of the header x-tokens.
. "$(dirname "$0")/../check.sh"

chat() {
  ask -H "x-user: $1" -H "x-tokens: $2" "$envoy/v1/chat/completions"
}
left() {
  ask -h x-ratelimit-remaining -H "x-user: $1" -H 'x-tokens: 0' "$envoy/v1/chat/completions"
}
expect 'a request of 60 tokens' '1x200' "$(chat "$me" 60)"
eventually 'is charged when it has been answered, and leaves' 40 left "$me"
expect 'another of 60 passes: its cost was not known before' '1x200' "$(chat "$me" 60)"
eventually 'that is debt, and the next is denied' '1x429' chat "$me" 0
expect 'another user' '1x200' "$(chat "$me-too" 1)"
finish
