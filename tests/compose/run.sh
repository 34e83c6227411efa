#!/bin/sh
# `make e2e`: the shipped docker-compose.yml on a real Docker engine, with containers killed, paused and cut off, and
# the example of examples/compose-ci, under Compose v2; before that the file without faults and the example under
# docker-compose 1.29. The last line is the summary: PASSED, FAILED, or SKIPPED and why; with CI=true a skip is a
# failure, and so is one of the two that cannot be had.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
why=
. tests/compose/engine.sh

finish() {
    code=$?
    trap - EXIT
    engine_stop
    rm -rf "$work"
    [ $code = 0 ] || echo "e2e: FAILED${why:+: $why}"
    exit $code
}
trap finish EXIT
trap 'exit 130' INT TERM

skip() {
    echo "e2e: SKIPPED: $1"
    trap - EXIT
    engine_stop
    rm -rf "$work"
    [ "${CI:-}" != true ] || exit 1
    exit 0
}

took=
stage() {
    name=$1
    shift
    started=$(date +%s)
    echo "e2e: $name: $*"
    "$@"
    took="$took $name $(($(date +%s) - started)) s,"
}

# What follows runs under this one of the two.
under() {
    COMPOSE=$1
    took="$took with Compose $($1 version --short):"
}

build_the_image() {
    python3 tests/compose/stack.py build relay >"$work/build.log" 2>&1 || {
        tail -n 60 "$work/build.log"
        return 1
    }
}

engine_find || skip "$skipped"
compose_find || skip "$skipped"
command -v python3 >/dev/null 2>&1 || skip "the test needs python3"
echo "engine $(docker version --format '{{.Server.Version}}'), Compose $($COMPOSE version --short)${OTHER:+ and $($OTHER version --short)}"
if [ -n "$missing" ] && [ "${CI:-}" = true ]; then
    why="$missing cannot be had"
    exit 1
fi

export COMPOSE FENCEPOST_IMAGE="${FENCEPOST_IMAGE:-fencepost:e2e}"
export E2E_OVERRIDES=tests/compose/test.yml
# 1.29 gives the engine a minute for each answer, which is little on a busy machine.
export COMPOSE_HTTP_TIMEOUT="${COMPOSE_HTTP_TIMEOUT:-300}"
# The image that everything is built on tells whether a registry can be reached.
base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
if ! docker image inspect "$base" >/dev/null 2>&1 && ! timeout 60 docker pull --quiet "$base" >/dev/null 2>&1; then
    echo "no registry of images can be reached: stand-ins are built from Debian's packages"
    command -v debootstrap >/dev/null 2>&1 || install_packages debootstrap || skip "debootstrap cannot be installed"
    export E2E_OVERRIDES="tests/compose/stand-ins.yml $E2E_OVERRIDES"
    export E2E_STAND_INS=1
    stage "stand-ins" sh tests/compose/base-images.sh
fi

main=$COMPOSE
under "$main"
if [ -z "${E2E_BUILT:-}" ]; then
    stage "image" build_the_image
fi
if [ -n "$OTHER" ]; then
    under "$OTHER"
    stage "start" env -u E2E_KEEP python3 tests/compose/e2e.py start
    stage "example" sh examples/compose-ci/test.sh
    under "$main"
fi
stage "faults" python3 tests/compose/e2e.py
stage "example" sh examples/compose-ci/test.sh
echo "e2e: PASSED${missing:+ without $missing, which cannot be had}:${took%,}"
