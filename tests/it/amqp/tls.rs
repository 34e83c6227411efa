//! AMQPS, with the broker behind a server that ends TLS: who is trusted, and what is shown to whom.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fencepost::model::broker::{Broker, Host, Identity, Transport};
use fencepost::model::outcome::End;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::{attempt, consumer, edge, effect, opens, shuts};
use crate::support::broker::{self, Client, broker, fresh, id};
use crate::support::eventually;
use crate::support::tls::{Authority, ClientCertificate, Flaw};

/// Ends TLS on a port of its own and passes the rest on.
async fn tls_before(port: u16, acceptor: TlsAcceptor) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let mut server = TcpStream::connect(("127.0.0.1", port)).await.expect("the broker");
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    own
}

fn secure(plain: &Broker, port: u16, ca_file: Option<PathBuf>, identity: Option<Identity>) -> Arc<Broker> {
    let mut broker = plain.clone();
    broker.hosts = vec![Host { name: "127.0.0.1".into(), port }];
    broker.transport = Transport::Tls { ca_file, identity };
    Arc::new(broker)
}

fn file(name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.{name}", fresh("tls")));
    std::fs::write(&path, text).expect("a file");
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_certificate_that_is_trusted_and_fits_is_talked_to() {
    let url = broker::url().await;
    let plain = broker(url);
    let (authority, queue) = (Authority::new(), fresh("tls"));
    let client = Client::new(url).await;
    client.queue(&queue, &[]).await;
    let ca = file("ca.pem", authority.pem());
    let consumer = consumer(&format!("routing_key = '{queue}'"));

    let port = tls_before(plain.hosts[0].port, authority.server(Flaw::None, ClientCertificate::NotAsked)).await;
    let good = edge(&consumer, &secure(&plain, port, Some(ca.clone()), None));
    opens(&good).await;
    assert_eq!(attempt(&good, &effect("secure:1")).await.end, End::Confirmed);
    assert_eq!(client.read(&queue, |read| read.len() == 1).await.iter().map(id).collect::<Vec<_>>(), ["secure:1"]);

    let stranger = edge(&consumer, &secure(&plain, port, None, None));
    let why = eventually("a refusal", async || stranger.shut().filter(|why| why.contains("certificate"))).await;
    assert!(why.contains("UnknownIssuer") || why.contains("issuer"), "{why}");

    for flaw in [Flaw::Expired, Flaw::NotYetValid, Flaw::WrongHost, Flaw::SelfSigned] {
        let port = tls_before(plain.hosts[0].port, authority.server(flaw, ClientCertificate::NotAsked)).await;
        let edge = edge(&consumer, &secure(&plain, port, Some(ca.clone()), None));
        eventually("a refusal", async || edge.shut().filter(|why| why.contains("certificate"))).await;
        assert_eq!(attempt(&edge, &effect("never:1")).await.end, End::Shut, "{flaw:?}");
    }
    client.delete_queue(&queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_shown_where_it_is_configured() {
    let url = broker::url().await;
    let plain = broker(url);
    let (authority, queue) = (Authority::new(), fresh("tls"));
    Client::new(url).await.queue(&queue, &[]).await;
    let ca = file("ca.pem", authority.pem());
    let (certificate, key) = authority.client();
    let identity = Identity { cert_file: file("cert.pem", certificate), key_file: file("key.pem", key) };
    let port = tls_before(plain.hosts[0].port, authority.server(Flaw::None, ClientCertificate::Required)).await;
    let consumer = consumer(&format!("routing_key = '{queue}'"));
    let known = edge(&consumer, &secure(&plain, port, Some(ca.clone()), Some(identity)));
    opens(&known).await;
    assert_eq!(attempt(&known, &effect("known:1")).await.end, End::Confirmed);
    let unknown = edge(&consumer, &secure(&plain, port, Some(ca), None));
    eventually("a refusal", async || unknown.shut().filter(|why| &**why != "connecting")).await;
    shuts(&unknown).await;
    assert_eq!(attempt(&unknown, &effect("unknown:1")).await.end, End::Shut);
}
