//! The edges: where an attempt leaves this machine and its outcome is read. An edge reports what it saw; it decides
//! nothing about retries and knows no database.
//!
//! HTTP: [`http`] makes the attempt, `request` writes its headers, `body` watches its bytes go, [`sign`] signs them,
//! [`ack`] reads the consumer's word (an RFC 8941 item, `item`), `retry_after` its hint, and [`egress`] guards where a
//! request may go at all.

pub mod ack;
mod body;
pub mod egress;
pub mod error;
pub mod http;
mod item;
pub mod request;
mod retry_after;
pub mod sign;
