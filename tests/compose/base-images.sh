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
# With the words `compose FOLDER` none of them, but what bookworm has no package of, and lays it into that folder:
#
#   fencepost-test/compose   Compose v2 of Debian's next release, the docker command's plugin; its tag is the release
#
# An image that is there is not built again: `docker rmi` forces it. Needs root, debootstrap and a running engine; for
# Compose apt and the engine.
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

# With lists of its own, so that this machine's apt knows no more than before. The program needs no other package than
# libc6 2.34 or later. apt checks Debian's signature; which of the versions 2 it is, the summary of `make e2e` says.
compose() {
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/compose"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/apt/sources.list"
    cat >"$work/apt/conf" <<EOF
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$work/apt/lists";
Dir::Cache "$work/apt";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Update::Error-Mode "any";
EOF
    export APT_CONFIG="$work/apt/conf"
    apt-get update
    cd "$work/compose"
    apt-get download 'docker-compose=2.*'
    dpkg-deb -x ./*.deb .
    tar -C "$(dirname "$(find . -name docker-compose -type f -path '*/cli-plugins/*')")" -c docker-compose \
        | docker import - "fencepost-test/$image"
}

if [ "${1:-}" = compose ]; then
    image=compose:trixie
    has "$image" || quietly compose
    holder=$(docker create "fencepost-test/$image" none)
    docker cp "$holder:/docker-compose" "$2" >/dev/null
    docker rm "$holder" >/dev/null
    exit 0
fi

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
