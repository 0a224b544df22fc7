#!/bin/sh
# rules.yaml: administrators define the limits of a key, and their changes take effect at once. API is the address of the
# admin API, TOKEN one of its tokens.
. "$(dirname "$0")/../check.sh"
api=${API:-http://localhost:8082}/api/v1

# admin METHOD PATH [JSON]: the status
admin() {
  ask -X "$1" -H "Authorization: Bearer ${TOKEN:-}" ${3:+-d "$3"} "$api$2"
}

call() {
  ask "$@" -H "x-api-key: $key" "$envoy/"
}

limit='{"unit": "year", "requests_per_unit": '
expect 'a tier' '1x201' "$(admin POST /tiers "{\"name\": \"$me\", \"limits\": [$limit 3}]}")"
expect 'a user of this tier' '1x201' "$(admin PUT "/users/$me" "{\"tier\": \"$me\"}")"
made=$(ask -b -X POST -H "Authorization: Bearer ${TOKEN:-}" -d "{\"user_id\": \"$me\"}" "$api/keys")
key=$(echo "$made" | sed -n 's/.*"key": *"\(rlk_[^"]*\)".*/\1/p')
id=$(echo "$key" | sed 's/^rlk_\([^_]*\)_.*/\1/')

eventually 'its key is known' '1x200' call
expect 'and limited by the tier' '2x200 1x429' "$(call -n 3)"
expect 'an override' '1x201' "$(admin POST "/users/$me/override" "{\"limits\": [$limit 5}], \"duration\": \"1h\"}")"
eventually 'acts at once, and nothing is forgotten' '1x200' call
expect 'one more' '1x200 1x429' "$(call -n 2)"
expect 'a block' '1x200' "$(admin PUT "/users/$me/block" '{"reason": "spam"}')"
eventually 'rejects' '1x403' call
expect 'lifted again' '1x200' "$(admin DELETE "/users/$me/block")"
eventually 'it is the limit again' '1x429' call
expect 'the key is revoked' '1x200' "$(admin DELETE "/keys/$id")"
eventually 'rejected as an unknown key' '1x401' call
expect 'without a key the address counts' '3x200 1x429' "$(ask -n 4 "$envoy/")"
finish
