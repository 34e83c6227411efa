//! The audit log: every change a person makes, in the transaction that makes it.

use std::str::FromStr;

use serde_json::Value;
use tokio_postgres::{Client, Transaction};

use super::Result;

/// Why a change was made: 1 to 1,000 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

#[derive(Debug, thiserror::Error)]
#[error("a reason is 1 to 1000 bytes of text")]
pub struct NoReason;

impl FromStr for Reason {
    type Err = NoReason;

    fn from_str(text: &str) -> Result<Self, NoReason> {
        let text = text.trim();
        if text.is_empty() || text.len() > 1_000 {
            return Err(NoReason);
        }
        Ok(Self(text.into()))
    }
}

impl Reason {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Writes one entry. Only within the transaction of the change itself.
pub async fn record(tx: &Transaction<'_>, action: &str, object: &str, reason: &Reason, detail: &Value) -> Result<()> {
    tx.execute(
        "-- store::audit
         insert into fencepost.audit_log (action, object, reason, detail) values ($1, $2, $3, $4)",
        &[&action, &object, &reason.as_str(), detail],
    )
    .await?;
    Ok(())
}

pub async fn role_exists(client: &Client, role: &str) -> Result<bool> {
    let row = client
        .query_one("-- store::role_exists\nselect exists (select from pg_roles where rolname = $1)", &[&role])
        .await?;
    Ok(row.get(0))
}

/// Gives `role` the rights of a producer, worker, reader or relay (contract, section 3).
pub async fn grant(client: &mut Client, role: &str, right: &str, reason: &Reason) -> Result<()> {
    let tx = client.transaction().await?;
    tx.execute("-- store::grant\nselect fencepost.grant_to($1::text::name, $2)", &[&role, &right]).await?;
    record(&tx, "grant", role, reason, &serde_json::json!({ "as": right })).await?;
    tx.commit().await?;
    Ok(())
}
