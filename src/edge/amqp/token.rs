//! The ack token: a MAC over deployment, consumer and key. It names the delivery it was given out with, so that nobody
//! who never got the message can answer for it.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

const VERSION: &str = "v1.";
/// Enough against guessing, short enough for a header (RFC 2104, section 5: at least half the hash).
const KEPT: usize = 16;

/// Makes and checks the tokens of one installation.
#[derive(Clone)]
pub struct AckKey {
    deployment: String,
    secret: SecretString,
}

impl AckKey {
    /// `deployment` and `secret` are the installation's own, the same for all its relays.
    pub fn new(deployment: impl Into<String>, secret: SecretString) -> Self {
        Self { deployment: deployment.into(), secret }
    }

    pub fn deployment(&self) -> &str {
        &self.deployment
    }

    /// The token of one delivery.
    pub fn token(&self, consumer: &str, key: &str) -> String {
        let mac = self.mac(consumer, key).finalize().into_bytes();
        format!("{VERSION}{}", URL_SAFE_NO_PAD.encode(&mac[..KEPT]))
    }

    /// Whether `token` was given out with this delivery. Compares in constant time.
    pub fn verify(&self, consumer: &str, key: &str, token: &str) -> bool {
        let mac = token.strip_prefix(VERSION).and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        mac.is_some_and(|mac| mac.len() == KEPT && self.mac(consumer, key).verify_truncated_left(&mac).is_ok())
    }

    fn mac(&self, consumer: &str, key: &str) -> Hmac<Sha256> {
        // HMAC pads or hashes its key: there is no length it refuses.
        #[allow(clippy::expect_used)]
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret.expose_secret().as_bytes())
            .expect("HMAC takes a key of any length");
        // Neither a deployment, a consumer's name nor a key can hold a slash.
        mac.update(format!("{VERSION}{}/{consumer}/{key}", self.deployment).as_bytes());
        mac
    }
}

impl fmt::Debug for AckKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AckKey").field("deployment", &self.deployment).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_for_one_delivery_only() {
        let key = AckKey::new("d", "secret".into());
        let token = key.token("billing", "t:1");
        assert!(key.verify("billing", "t:1", &token));
        for (consumer, delivery) in [("billing", "t:2"), ("billing", "t:1:2"), ("search", "t:1")] {
            assert!(!key.verify(consumer, delivery, &token), "{consumer} {delivery}");
        }
        assert!(!AckKey::new("e", "secret".into()).verify("billing", "t:1", &token));
        assert!(!AckKey::new("d", "other".into()).verify("billing", "t:1", &token));
        for forged in ["", "v1.", "v1.AAAA", &token[3..], &format!("{token}A"), &token[..token.len() - 2]] {
            assert!(!key.verify("billing", "t:1", forged), "{forged}");
        }
        assert!(!format!("{key:?}").contains("secret"));
    }
}
