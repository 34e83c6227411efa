//! How a delivery can end, told by the database: every answer, every cut, every crash, with real relays as processes.

pub(crate) mod rig;
mod table;
