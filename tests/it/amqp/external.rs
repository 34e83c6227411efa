//! Logging in by certificate (SASL EXTERNAL) at a RabbitMQ that speaks TLS and asks for one; and what is said where that
//! does not work.

use fencepost::demo::embedded::rabbitmq::{PrivateRabbitmq, Tls};

use super::rig::AmqpRig;
use crate::support::broker::fresh;
use crate::support::eventually;
use crate::support::tls::Authority;

const REQUIRED: &str = "ack = 'required'";
const USER: &str = "relay.example";

/// A node that trusts the clients of `authority`, with a user without a password whose rights are those of docs/amqp.md.
async fn node(authority: &Authority) -> PrivateRabbitmq {
    let (certificate, key) = authority.named("broker.example", &["127.0.0.1", "localhost"]);
    let authority = String::from_utf8(authority.pem()).unwrap();
    let node = PrivateRabbitmq::start_with_tls(&Tls { authority, certificate, key }).await.unwrap();
    node.ctl(&["add_user", USER, "for a moment"]).await.unwrap();
    node.ctl(&["clear_password", USER]).await.unwrap();
    node.ctl(&["set_permissions", USER, "^$", "^amq\\.default$", "^fencepost\\.acks\\..*"]).await.unwrap();
    node
}

/// `[brokers.default]` with a certificate for `user`, signed by `client`, and `server` as what is trusted.
fn by_certificate(amqp: &AmqpRig, port: u16, server: Option<&Authority>, client: &Authority, user: &str) -> String {
    let (certificate, key) = client.named(user, &[]);
    let name = fresh("client");
    let (certificate, key) = (amqp.file(&format!("{name}.pem"), &certificate), amqp.file(&format!("{name}.key"), &key));
    let trusted = server.map_or_else(
        || "tls = true".to_string(),
        |authority| {
            let pem = String::from_utf8(authority.pem()).unwrap();
            format!("ca_file = '{}'", amqp.file(&format!("{name}.ca"), &pem))
        },
    );
    format!(
        "hosts = ['127.0.0.1:{port}']\n{trusted}\nlogin = 'certificate'\ncert_file = '{certificate}'\nkey_file = '{key}'"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_is_known_by_its_certificate_alone() {
    let authority = Authority::new();
    let node = node(&authority).await;
    let amqp = AmqpRig::on(&node.url(), REQUIRED).await;
    let port = node.tls_port().unwrap();
    amqp.configure_broker(&by_certificate(&amqp, port, Some(&authority), &authority, USER), REQUIRED);
    let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
    assert_eq!(code, 0, "{said}");
    let _relay = amqp.relay().await;
    let key = amqp.rig.emit("pay-1", "billing").await;
    let message = amqp.receive(1).await.remove(0);
    amqp.rig.becomes(&key, "billing", "unacked").await;
    assert_eq!(amqp.rig.tokens(&key, "billing").await, ["confirmed"]);
    // By which the broker knows its connections: both are the certificate's, over TLS, without a password.
    // The one that reads replies is opened by itself: nothing that was published waits for it.
    let connections = eventually("both connections are there", async || {
        let listed = node.ctl(&["list_connections", "user", "ssl", "auth_mechanism"]).await.unwrap();
        let relays: Vec<String> = listed.lines().filter(|line| line.starts_with(USER)).map(str::to_owned).collect();
        (relays.len() >= 2).then_some(relays)
    })
    .await;
    assert_eq!(connections, [format!("{USER}\ttrue\tEXTERNAL"), format!("{USER}\ttrue\tEXTERNAL")]);
    amqp.reply(&message, "applied").await;
    amqp.rig.becomes(&key, "billing", "applied").await;
    amqp.rig.rests().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_by_certificate_that_fails_is_told_with_its_remedy() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let node = node(&authority).await;
    let amqp = AmqpRig::on(&node.url(), REQUIRED).await;
    let port = node.tls_port().unwrap();
    let own = |user: &str| by_certificate(&amqp, port, Some(&authority), &authority, user);
    let check = async |what: &str, broker: &str, remedy: &str| {
        amqp.configure_broker(broker, REQUIRED);
        let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
        assert_eq!(code, 1, "{what}: {said}");
        assert!(said.contains(remedy), "{what}: {remedy:?} is not in {said}");
    };
    check("nobody's name", &own("nobody"), "rabbitmqctl add_user").await;
    let unknown = by_certificate(&amqp, port, None, &authority, USER);
    check("a broker nobody vouches for", &unknown, "has ca_file of [brokers.default]").await;
    let others = by_certificate(&amqp, port, Some(&stranger), &authority, USER);
    check("another's broker", &others, "has ca_file of [brokers.default]").await;
    let strangers = by_certificate(&amqp, port, Some(&authority), &stranger, USER);
    check("a client nobody vouches for", &strangers, "does it trust cert_file").await;
    node.ctl(&["eval", "application:set_env(rabbit, auth_mechanisms, ['PLAIN'])."]).await.unwrap();
    check("no such login", &own(USER), "rabbitmq_auth_mechanism_ssl").await;
}
