# Sourced by run.sh: finds a Docker engine, or as root installs and starts one, and says in `skipped` why there is none.

engine_started=
skipped=
missing=
lists=old

engine_runs() {
    command -v docker >/dev/null 2>&1 && docker version --format '{{.Server.Version}}' >/dev/null 2>&1
}

install_packages() {
    echo "+ apt-get install $*"
    if [ $lists = old ]; then
        apt-get update >"$work/apt.log" 2>&1 || return 1
        lists=new
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >>"$work/apt.log" 2>&1
}

engine_find() {
    engine_runs && return 0
    if [ "$(id -u)" != 0 ]; then
        skipped="no Docker engine answers, and only root can start one"
        return 1
    fi
    if ! command -v dockerd >/dev/null 2>&1 && ! { command -v apt-get >/dev/null 2>&1 && install_packages docker.io iptables; }; then
        skipped="no Docker engine answers, and docker.io cannot be installed"
        return 1
    fi
    # With an init system, installing it has started it.
    engine_runs && return 0
    # Without one it is started by hand, and ended by us.
    dockerd >"$work/dockerd.log" 2>&1 &
    engine_started=$!
    tries=0
    until engine_runs; do
        tries=$((tries + 1))
        if [ $tries -gt 60 ] || ! kill -0 "$engine_started" 2>/dev/null; then
            skipped="dockerd does not start: $(tail -n 1 "$work/dockerd.log")"
            return 1
        fi
        sleep 0.5
    done
    echo "started an engine of our own, $(docker version --format '{{.Server.Version}}')"
}

engine_stop() {
    if [ -n "$engine_started" ] && [ -n "${E2E_KEEP:-}" ]; then
        echo "the engine stays, for what runs on it: kill $engine_started"
        return
    fi
    [ -z "$engine_started" ] || { kill "$engine_started" 2>/dev/null && wait "$engine_started"; } || true
}

# Compose v2, from Debian where it is no plugin here: for this run only, beside the settings of whoever runs it.
v2_find() {
    docker compose version >/dev/null 2>&1 && return 0
    mkdir -p "$work/docker/cli-plugins"
    settings=${DOCKER_CONFIG:-${HOME:-/root}/.docker}
    [ ! -d "$settings" ] || cp -r "$settings/." "$work/docker"
    sh tests/compose/base-images.sh compose "$work/docker/cli-plugins" || return 1
    export DOCKER_CONFIG="$work/docker"
    docker compose version >/dev/null 2>&1
}

v1_is_there() {
    case $(docker-compose version --short 2>/dev/null) in 1.*) true ;; *) false ;; esac
}

# Debian's package of that name is 1.29 up to bookworm, and v2 later.
v1_find() {
    v1_is_there && return 0
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && install_packages 'docker-compose=1.*' && v1_is_there
}

# COMPOSE is Compose v2 where it can be had, unless the caller has chosen; OTHER is the other one, and `missing` says
# which of the two is not here.
compose_find() {
    v1= v2=
    v1_find && v1="docker-compose"
    v2_find && v2="docker compose"
    if [ -z "$v1$v2" ]; then
        skipped="there is neither docker compose nor docker-compose"
        return 1
    fi
    [ -n "$v1" ] || missing="docker-compose 1.29"
    [ -n "$v2" ] || missing="Compose v2"
    : "${COMPOSE:=${v2:-$v1}}"
    case $COMPOSE in "$v2") OTHER=$v1 ;; *) OTHER=$v2 ;; esac
}
