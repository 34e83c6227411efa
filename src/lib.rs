//! fencepost: a transactional-outbox relay beside PostgreSQL.
//!
//! A task's completion and the external effects it intends commit in one PostgreSQL transaction, or not at all. The relay
//! delivers each committed effect to its consumer at least once, over HTTP or AMQP 0-9-1, with identical bytes and an
//! identical idempotency key on every attempt, and keeps what the consumer itself said about that key.
//!
//! ```text
//! producer's transaction                                  the relay (any number of replicas)
//! ┌──────────────────────────┐   doorbell   ┌──────────────────────────────────────────────────────────┐
//! │ business rows            │ ───────────▶ │ reader ─▶ flight ─▶ lane ─▶ gate ─▶ edge (HTTP, AMQP)    │
//! │ complete_task(...)       │   the log    │   ▲         │    per consumer  breaker      │            │
//! │   └▶ effects (immutable) │ ───────────▶ │   │         ▼    and shard     rate         ▼            │
//! └──────────────────────────┘              │ keeper    loader ◀── parking lot ◀── trouble ◀── outcome │
//!                                           │ reconciler        ledger (append-only) ◀──── settler     │
//!                                           └──────────────────────────────────────────────────────────┘
//! ```
//!
//! For services that use this crate as a library:
//!
//! - [`producer`] submits tasks, claims them and completes them with their effects, in transactions of yours;
//! - [`inbox`] lets a consumer apply each effect once: dedup, fence and answer in its own transaction.
//!
//! Everything else is the binary. Dependencies point downwards only: [`cli`] → [`relay`], [`admin`] → [`edge`],
//! [`store`] → [`model`]. How it works is told in `docs/architecture.md`.

pub mod admin;
pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod edge;
mod failpoint;
pub mod inbox;
pub mod model;
pub mod mutant;
pub mod producer;
pub mod relay;
pub mod store;
