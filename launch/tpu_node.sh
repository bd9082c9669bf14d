#!/usr/bin/env bash
# One host's part of launch/tpu_vm.sh, which copies it there beside the settings: tpu_node.sh setup|start|status|logs|stop
#
# The program runs under `supervise`, which starts it again after the exit statuses that ask for it (42: stopped by a
# signal after a checkpoint; 128-255: lost peer, watchdog, signal), as the manifests on GKE do.
set -euo pipefail

readonly RESTART_SECONDS=${TPU_NODE_RESTART_SECONDS:-10}
cd "$(dirname "${BASH_SOURCE[0]}")"
readonly log=run.log pid_file=run.pid stop_file=stop.asked status_file=exit.status
declare -A settings
while IFS= read -r line; do settings[${line%%=*}]=${line#*=}; done <settings

metadata() {
  curl --silent --fail --max-time 10 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

# The first host's address. jax finds number and id of the processes from the metadata itself; its own port, 8482, is
# closed in networks made for Cloud TPU, 8476 is open there.
coordinator() {
  local found
  found=$(metadata tpu-env | sed -n "s/^MEGASCALE_COORDINATOR_ADDRESS: *'\{0,1\}\([^':]*\).*/\1/p")
  if [[ -z $found ]]; then
    found=$(metadata worker-network-endpoints | cut -d, -f1)
    found=${found##*:}
  fi
  [[ $found ]] || { echo "the metadata server names no coordinator" >&2; return 1; }
  echo "$found:8476"
}

# Every path of MOUNTS is there: buckets through gcsfuse, `host` ones by whoever set the machines up.
mounts() {
  local mount path
  for mount in ${settings[MOUNTS]}; do
    path=${mount%%=*}
    if [[ $mount == *=gs://* ]] && ! mountpoint --quiet "$path"; then
      sudo mkdir -p "$path"
      # No cache of names: hosts must see each other's files.
      sudo gcsfuse -o allow_other --uid "$(id -u)" --gid "$(id -g)" --implicit-dirs --metadata-cache-ttl-secs 0 \
        "${mount#*=gs://}" "$path"
    fi
    [[ -d $path ]] || { echo "$path is not there: mount it on every VM" >&2; return 1; }
  done
}

install_gcsfuse() {
  local key=/usr/share/keyrings/cloud.google.asc site=https://packages.cloud.google.com/apt
  curl --silent --fail "$site/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] $site gcsfuse-$(lsb_release --codename --short) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get update --quiet
  sudo apt-get install --quiet --yes gcsfuse
}

alive() {
  [[ -s $pid_file ]] && kill -0 "$(<"$pid_file")" 2>/dev/null
}

setup() {
  [[ ${settings[MOUNTS]} != *=gs://* ]] || command -v gcsfuse >/dev/null || install_gcsfuse
  mounts
  if [[ ${settings[IMAGE]} ]]; then
    local registry=${settings[IMAGE]%%/*}
    if [[ $registry == *.pkg.dev || $registry == *gcr.io ]]; then
      sudo gcloud auth configure-docker "$registry" --quiet
    fi
    sudo docker pull "${settings[IMAGE]}"
  else
    tar --extract --gzip --file=source.tar.gz
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --allow-existing --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv -r pyproject.toml --extra tpu -c requirements.lock
  fi
}

# Signals the running program: docker's by name, the other as the supervisor's child.
signal() {
  if [[ ${settings[IMAGE]} ]]; then
    sudo docker kill --signal="$1" "${settings[NAME]}" >/dev/null
  else
    pkill "-$1" --parent "$(<"$pid_file")"
  fi
}

supervise() {
  local status restarts=0 command=${settings[COMMAND]}
  [[ ${settings[IMAGE]} ]] && command="sudo --preserve-env=JAX_COORDINATOR_ADDRESS $command"
  JAX_COORDINATOR_ADDRESS=$(coordinator)
  export JAX_COORDINATOR_ADDRESS
  while :; do
    status=0
    bash -c "exec $command" || status=$?
    echo "$status" >"$status_file"
    echo "exit status $status after $restarts restarts"
    ((status == 42 || status >= 128)) || exit "$status"
    [[ ! -e $stop_file ]] || exit "$status"
    ((restarts < settings[MAX_RESTARTS])) || exit "$status"
    restarts=$((restarts + 1))
    sleep "$RESTART_SECONDS"
  done
}

start() {
  if alive; then
    echo "already running"
    return
  fi
  mounts
  rm -f "$stop_file" "$status_file"
  # A killed process leaves this behind; one that still holds the chips must keep it.
  [[ $(sudo lsof -t /dev/accel* /dev/vfio/* 2>/dev/null) ]] || sudo rm -f /tmp/libtpu_lockfile
  nohup setsid bash "$PWD/tpu_node.sh" supervise >>"$log" 2>&1 </dev/null &
  echo $! >"$pid_file"
  sleep 1
  if ! alive && [[ ! -e $status_file ]]; then
    tail -n 20 "$log"
    echo "did not start" >&2
    return 1
  fi
  echo started
}

status() {
  if alive; then
    echo "running: $(tail -n 1 "$log")"
  else
    echo "not running, last exit status $(cat "$status_file" 2>/dev/null || echo none)"
  fi
}

stop() {
  local waited=0
  touch "$stop_file"
  alive || { echo "not running"; return; }
  signal TERM || true # between two starts there is no program to tell; the stop file ends the supervisor
  while alive; do
    if ((waited++ >= settings[GRACE_SECONDS])); then
      signal KILL || true
      kill -KILL "$(<"$pid_file")" || true
      echo "killed after ${settings[GRACE_SECONDS]} s" >&2
      return 1
    fi
    sleep 1
  done
  echo "stopped, exit status $(<"$status_file")"
}

case ${1:-} in
  setup | start | status | stop | supervise) "$1" ;;
  logs) tail -n 100 "$log" ;;
  *) echo "usage: tpu_node.sh setup|start|status|logs|stop" >&2; exit 2 ;;
esac
