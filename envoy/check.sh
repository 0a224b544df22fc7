# What every verify.sh is written in. It speaks to the sandbox where the configuration files put it, or where these
# variables say: ENVOY, ADMIN (Envoy's) and DEBUG (the service's). PYTHON is any Python 3.
envoy=${ENVOY:-http://localhost:10000}
admin=${ADMIN:-http://localhost:9901}
debug=${DEBUG:-http://localhost:6070}
ask_py=$(dirname "$0")/../ask.py
failures=0

# Somebody new each time, so that a second run does not meet what the first has used.
me=verify-$$-$(date +%s)

# Limits are per minute or hour; checks that span the end of one would see two windows. They take a few seconds.
second=$(date +%S)
if [ "$second" -ge 50 ]; then sleep $((61 - second)); fi

ask() {
  "${PYTHON:-python3}" -I -S "$ask_py" "$@"
}

ask -b "$admin/ready" > /dev/null || {
  echo "  FAIL  Envoy's admin page is not at $admin: is the sandbox running? ADMIN and ENVOY say where."
  exit 1
}

# expect WHAT WANTED SEEN
expect() {
  if [ "$2" = "$3" ]; then
    echo "  ok    $1: $3"
  else
    echo "  FAIL  $1: $3, and not $2"
    failures=$((failures + 1))
  fi
}

# eventually WHAT WANTED COMMAND…: what comes a moment after an answer
eventually() {
  what=$1 wanted=$2 tries=0
  shift 2
  until seen=$("$@") && [ "$seen" = "$wanted" ] || [ $tries -ge 50 ]; do
    tries=$((tries + 1))
    sleep 0.1
  done
  expect "$what" "$wanted" "$seen"
}

# counter NAME: one of Envoy's own, as it stands now; those that never counted anything are not there yet
counter() {
  value=$(ask -b "$admin/stats?filter=^$1\$" | sed -n 's/^.*: \([0-9]*\)$/\1/p')
  echo "${value:-0}"
}

finish() {
  [ $failures -eq 0 ] && exit 0
  echo "  ($failures failed. Limits are by the minute: after a run just before, wait for the next.)"
  exit 1
}
