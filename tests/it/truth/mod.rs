//! How a delivery can end, told by the database: every answer, every cut, every crash, with real relays as processes.

pub mod rig;
mod table;
