# `make demo` shows fencepost at work, `make test` runs every test. Both set up what they need and leave nothing behind.

.PHONY: demo test e2e check campaign campaign-mutants

# make demo ARGS="--tasks 500 --keep"
demo:
	cargo run --locked -- demo $(ARGS)

test:
	cargo build --locked --all-targets --features failpoints
	cargo run --locked --features failpoints --example with_services -- sh .ci/test

# docker-compose.yml on a real Docker engine, with faults (docs/testing.md). Root gets an engine where there is none.
e2e:
	sh tests/compose/run.sh

# What CI runs.
check:
	sh .ci/run

# Faults on every link and process, and whether every promise holds: make campaign ARGS="--minutes 5 --seed 7"
campaign:
	cargo test --locked --test campaign -- $(ARGS)

# Each seeded mistake must make the campaign fail.
campaign-mutants:
	cargo test --locked --features mutants --test campaign -- --mutants $(ARGS)
