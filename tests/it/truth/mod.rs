//! How a delivery can end, told by the database: every answer, every cut, every crash, with real relays as processes.

mod consumer_wide;
mod crash;
mod doubt;
mod guarantees;
mod order;
pub(crate) mod rig;
mod table;
