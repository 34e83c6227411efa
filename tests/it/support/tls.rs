//! Certificates made for a test, good and broken.

use std::sync::Arc;

use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

/// An authority that lives as long as the test.
pub struct Authority {
    certificate: Certificate,
    issuer: Issuer<'static, KeyPair>,
}

/// What is wrong with a server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    None,
    Expired,
    NotYetValid,
    WrongHost,
    SelfSigned,
}

/// Whether a server wants to see a certificate of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificate {
    NotAsked,
    Required,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // What it signs must not look signed by itself.
        params.distinguished_name.push(DnType::CommonName, "an authority for tests");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// What a client that trusts this authority is given.
    pub fn pem(&self) -> Vec<u8> {
        self.certificate.pem().into_bytes()
    }

    /// A client's certificate and its key, in PEM.
    pub fn client(&self) -> (String, String) {
        self.named("fencepost", &["fencepost"])
    }

    /// A certificate with this common name and its key, in PEM.
    pub fn named(&self, common_name: &str, names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let mut params = CertificateParams::new(names).expect("good names");
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }

    /// A server for `127.0.0.1` and `localhost`, but for its flaw.
    pub fn server(&self, flaw: Flaw, client: ClientCertificate) -> TlsAcceptor {
        let names: &[&str] = if flaw == Flaw::WrongHost { &["other.example"] } else { &["127.0.0.1", "localhost"] };
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let mut params = CertificateParams::new(names).expect("good names");
        match flaw {
            Flaw::Expired => params.not_after = date_time_ymd(2001, 1, 1),
            Flaw::NotYetValid => params.not_before = date_time_ymd(4000, 1, 1),
            Flaw::None | Flaw::WrongHost | Flaw::SelfSigned => {}
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = match flaw {
            Flaw::SelfSigned => params.self_signed(&key),
            _ => params.signed_by(&key, &self.issuer),
        }
        .expect("a certificate");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let builder = builder.expect("default versions");
        let builder = match client {
            ClientCertificate::NotAsked => builder.with_no_client_auth(),
            ClientCertificate::Required => {
                let mut roots = RootCertStore::empty();
                roots.add(self.certificate.der().clone()).expect("a root");
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.expect("a verifier"))
            }
        };
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = builder.with_single_cert(vec![certificate.der().clone()], key).expect("a server");
        TlsAcceptor::from(Arc::new(config))
    }
}
