# Functions that every verify.sh uses. They use the addresses of the configuration files, or those in these variables:
# ENVOY, ADMIN (Envoy's admin interface) and DEBUG (the debug port of the service). PYTHON is any Python 3.
envoy=${ENVOY:-http://localhost:10000}
admin=${ADMIN:-http://localhost:9901}
debug=${DEBUG:-http://localhost:6070}
ask_py=$(dirname "$0")/../ask.py
failures=0

# A new name for each run, so that a second run does not use the counters of the first.
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

# eventually WHAT WANTED COMMAND…: for results that are visible only a moment after a response
eventually() {
  what=$1 wanted=$2 tries=0
  shift 2
  until seen=$("$@") && [ "$seen" = "$wanted" ] || [ $tries -ge 50 ]; do
    tries=$((tries + 1))
    sleep 0.1
  done
  expect "$what" "$wanted" "$seen"
}

# counter NAME: the value of a counter of Envoy; 0 if Envoy does not have it yet, because it never counted anything
counter() {
  value=$(ask -b "$admin/stats?filter=^$1\$" | sed -n 's/^.*: \([0-9]*\)$/\1/p')
  echo "${value:-0}"
}

finish() {
  [ $failures -eq 0 ] && exit 0
  echo "  ($failures failed. Limits are by the minute: after a run just before, wait for the next.)"
  exit 1
}
