# Sourced by run.sh: finds a Docker engine, or as root installs and starts one, and says in `skipped` why there is none.

engine_started=
skipped=
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

# COMPOSE is Compose v2 where it is a plugin here, else docker-compose 1.29, unless the caller has chosen.
compose_is_there() {
    if docker compose version >/dev/null 2>&1; then
        COMPOSE="docker compose"
    elif command -v docker-compose >/dev/null 2>&1; then
        COMPOSE=docker-compose
    else
        return 1
    fi
}

compose_find() {
    [ -z "${COMPOSE:-}" ] || return 0
    compose_is_there && return 0
    # Debian's package of that name is the one or the other.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && install_packages docker-compose && compose_is_there; then
        return 0
    fi
    skipped="there is neither docker compose nor docker-compose"
    return 1
}
