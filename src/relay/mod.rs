//! The relay: reads the log into flights, sends each delivery through its consumer's lane and gate, and settles what
//! came of it. It knows `edge`, `store` and `model`; it never speaks SQL and never opens a socket itself.

pub mod delivery;
pub mod gate;
pub mod lane;
pub mod lease;
pub mod options;
pub mod retry;
pub mod settle;
