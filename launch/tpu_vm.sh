#!/usr/bin/env bash
# A run on TPU VMs: launch/tpu_vm.sh [--dry-run] ACTION SETTINGS
#
#   create   ask for the slices (a queued resource) and wait until they are there
#   setup    bring the program to every host: pull the image, or copy these sources and install the lock's packages
#   start    start the program on all hosts at once (a second start on a host that runs it does nothing)
#   status   the queued resource's state and every host's
#   logs     the end of the first host's log
#   stop     SIGTERM on every host: the run saves a checkpoint and ends
#   delete   give the slices back
#
# SETTINGS is the file that `python -m launch.render --target=tpu-vm ... > SETTINGS` wrote: NAME=VALUE lines, read as text.
# Every action may be repeated. --dry-run prints every command and runs none. Exit status: 0 done, 1 a step failed (named
# on the last line), 2 bad arguments or settings.
set -euo pipefail

readonly NAMES=" NAME PROJECT ZONE SLICES HOSTS TYPE TOPOLOGY RUNTIME_VERSION SPOT RESERVATION SERVICE_ACCOUNT IMAGE \
MOUNTS GRACE_SECONDS MAX_RESTARTS COMMAND "
readonly POLL_SECONDS=${TPU_VM_POLL_SECONDS:-30}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
declare -A settings
dry_run=

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

die() {
  echo "tpu_vm.sh: $*" >&2
  exit 1
}

# Runs its arguments, or prints them quoted.
run() {
  if [[ $dry_run ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

read_settings() {
  local line name
  [[ -r $1 ]] || { echo "tpu_vm.sh: cannot read the settings file $1" >&2; exit 2; }
  while IFS= read -r line; do
    name=${line%%=*}
    [[ $line == *=* && $NAMES == *" $name "* ]] || { echo "tpu_vm.sh: $1: no setting: $line" >&2; exit 2; }
    settings[$name]=${line#*=}
  done <"$1"
  for name in $NAMES; do
    [[ -v settings[$name] ]] || { echo "tpu_vm.sh: $1 lacks $name: render it again" >&2; exit 2; }
  done
  # What becomes part of a command or of arithmetic, which bash would evaluate.
  [[ ${settings[NAME]} =~ ^[a-z][-a-z0-9]*$ ]] || { echo "tpu_vm.sh: $1: NAME=${settings[NAME]}: no name" >&2; exit 2; }
  for name in SLICES HOSTS GRACE_SECONDS MAX_RESTARTS; do
    [[ ${settings[$name]} =~ ^[0-9]+$ ]] || { echo "tpu_vm.sh: $1: $name=${settings[$name]}: no number" >&2; exit 2; }
  done
}

place() {
  echo "--project=${settings[PROJECT]}" "--zone=${settings[ZONE]}" --quiet
}

queued_resources() {
  local where
  read -ra where <<<"$(place)"
  run gcloud compute tpus queued-resources "$@" "${where[@]}"
}

# On every host of every slice at once: slices that start one after the other wait for each other until they time out.
everywhere() {
  local action=$1
  shift
  queued_resources "$action" "$@" --node=all --worker=all \
    "--batch-size=$((settings[SLICES] * settings[HOSTS]))"
}

on_hosts() {
  everywhere ssh "${settings[NAME]}" "--command=bash ./${settings[NAME]}/tpu_node.sh $1"
}

# The queued resource's state, empty if there is none. Listing tells "none" from "no permission" or "no network".
state() {
  queued_resources list "--filter=name~/${settings[NAME]}\$" "--format=value(state.state)"
}

known_state() {
  local found
  found=$(state) || die "$1: cannot list queued resources (gcloud's message is above)"
  echo "$found"
}

create() {
  local found='' nodes options=() where
  if [[ $dry_run ]]; then state; else found=$(known_state create); fi
  if [[ $found == FAILED || $found == SUSPENDED || $found == SUSPENDING ]]; then
    die "create: ${settings[NAME]} is $found: run the action delete, then create again"
  fi
  if [[ -z $found ]]; then
    nodes=("--node-id=${settings[NAME]}")
    if ((settings[SLICES] > 1)); then
      nodes=("--node-count=${settings[SLICES]}" "--node-prefix=${settings[NAME]}")
    fi
    [[ ${settings[SPOT]} ]] && options+=(--spot)
    [[ ${settings[RESERVATION]} ]] && options+=(--reserved "--reservation=${settings[RESERVATION]}")
    [[ ${settings[SERVICE_ACCOUNT]} ]] && options+=("--service-account=${settings[SERVICE_ACCOUNT]}")
    read -ra where <<<"$(place)"
    # alpha: the only track that takes a topology for every type
    run gcloud alpha compute tpus queued-resources create "${settings[NAME]}" "${nodes[@]}" \
      "--type=${settings[TYPE]}" "--topology=${settings[TOPOLOGY]}" "--runtime-version=${settings[RUNTIME_VERSION]}" \
      "${options[@]}" --async "${where[@]}" || die "create: the request failed (gcloud's message is above)"
  fi
  [[ $dry_run ]] && return
  while found=$(known_state create) && [[ $found != ACTIVE ]]; do
    case $found in
      '' | FAILED | SUSPEND* | DELETING) die "create: ${settings[NAME]} is ${found:-gone}: delete it, then create again" ;;
    esac
    echo "${settings[NAME]} is $found; looking again in $POLL_SECONDS s" >&2
    sleep "$POLL_SECONDS"
  done
  echo "${settings[NAME]} is ACTIVE"
}

setup() {
  local scratch files
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064 # the name is wanted as it is now
  trap "rm -rf '$scratch'" EXIT
  cp -- "$1" "$scratch/settings"
  files=("$here/tpu_node.sh" "$scratch/settings")
  if [[ -z ${settings[IMAGE]} ]]; then
    run tar --create --gzip --file="$scratch/source.tar.gz" --directory="$here/.." --exclude=__pycache__ \
      app configs data launch pyproject.toml requirements.lock || die "setup: cannot pack the sources"
    files+=("$scratch/source.tar.gz")
  fi
  everywhere ssh "${settings[NAME]}" "--command=mkdir -p ./${settings[NAME]}" || die "setup: cannot reach every host"
  everywhere scp "${files[@]}" "${settings[NAME]}:./${settings[NAME]}/" || die "setup: cannot copy to every host"
  on_hosts setup || die "setup: a host could not install the program"
}

main() {
  local found=unknown
  if [[ ${1:-} == --dry-run ]]; then
    dry_run=yes
    shift
  fi
  (($# == 2)) || usage
  read_settings "$2"
  case $1 in
    create) create ;;
    setup) setup "$2" ;;
    start) on_hosts start || die "start: a host did not start (run setup first?); run stop before the next start" ;;
    status)
      if [[ $dry_run ]]; then state; else found=$(known_state status); fi
      [[ $dry_run ]] || echo "queued resource: ${found:-none}"
      on_hosts status || die "status: a host does not answer"
      ;;
    logs)
      queued_resources ssh "${settings[NAME]}" "--command=bash ./${settings[NAME]}/tpu_node.sh logs" \
        --node=0 --worker=0 || die "logs: the first host does not answer"
      ;;
    stop) on_hosts stop || die "stop: a host did not stop" ;;
    delete)
      if [[ $dry_run ]]; then state; else found=$(known_state delete); fi
      if [[ -z $found ]]; then
        echo "${settings[NAME]}: there is no such queued resource"
        return
      fi
      queued_resources delete "${settings[NAME]}" --force --async || die "delete: the request failed"
      ;;
    *) usage ;;
  esac
}

main "$@"
