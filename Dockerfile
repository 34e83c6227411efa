# The fencepost image: one binary, certificates, and a user without privileges. Builds with BuildKit and with the
# classic builder. What ships has the profile `release`; `--build-arg PROFILE=e2e` builds faster and runs slower.
ARG RUST_IMAGE=rust:1.95.0-slim-bookworm
ARG BASE_IMAGE=debian:bookworm-20260824-slim

FROM ${RUST_IMAGE} AS build
ARG PROFILE=release
WORKDIR /src
# The dependencies first, with an empty file for each target: this layer lasts until Cargo.toml or Cargo.lock changes.
COPY Cargo.toml Cargo.lock ./
RUN mkdir src && touch src/lib.rs && for target in $(sed -n 's/^path = "\(.*\.rs\)"/\1/p' Cargo.toml); do \
        mkdir -p "$(dirname "$target")" && echo 'fn main() {}' >"$target"; \
    done \
    && cargo install --locked --profile "${PROFILE}" --path . --root /tmp/none && rm -r src /tmp/none
COPY src src
COPY migrations migrations
COPY config config
# Files of an image keep their dates: cargo must see that these are newer than what it has built.
RUN find src migrations -type f -exec touch {} + && cargo install --locked --profile "${PROFILE}" --path . --root /out

FROM ${BASE_IMAGE}
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin fencepost
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/bin/fencepost /usr/local/bin/fencepost
USER 10001:10001
# Of the relay; the demo's parts bring their own.
HEALTHCHECK --interval=5s --timeout=6s --start-period=30s --retries=3 CMD ["fencepost", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["fencepost"]
CMD ["run"]
