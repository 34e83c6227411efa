//! The edges: where an attempt leaves this machine and its outcome is read. An edge reports what it saw; it decides
//! nothing about retries and knows no database.
