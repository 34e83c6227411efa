//! What this installation is, for `fencepost check` and `/readyz`.

use tokio_postgres::GenericClient;

use crate::store::Result;

/// An installation as the connected role sees it.
#[derive(Clone, Debug)]
pub struct Installation {
    pub role: String,
    pub standby: bool,
    pub retention_seconds: f64,
    pub consumers_revision: i64,
    /// Tables this role would need as a relay and may not use.
    pub missing_rights: Vec<String>,
}

pub async fn load(client: &impl GenericClient) -> Result<Installation> {
    let row = client
        .query_one(
            "-- store::installation
             select current_user::text,
                    pg_is_in_recovery(),
                    (select extract(epoch from value::interval)::float8 from fencepost.settings where name = 'retention'),
                    (select value::bigint from fencepost.settings where name = 'consumers_revision'),
                    array(select t || ' (' || p || ')'
                          from unnest(array['effects', 'ledger', 'flights', 'parked', 'attempts', 'lags', 'shards', 'relays', 'alarms'],
                                      array['select', 'insert', 'insert', 'insert', 'insert', 'insert', 'update', 'insert', 'insert']) as needed(t, p)
                          where not has_table_privilege('fencepost.' || t, p))",
            &[],
        )
        .await?;
    Ok(Installation {
        role: row.get(0),
        standby: row.get(1),
        retention_seconds: row.get(2),
        consumers_revision: row.get(3),
        missing_rights: row.get(4),
    })
}
