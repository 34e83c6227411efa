#!/bin/sh
# Builds stand-ins for the official base images from Debian's packages, for machines that reach no image registry:
#
#   fencepost-test/debian    debootstrap, minbase
#   fencepost-test/rust      that, gcc, this machine's Rust toolchain and the crates it has downloaded already
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
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

has() {
    docker image inspect "fencepost-test/$1" >/dev/null 2>&1
}

# Says only that it was done, or what went wrong. In the background, so that the first failure within ends it (set -e).
quietly() {
    "$@" >"$work/$image.log" 2>&1 &
    if ! wait $!; then
        tail -20 "$work/$image.log"
        echo "fencepost-test/$image cannot be built"
        exit 1
    fi
    echo "built fencepost-test/$image"
}

debian() {
    root=$work/debian
    cp -r images/debian "$root"
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" "$mirror"
    # A machine behind an inspecting proxy trusts its certificate: so must what is built here.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    # Once for all images.
    chroot "$root" apt-get update
    rm -rf "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - fencepost-test/debian
    rm -rf "$root"
}

# The engine's network may have no way out where this machine has one: packages come over the host's. The classic
# builder, since it asks nothing of a registry and needs no plugin.
build() {
    DOCKER_BUILDKIT=0 docker build --network host -t "fencepost-test/$image" -f "$image.Dockerfile" -
}

# What cargo needs to build, without documentation and sources, goes to the engine as it is read.
rust() {
    toolchain=$(rustc --print sysroot)
    crates=${CARGO_HOME:-$HOME/.cargo}
    mkdir -p "$crates/registry/cache" "$crates/registry/index"
    tar -c --transform 's,^bin/,toolchain/&,' --transform 's,^lib/,toolchain/&,' --transform 's,^registry/,cargo/&,' \
        -C "$PWD/images" rust.Dockerfile \
        -C "$toolchain" bin/cargo bin/rustc "lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')" \
        $(cd "$toolchain" && echo lib/*.so*) -C "$crates" registry/cache registry/index | build
}

other() {
    tar -c -C images --exclude ./debian . | build
}

image=debian
if ! has debian; then
    quietly debian
fi

# Side by side: most of it is waiting for packages.
builds=
for image in rust postgres rabbitmq prometheus python; do
    has "$image" && continue
    case $image in rust) quietly rust & ;; *) quietly other & ;; esac
    builds="$builds $!"
done
for build in $builds; do
    wait "$build"
done
