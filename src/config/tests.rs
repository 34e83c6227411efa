//! What is refused, in which words, and that the documented file is the truth.

use super::*;
use crate::edge::egress::PrivateNetworks;
use crate::model::consumer::ConsumerEntry;

const DOCUMENTED: &str = include_str!("../../config/fencepost.toml");

fn parse(text: &str, env: &[(&str, &str)]) -> Result<Config, Faults> {
    let env = env.iter().map(|(name, value)| ((*name).to_string(), (*value).to_string()));
    Config::parse(text, Some(Path::new("f.toml")), env)
}

fn faults(text: &str, env: &[(&str, &str)]) -> String {
    parse(text, env).expect_err("it was taken").to_string()
}

/// The documented file with its keys without defaults switched on.
fn uncommented() -> String {
    let is_key = |rest: &str| rest.starts_with('[') || rest.starts_with(|c: char| c.is_ascii_lowercase());
    DOCUMENTED
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| is_key(rest)).unwrap_or(line))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn the_documented_file_holds_the_defaults() {
    assert_eq!(toml::from_str::<Sections>(DOCUMENTED).unwrap(), Sections::default());
    parse(DOCUMENTED, &[]).unwrap();
}

#[test]
fn the_documented_file_names_every_key() {
    let documented: toml::Table = toml::from_str(&uncommented()).unwrap();
    let serde_json::Value::Object(sections) = serde_json::to_value(Sections::default()).unwrap() else { panic!() };
    for (name, section) in &sections {
        assert!(documented.contains_key(name), "{name} is not documented");
        for key in section.as_object().into_iter().flat_map(|section| section.keys()) {
            assert!(documented[name].get(key).is_some(), "{name}.{key} is not documented");
        }
    }
    let full = ConsumerEntry {
        name: "n".into(),
        kind: crate::model::consumer::Kind::Http,
        url: Some(String::new()),
        exchange: Some(String::new()),
        routing_key: Some(String::new()),
        broker: Some(String::new()),
        queue: Some(String::new()),
        ack_timeout: Some(String::new()),
        republishes: Some(0),
        ack: Some(crate::model::consumer::AckMode::None),
        on_ambiguous: Some(crate::model::consumer::OnAmbiguous::Hold),
        ordering: Some(crate::model::consumer::Ordering::Key),
        topics: vec!["t".into()],
        secret_file: Some("f".into()),
        secret_env: Some("e".into()),
        previous_secret_file: Some("f".into()),
        previous_secret_env: Some("e".into()),
        timeout: Some("1s".into()),
        connect_timeout: Some("1s".into()),
        concurrency: Some(1),
        rate: Some(1),
        pass_headers: vec!["h".into()],
        dedup_retain: Some("1d".into()),
        definite_statuses: vec![503],
    };
    let serde_json::Value::Object(full) = serde_json::to_value(full).unwrap() else { panic!() };
    let examples = documented["consumers"].as_array().unwrap();
    for key in full.keys() {
        assert!(examples.iter().any(|example| example.get(key).is_some()), "consumers.{key} is not documented");
    }
}

#[test]
fn the_documented_file_names_every_key_of_a_broker() {
    let documented: toml::Table = toml::from_str(&uncommented()).unwrap();
    let every = BrokerSection {
        url_env: Some(String::new()),
        url_file: Some(PathBuf::new()),
        ca_file: Some(PathBuf::new()),
        cert_file: Some(PathBuf::new()),
        key_file: Some(PathBuf::new()),
        username: Some(String::new()),
        password_env: Some(String::new()),
        password_file: Some(PathBuf::new()),
        ..BrokerSection::default()
    };
    let serde_json::Value::Object(every) = serde_json::to_value(every).unwrap() else { panic!() };
    for key in every.keys() {
        assert!(documented["brokers"]["default"].get(key).is_some(), "brokers.default.{key} is not documented");
    }
    let defaults: BrokerSection = documented["brokers"]["default"].clone().try_into().unwrap();
    let known = BrokerSection::default();
    assert_eq!((defaults.vhost, defaults.login, defaults.tls), (known.vhost, known.login, known.tls));
    assert_eq!((defaults.heartbeat, defaults.blocked_max), (known.heartbeat, known.blocked_max));
}

#[test]
fn brokers_are_checked() {
    let good = "[brokers.default]\nhosts = ['[::1]:5673', 'mq']\npassword_env = 'P'\n";
    let config = parse(good, &[]).unwrap();
    assert_eq!(config.brokers[0].hosts.iter().map(ToString::to_string).collect::<Vec<_>>(), ["[::1]:5673", "mq:5672"]);
    let from_env = parse("", &[("AMQP_URL", "amqp://u:p@h/v")]).unwrap();
    assert_eq!((from_env.brokers[0].name.as_str(), from_env.brokers[0].vhost.as_str()), ("default", "v"));
    assert!(!faults("", &[("AMQP_URL", "amqp://u:hunter2@h/v?x")]).contains("hunter2"));
    for (text, expected) in [
        ("[brokers.b]\npassword_env = 'P'", "brokers.b.hosts: no host is named; write hosts ="),
        ("[brokers.b]\nhosts = ['::1']\npassword_env = 'P'", "brokers.b.hosts: \"::1\" is not a host"),
        ("[brokers.b]\nhosts = ['h']", "brokers.b.password_file: missing"),
        ("[brokers.b]\nhosts = ['h']\nlogin = 'certificate'", "brokers.b.login: logs in by certificate alone"),
        ("[brokers.b]\nhosts = ['h']\nwhat = 1", "brokers.b.what: unknown field `what`"),
        (
            "[brokers.b]\nhosts = ['h']\npassword_env = 'P'\nheartbeat = '5m'",
            "brokers.b.heartbeat: 300s is out of range",
        ),
        (
            "[[consumers]]\nname = 'a'\nkind = 'amqp'\nrouting_key = 'q'",
            "consumers[0] (a).broker: there is no [brokers.default]",
        ),
        (
            &format!(
                "{good}[[consumers]]\nname = 'a'\nkind = 'amqp'\nrouting_key = 'q'\nack = 'required'\nack_timeout = '1m'"
            ),
            "ack_timeout: 60s is less than 3 x",
        ),
    ] {
        let faults = faults(text, &[]);
        assert!(faults.contains(expected), "{faults}");
    }
}

#[test]
fn the_documented_consumers_are_valid() {
    let documented: Sections = toml::from_str(&uncommented()).unwrap();
    for entry in documented.consumers {
        entry.check(crate::model::key::ConsumerId(1)).unwrap();
    }
}

#[test]
fn each_fault_says_where_what_and_what_to_write() {
    let cases = [
        ("nonsense = 1", "f.toml: nonsense: unknown field `nonsense`, expected one of `revision`, `database`"),
        ("[relay]\nlease = '1s'", "f.toml: relay.lease: unknown field `lease`, expected one of `name`, `shard_lease`"),
        ("[relay]\nshard_lease = 15", "f.toml: relay.shard_lease: invalid type: integer `15`, expected a string"),
        ("[relay]\nshard_lease = '15'", "\"15\" is not a duration: a number from 1 and a unit, such as 500ms"),
        ("[relay]\nshard_lease = '0s'", "\"0s\" is not a duration"),
        ("[relay]\nrenew_every = '6s'", "6s is more than a third of shard_lease (15s); write at most 5s"),
        ("[relay]\npoll_min = '1s'", "relay.poll_min: 1s is more than poll_max (500ms)"),
        ("[relay]\nflight_deliveries = 0", "relay.flight_deliveries: 0 is out of range; write 1 to 10000"),
        ("[relay]\nflight_bytes = 99999999", "relay.flight_bytes: 99999999 is more than bytes_in_flight (16777216)"),
        ("[retry]\nbase = '1h'", "retry.base: 3600s is more than cap (600s)"),
        ("[retry]\nbudget = '1m'", "retry.cap: 600s is more than budget (60s)"),
        ("[http]\nallow = ['10.0.0.0/33']", "http.allow: \"10.0.0.0/33\" is not a network; write one like 10.0.0.0/8"),
        ("[admin]\nlisten = '0.0.0.0:1'", "admin.listen: 0.0.0.0:1 is reachable from other machines"),
        ("[admin]\nlisten = 'here'", "admin.listen: invalid socket address"),
        ("[log]\nformat = 'xml'", "log.format: unknown variant `xml`, expected `text` or `json`"),
        ("[log]\nlevel = 'fencepost=loud'", "log.level: "),
        ("[log]\nlevel = 'loud'", "log.level: \"loud\" is not a level"),
        ("revision = -1", "revision: -1 is negative"),
        ("[database]\nurl = 'host=h'\nurl_file = '/x'", "database: url, url_env and url_file: more than one is set"),
        ("[database]\nurl_env = 'FENCEPOST_NO_SUCH'", "database.url_env: FENCEPOST_NO_SUCH is not set"),
        ("[database]\nurl_file = '/no/such'", "database.url_file: /no/such cannot be read: No such file"),
        ("relay = 1\n[[consumers]]\n", "relay: invalid type: integer `1`"),
        ("consumers = 1", "consumers: not a list of tables; write [[consumers]]"),
        ("[[consumers]]\nkind = 'http'", "consumers[0].name: missing; write name = \"billing\""),
        ("[[consumers]]\nname = 'a'\nkind = 'smtp'", "consumers[0] (a).kind: unknown variant `smtp`"),
        (
            "[[consumers]]\nname = 'a'\nkind = 'http'\nurl = 'http://h/'\nurll = 1",
            "consumers[0] (a).urll: unknown field `urll`",
        ),
        (
            "[[consumers]]\nname = 'a'\nkind = 'http'\nurl = 'http://h/'\ntimeout = '16s'",
            "consumers[0] (a).timeout: 16s is longer than relay.shard_lease (15s)",
        ),
        ("x = = 1", "f.toml: line 1: "),
    ];
    for (text, expected) in cases {
        let said = faults(text, &[]);
        assert!(said.contains(expected), "{text:?} said {said}");
    }
}

#[test]
fn all_faults_come_at_once() {
    let text = "foo = 1\n[relay]\nshard_lease = 1\nbar = 2\n[log]\nformat = 'xml'\n\
        [[consumers]]\nname = 'a'\nkind = 'http'\nurl = 'http://h/'\n\
        [[consumers]]\nname = 'a'\nkind = 'http'\nack = 'none'\nurl = 'ftp://h/'\n\
        [[consumers]]\nname = 'b'\ncolour = 'red'";
    let Faults(all) = parse(text, &[("FENCEPOST__RETRY__CAP", "soon")]).unwrap_err();
    let keys: Vec<&str> = all.iter().map(|fault| fault.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "foo",
            "log.format",
            "relay.bar",
            "relay.shard_lease",
            "retry.cap",
            "consumers[2] (b).kind",
            "consumers[2] (b).colour",
            "consumers[1] (a).name",
            "consumers[1] (a).url",
            "consumers[1] (a).on_ambiguous",
        ]
    );
}

#[test]
fn the_environment_overrides_the_file() {
    let env = [
        ("FENCEPOST__RELAY__NAME", "5"),
        ("FENCEPOST__RELAY__FLIGHT_DELIVERIES", "7"),
        ("FENCEPOST__HTTP__PRIVATE", "deny"),
        ("FENCEPOST__HTTP__DENY", "['10.0.0.0/8']"),
        ("FENCEPOST__LOG__LEVEL", "debug"),
        ("FENCEPOST__DATABASE__URL", "postgresql://u:p@h/d"),
        ("FENCEPOST_CONFIG", "elsewhere"),
    ];
    let config = parse("[relay]\nname = 'file'\nflight_deliveries = 3\nrenew_every = '1s'", &env).unwrap();
    assert_eq!((config.options.name.as_str(), config.options.flight_deliveries), ("5", 7));
    assert_eq!(config.options.renew_every.as_secs(), 1);
    let denied = EgressPolicy::new(PrivateNetworks::Deny, &[], &["10.0.0.0/8".into()]).unwrap();
    assert_eq!(config.egress, denied);
    assert_eq!(config.log.level, "debug");
    assert!(config.database_url.is_some());
    for (variable, expected) in [
        ("FENCEPOST__RELAY__SHARD_LEASE", "environment FENCEPOST__RELAY__SHARD_LEASE: relay.shard_lease: "),
        ("FENCEPOST__RELAI__NAME", "environment FENCEPOST__RELAI__NAME: relai.name: unknown field `relai`"),
        ("FENCEPOST__CONSUMERS__X", "consumers are written in the file only"),
    ] {
        let said = faults("", &[(variable, "x")]);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_password_in_the_file_is_refused_and_not_repeated() {
    for url in ["postgresql://u:hunter2@h/d", "postgresql://u@h/d?password=hunter2", "host=h password = hunter2"] {
        let said = faults(&format!("[database]\nurl = '{url}'"), &[]);
        assert!(said.contains("database.url: holds a password") && !said.contains("hunter2"), "{said}");
    }
    parse("[database]\nurl = 'postgresql://u@h/d'", &[]).unwrap();
}

#[test]
fn a_fault_names_the_key_and_the_entry_it_is_in() {
    assert!(faults("[breaker]\nconsecutive = -1\nprobe = '1s'", &[]).contains("breaker.consecutive: "));
    // The first entry cannot be read; the second keeps its place.
    let text = "[[consumers]]\nname = 'a'\nkind = 'http'\nack = 'maybe'\n[[consumers]]\nname = 'b'\nkind = 'http'\nurl = 'ftp://x'";
    let faults = faults(text, &[]);
    assert!(faults.contains("consumers[0] (a).ack") && faults.contains("consumers[1] (b).url"), "{faults}");
}
