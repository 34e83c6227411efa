//! The relay: reads the log into flights, sends each delivery through its consumer's lane and gate, and settles what
//! came of it. It knows `edge`, `store` and `model`; it never speaks SQL and never opens a socket itself.
//!
//! ```text
//! keeper ──▶ reader ──▶ router ──▶ dispatcher (lanes, gate) ──▶ attempt ──▶ settle ──▶ settler
//!                         ▲                                                             │
//!                      loader ◀──────────────── parking lot ◀──────────────────────────┘
//! ```

pub mod attempt;
pub mod breaker;
pub mod clock;
pub mod delivery;
pub mod dispatcher;
pub mod doorbell;
mod early;
pub mod gate;
pub mod health;
pub mod history;
pub mod keeper;
pub mod lane;
mod launch;
pub mod lease;
pub mod loader;
pub mod options;
pub mod outage;
mod overdue;
pub mod reader;
pub mod reconciler;
pub mod replies;
pub mod retention;
pub mod retry;
pub mod router;
pub mod run;
pub mod settle;
pub mod settler;
mod tally;
pub mod traffic;
mod unflushed;
mod way;
pub mod words;

pub use health::Health;
pub use history::run;
pub use options::Options;
