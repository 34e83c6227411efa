//! Read models: what is going on, for people, probes and dashboards. Nothing here changes a row, and no query scans
//! the log: what is waiting is counted from parked rows, lag ranges and the end of the log, each within a bound.
//!
//! Moments are text in the session's time zone, lengths of time are seconds.

pub mod backlog;
pub mod deliveries;
pub mod effect;
pub mod installation;
pub mod leases;
pub mod status;
pub mod task;
pub mod unread;
pub mod why;
