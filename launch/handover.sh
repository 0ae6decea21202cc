# shellcheck shell=sh
# Sourced by the wrappers beside it, which set `here` and read `real`, `goes`, `state`.
# shellcheck disable=SC2034,SC2154

# next_on_path NAME: sets `real` to the NAME on PATH that is not in this directory.
next_on_path() {
  real='' IFS=:
  for directory in $PATH; do
    [ -x "$directory/$1" ] || continue
    [ "$(CDPATH='' cd -- "$directory" && pwd -P)" = "$here" ] && continue
    real=$directory/$1 && break
  done
  unset IFS
  [ -n "$real" ] || {
    echo "$1: not found on PATH behind $here: is it installed, its environment active?" >&2
    exit 127
  }
}

# side_of WORD: sets `goes` to trainer for the config and what overrides it, otherwise
# to launcher; `state` carries over from word to word.
side_of() {
  goes=launcher
  case $state:$1 in
    *:--config) goes=trainer state=value ;;
    *:--config=* | value:*) goes=trainer state=after ;;
    after:-*) ;;
    after:*=* | after:~*) goes=trainer ;;
  esac
}

# refuse_slots WORD: ends where a flag chooses among GPUs and this machine has none; the
# launcher itself would answer with a traceback.
refuse_slots() {
  case $1 in
    localhost:* | --include=localhost:* | --exclude=localhost:*)
      echo "${1#*=} chooses GPUs and this machine has none; say --num_accelerators 2" >&2
      exit 2
      ;;
  esac
}

# run_awaited COMMAND...: DeepSpeed's runner answers Ctrl-C with a traceback and does not
# wait for its ranks. In the background it is deaf to it; the ranks get it from the
# terminal, and are awaited.
run_awaited() {
  trap : INT
  trap 'kill -TERM "$!" 2>/dev/null || :' TERM # it may have ended already
  "$@" &
  runner=$! status=0
  wait "$runner" || status=$?
  # Above 128 a signal broke the wait off, or ended the runner: ask until it is gone. The
  # shell may have collected it by then: 127 says that its status was the last one.
  while [ "$status" -gt 128 ] && kill -0 "$runner" 2>/dev/null; do
    status=0 && wait "$runner" || status=$?
  done
  if [ "$status" -gt 128 ]; then
    last=0 && wait "$runner" 2>/dev/null || last=$?
    [ "$last" -eq 127 ] || status=$last
  fi
  exit "$status"
}
