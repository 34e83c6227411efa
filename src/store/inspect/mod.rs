//! Read models: what is going on, for people and dashboards. Nothing here changes a row, and no query scans the log.

pub mod installation;
