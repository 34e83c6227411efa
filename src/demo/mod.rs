//! The guided run (`fencepost demo`): a private PostgreSQL, consumers and workers in this process, the relay as a child,
//! and a report checked against what the consumers themselves wrote down.

pub mod embedded;
