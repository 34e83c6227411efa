# Stands in for the official rust image.
FROM fencepost-test/debian
RUN install-packages gcc libc6-dev
COPY toolchain /usr/local/rust
COPY cargo /usr/local/cargo
ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV CARGO_HOME=/usr/local/cargo
