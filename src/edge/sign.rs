//! Signatures by Standard Webhooks 1.0: HMAC-SHA256 over `<id>.<timestamp>.<body>`, so that its libraries verify us
//! unchanged.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use rand::RngCore;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use sha2::{Digest, Sha256};

/// What files of secrets hold now, to be compared with what they held before: a rotation needs no restart. Reveals
/// nothing of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Reads the files, blocking. One that cannot be read has a fingerprint as well.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a std::path::Path>) -> Self {
        let mut digest = Sha256::new();
        for file in files {
            let held = std::fs::read(file).map_or_else(|error| error.to_string().into_bytes(), Into::into);
            digest.update(held.len().to_be_bytes());
            digest.update(held);
        }
        Self(digest.finalize().into())
    }
}

const PREFIX: &str = "whsec_";
const LENGTH: std::ops::RangeInclusive<usize> = 24..=64;
const GENERATED: usize = 32;

/// A shared secret, 24 to 64 bytes. Its `Debug` shows nothing of it.
#[derive(Clone)]
pub struct Secret(SecretSlice<u8>);

/// Why a text is not a secret. Never repeats the text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SecretError {
    #[error("a secret starts with whsec_")]
    Prefix,
    #[error("what follows whsec_ is not base64 with its padding")]
    Base64,
    #[error("a secret is 24 to 64 bytes, not {0}")]
    Length(usize),
}

impl Secret {
    /// Reads `whsec_` + base64 of 24 to 64 bytes; white space around it (a file's last newline) is not part of it.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let encoded = text.trim().strip_prefix(PREFIX).ok_or(SecretError::Prefix)?;
        let bytes = STANDARD.decode(encoded).map_err(|_| SecretError::Base64)?;
        if !LENGTH.contains(&bytes.len()) {
            return Err(SecretError::Length(bytes.len()));
        }
        Ok(Self(bytes.into()))
    }

    /// A new one, random.
    pub fn generate() -> Self {
        let mut bytes = vec![0; GENERATED];
        rand::rng().fill_bytes(&mut bytes);
        Self(bytes.into())
    }

    /// The printed form, `whsec_...`: what [`Secret::parse`] reads.
    pub fn printed(&self) -> SecretString {
        format!("{PREFIX}{}", STANDARD.encode(self.0.expose_secret())).into()
    }

    fn mac(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        // HMAC pads or hashes its key: there is no length it refuses.
        #[allow(clippy::expect_used)]
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).expect("HMAC takes a key of any length");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        STANDARD.encode(mac.finalize().into_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret([redacted])")
    }
}

/// The value of `webhook-signature`: one `v1,<base64>` for each secret, in their order, separated by spaces.
/// `timestamp` is in unix seconds. An empty slice gives an empty text.
pub fn sign(id: &str, timestamp: u64, body: &[u8], secrets: &[Secret]) -> String {
    let signatures: Vec<_> = secrets.iter().map(|secret| format!("v1,{}", secret.mac(id, timestamp, body))).collect();
    signatures.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    // The published library compares with this machine's clock.
    #[expect(clippy::disallowed_methods)]
    fn now() -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    fn verifies(secret: &Secret, id: &str, timestamp: u64, body: &[u8], signature: &str) -> bool {
        let mut headers = http::HeaderMap::new();
        headers.insert("webhook-id", id.parse().unwrap());
        headers.insert("webhook-timestamp", timestamp.into());
        headers.insert("webhook-signature", signature.parse().unwrap());
        let oracle = standardwebhooks::Webhook::new(secret.printed().expose_secret()).unwrap();
        oracle.verify(body, &headers).is_ok()
    }

    #[test]
    fn the_published_library_verifies_one_and_two_secrets() {
        let [new, old, other] = std::array::from_fn(|_| Secret::generate());
        // The library signs text only; binary bodies are verified on the wire by the HTTP tests.
        let (id, at, body) = ("task-1:3", now(), "{\"ü\": 1}".as_bytes());
        let one = sign(id, at, body, std::slice::from_ref(&new));
        assert!(verifies(&new, id, at, body, &one) && !verifies(&old, id, at, body, &one));
        let both = sign(id, at, body, &[new.clone(), old.clone()]);
        assert!(verifies(&new, id, at, body, &both) && verifies(&old, id, at, body, &both));
        assert!(!verifies(&other, id, at, body, &both));
        assert!(!verifies(&new, id, at, b"{}", &both), "the body is part of it");
        assert!(!verifies(&new, "task-1:4", at, body, &both), "the key is part of it");
        assert!(!verifies(&new, id, at + 1, body, &both), "the time is part of it");
    }

    #[test]
    fn a_secret_has_one_form() {
        let of = |n: usize| format!("whsec_{}", STANDARD.encode(vec![7; n]));
        assert!(Secret::parse(&of(24)).is_ok() && Secret::parse(&format!("{}\n", of(64))).is_ok());
        assert_eq!(Secret::parse(&of(23)).unwrap_err(), SecretError::Length(23));
        assert_eq!(Secret::parse(&of(65)).unwrap_err(), SecretError::Length(65));
        assert_eq!(Secret::parse("hunter2").unwrap_err(), SecretError::Prefix);
        assert_eq!(Secret::parse("whsec_not base64").unwrap_err(), SecretError::Base64);
        let secret = Secret::generate();
        let printed = secret.printed();
        assert_eq!(Secret::parse(printed.expose_secret()).unwrap().printed().expose_secret(), printed.expose_secret());
    }

    #[test]
    fn debug_shows_nothing() {
        let secret = Secret::parse(&format!("whsec_{}", STANDARD.encode([b'x'; 24]))).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret([redacted])");
    }
}
