# `make demo` shows fencepost at work, `make test` runs every test, `make bench` measures the product beside its
# ceilings. All set up what they need and leave nothing behind.

.PHONY: demo test bench bench-parts e2e check campaign campaign-ci campaign-mutants

# make demo ARGS="--tasks 500 --keep"
demo:
	cargo run --locked -- demo $(ARGS)

test:
	cargo build --locked --all-targets --features failpoints
	cargo run --locked --features failpoints --example with_services -- sh .ci/test

# make bench ARGS="--full --payloads FILE.jsonl"
bench:
	cargo run --locked --release -- bench $(ARGS)

# The pure hot parts: times, and instructions, which do not depend on what else the machine does (needs valgrind).
bench-parts:
	cargo bench --locked --bench hot_path
	cargo bench --locked --bench instructions

# docker-compose.yml on a real Docker engine, with faults (docs/testing.md). Root gets an engine where there is none.
e2e:
	sh tests/compose/run.sh

# What CI runs.
check:
	sh .ci/run

# Faults on every link and process, and whether every promise holds: make campaign ARGS="--minutes 5 --seed 7"
campaign:
	cargo test --locked --test campaign -- $(ARGS)

# The form of it that CI runs: the seeds that once failed, and one seeded mistake, another each day.
campaign-ci:
	cargo test --locked --features mutants --test campaign -- --ci

# Each seeded mistake must make the campaign fail.
campaign-mutants:
	cargo test --locked --features mutants --test campaign -- --mutants $(ARGS)
