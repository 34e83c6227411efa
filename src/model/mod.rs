//! The vocabulary as types: keys, tokens, effects, consumers, outcomes. No I/O lives here and `model` knows no other
//! module; whatever can be decided by looking at values alone is decided here.

pub mod broker;
pub mod consumer;
pub mod duration;
pub mod effect;
pub mod header;
pub mod key;
pub mod outcome;
pub mod token;
