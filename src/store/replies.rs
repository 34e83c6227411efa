//! Consumers' replies over AMQP, written down before the broker is told (contract, section 5).

use secrecy::SecretString;
use tokio_postgres::Client;

use super::{Error, Result};

/// What an installation's AMQP names and tokens are made of.
#[derive(Debug)]
pub struct Identity {
    pub deployment: String,
    pub secret: SecretString,
}

/// The installation's name and the secret of its ack tokens, the same for all its relays.
pub async fn identity(client: &Client) -> Result<Identity> {
    let row = client
        .query_opt(
            "-- store::identity
             select d.value, s.value from fencepost.settings d join fencepost.settings s on s.name = 'ack_secret'
             where d.name = 'deployment'",
            &[],
        )
        .await?;
    let row = row.ok_or_else(|| Error::Corrupt("the settings lack deployment or ack_secret".into()))?;
    Ok(Identity { deployment: row.get(0), secret: SecretString::from(row.get::<_, String>(1)) })
}
