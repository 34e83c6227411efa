#!/bin/sh
# Builds stand-ins for the official base images from Debian's packages, for machines that reach no image registry:
#
#   fencepost-test/debian    debootstrap, minbase
#   fencepost-test/rust      that, gcc and this machine's Rust toolchain
#   fencepost-test/postgres  that, Debian's PostgreSQL, behind as much of the official entrypoint as the compose file uses
#   fencepost-test/rabbitmq  that, Debian's RabbitMQ
#   fencepost-test/prometheus  that, Debian's Prometheus
#   fencepost-test/python    that, Debian's Python
#
# An image that is there is not built again: `docker rmi` forces it. Needs root, debootstrap and a running engine.
set -eu
cd "$(dirname "$0")"
suite=bookworm
# The mirror this machine's own apt uses, unless another is named.
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' 2>/dev/null | head -n 1)}

has() {
    docker image inspect "fencepost-test/$1" >/dev/null 2>&1
}

# The engine's network may have no way out where this machine has one: packages come over the host's. The classic
# builder, since it asks nothing of a registry and needs no plugin.
build() {
    log=$(mktemp)
    DOCKER_BUILDKIT=0 docker build --network host -t "fencepost-test/$1" -f "images/$1.Dockerfile" "$2" >"$log" 2>&1 || {
        tail -20 "$log"
        return 1
    }
    rm "$log"
    echo "built fencepost-test/$1"
}

if ! has debian; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" "$mirror" >"$root.log" 2>&1 || {
        tail -20 "$root.log"
        exit 1
    }
    # A machine behind an inspecting proxy trusts its certificate: so must what is built here.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    rm -rf "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - fencepost-test/debian >/dev/null
    rm -rf "$root" "$root.log"
    echo "built fencepost-test/debian"
fi

rust() {
    toolchain=$(rustc --print sysroot)
    context=$(mktemp -d)
    # What cargo needs to build, without documentation and sources.
    mkdir -p "$context/toolchain/lib/rustlib"
    cp -aL "$toolchain/bin" "$context/toolchain/"
    cp -a "$toolchain"/lib/*.so* "$context/toolchain/lib/"
    cp -a "$toolchain/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')" "$context/toolchain/lib/rustlib/"
    build rust "$context" && built=0 || built=1
    rm -rf "$context"
    return $built
}

# Side by side: most of it is waiting for packages.
builds=
for image in rust postgres rabbitmq prometheus python; do
    has "$image" && continue
    if [ "$image" = rust ]; then rust & else build "$image" images & fi
    builds="$builds $!"
done
for pid in $builds; do
    wait "$pid"
done
