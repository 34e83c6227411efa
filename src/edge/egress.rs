//! Where a request may go. A guard against server-side request forgery in two parts that must go together: literal
//! addresses in a URL never reach a resolver, and names are checked when they are resolved, on the very addresses that
//! are then dialled. Redirects and proxies, which would bypass both, are off.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use serde::{Deserialize, Serialize};
use url::{Host, Url};

/// Whether loopback, private and other not globally reachable networks may be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrivateNetworks {
    /// The default: most consumers live inside their owner's network.
    #[default]
    Allow,
    Deny,
}

/// Which addresses may be dialled. Cloud metadata, link-local, multicast and unspecified addresses are refused in
/// every mode; then the narrowest matching network of the two lists decides (`deny` where both match alike), then
/// [`PrivateNetworks`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EgressPolicy {
    private: PrivateNetworks,
    allow: Vec<IpNet>,
    deny: Vec<IpNet>,
}

/// An entry of `allow` or `deny` that is no network.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a network; write one like 10.0.0.0/8 or fd00::/8, or a single address")]
pub struct BadNetwork {
    text: String,
}

/// An address that may not be dialled: the host it stands for and the rule that says so.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("egress: {host} is at {address}, refused: {rule}")]
pub struct Refused {
    host: String,
    address: IpAddr,
    rule: String,
}

const ALWAYS: &[(&str, &str)] = &[
    ("0.0.0.0/8", "unspecified addresses are refused in every mode"),
    ("::/128", "unspecified addresses are refused in every mode"),
    ("169.254.0.0/16", "link-local and cloud metadata addresses are refused in every mode"),
    ("fe80::/10", "link-local addresses are refused in every mode"),
    ("fd00:ec2::254/128", "cloud metadata addresses are refused in every mode"),
    ("fd20:ce::254/128", "cloud metadata addresses are refused in every mode"),
    ("100.100.100.200/32", "cloud metadata addresses are refused in every mode"),
    ("168.63.129.16/32", "cloud metadata addresses are refused in every mode"),
    ("192.0.0.192/32", "cloud metadata addresses are refused in every mode"),
    ("224.0.0.0/4", "multicast addresses are refused in every mode"),
    ("ff00::/8", "multicast addresses are refused in every mode"),
    ("255.255.255.255/32", "broadcast addresses are refused in every mode"),
];

/// Not globally reachable, by the IANA special-purpose registries.
const PRIVATE: &[&str] = &[
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "240.0.0.0/4",
    "::1/128",
    "100::/64",
    "2001:2::/48",
    "2001:db8::/32",
    "5f00::/16",
    "fc00::/7",
    "fec0::/10",
];

impl EgressPolicy {
    /// Reads the two lists; the first entry that is no network is named.
    pub fn new(private: PrivateNetworks, allow: &[String], deny: &[String]) -> Result<Self, BadNetwork> {
        let nets = |texts: &[String]| texts.iter().map(|text| network(text)).collect::<Result<Vec<_>, _>>();
        Ok(Self { private, allow: nets(allow)?, deny: nets(deny)? })
    }

    /// Checks a host that is written as an address; a name is checked when it is resolved.
    pub fn check_url(&self, url: &Url) -> Result<(), Refused> {
        match url.host() {
            Some(Host::Ipv4(address)) => self.check(&address.to_string(), address.into()),
            Some(Host::Ipv6(address)) => self.check(&format!("[{address}]"), address.into()),
            Some(Host::Domain(_)) | None => Ok(()),
        }
    }

    /// Whether `address`, which `host` stands for, may be dialled; an IPv4 address inside it must be allowed as well.
    pub fn check(&self, host: &str, address: IpAddr) -> Result<(), Refused> {
        let verdict = std::iter::once(address).chain(embedded(address)).find_map(|seen| self.rule_against(seen));
        match verdict {
            Some(rule) => Err(Refused { host: host.into(), address, rule }),
            None => Ok(()),
        }
    }

    fn rule_against(&self, address: IpAddr) -> Option<String> {
        let listed = |text: &str| text.parse::<IpNet>().is_ok_and(|net| net.contains(&address));
        if let Some((_, rule)) = ALWAYS.iter().find(|(net, _)| listed(net)) {
            return Some((*rule).into());
        }
        let narrowest =
            |nets: &[IpNet]| nets.iter().filter(|n| n.contains(&address)).max_by_key(|n| n.prefix_len()).copied();
        match (narrowest(&self.allow), narrowest(&self.deny)) {
            (allow, Some(deny)) if allow.is_none_or(|net| net.prefix_len() <= deny.prefix_len()) => {
                return Some(format!("denied by {deny}"));
            }
            (Some(_), _) => return None,
            (None, _) => {}
        }
        let private = self.private == PrivateNetworks::Deny && PRIVATE.iter().any(|net| listed(net));
        private.then(|| "private networks are denied".into())
    }

    async fn resolve_checked(&self, host: &str) -> Result<Vec<SocketAddr>, Box<dyn std::error::Error + Send + Sync>> {
        let addresses: Vec<_> = tokio::net::lookup_host((host, 0)).await?.collect();
        for address in &addresses {
            self.check(host, address.ip())?;
        }
        Ok(addresses)
    }
}

/// Resolves by the system's resolver and refuses a name as soon as one of its addresses is refused: what would be
/// dialled after a failure of the first must not depend on luck.
impl Resolve for EgressPolicy {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = self.clone();
        Box::pin(async move {
            let addresses = policy.resolve_checked(name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

fn network(text: &str) -> Result<IpNet, BadNetwork> {
    let net = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    net.map_err(|_| BadNetwork { text: text.into() })
}

/// The IPv4 addresses that an IPv6 address stands for: mapped, compatible, 6to4, NAT64 (well-known and local-use
/// prefixes, RFC 6052 and 8215) and Teredo.
fn embedded(address: IpAddr) -> Vec<IpAddr> {
    let IpAddr::V6(address) = address else { return Vec::new() };
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| IpAddr::V4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    match [a, b, c, d, e, f] {
        [0, 0, 0, 0, 0, 0] if address == Ipv6Addr::LOCALHOST || address == Ipv6Addr::UNSPECIFIED => Vec::new(),
        [0, 0, 0, 0, 0, 0 | 0xffff] | [0, 0, 0, 0, 0xffff, 0] | [0x64, 0xff9b, 0, 0, 0, 0] => vec![v4(g, h)],
        // A local-use prefix may be any of /48 to /96: bits 48 to 87 around the reserved byte, or the last 32.
        [0x64, 0xff9b, 1, ..] => vec![v4(g, h), v4(d, (e & 0xff) << 8 | f >> 8)],
        [0x2002, ..] => vec![v4(b, c)],
        [0x2001, 0, ..] => vec![v4(c, d), v4(!g, !h)],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(private: PrivateNetworks, allow: &[&str], deny: &[&str]) -> EgressPolicy {
        let texts = |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        EgressPolicy::new(private, &texts(allow), &texts(deny)).unwrap()
    }

    fn passes(policy: &EgressPolicy, host: &str) -> bool {
        policy.check_url(&Url::parse(&format!("http://{host}/")).unwrap()).is_ok()
    }

    #[test]
    fn metadata_and_link_local_are_refused_in_every_mode() {
        let open = policy(PrivateNetworks::Allow, &["0.0.0.0/0", "::/0", "169.254.169.254/32"], &[]);
        for host in [
            "169.254.169.254",
            "0xa9fea9fe",
            "2852039166",
            "169.254.1.1",
            "168.63.129.16",
            "100.100.100.200",
            "0.0.0.0",
            "224.0.0.1",
            "[fd00:ec2::254]",
            "[fe80::1]",
            "[::]",
            "[::ffff:169.254.169.254]",
            "[::169.254.169.254]",
            "[::ffff:0:169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::a9fe:a9fe]",
            "[64:ff9b:1:a9fe:a9:fe00::]",
            "[2002:a9fe:a9fe::1]",
            "[2001:0:a9fe:a9fe::1]",
            "[2001:0:102:304::5601:5601]",
        ] {
            assert!(!passes(&open, host), "{host} passed");
        }
        for host in ["127.0.0.1", "[::1]", "10.0.0.1", "192.0.2.1", "[fd00::1]", "8.8.8.8", "[2606:4700::1]"] {
            assert!(passes(&open, host), "{host} was refused");
            assert!(passes(&EgressPolicy::default(), host), "{host} was refused by default");
        }
    }

    #[test]
    fn private_networks_can_be_denied() {
        let closed = policy(PrivateNetworks::Deny, &["10.1.0.0/16"], &[]);
        for host in [
            "127.0.0.1",
            "127.9.9.9",
            "0x7f.1",
            "10.0.0.1",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "198.18.0.1",
            "[::1]",
            "[fd00::1]",
            "[::ffff:127.0.0.1]",
            "[64:ff9b::a00:1]",
            "[2002:7f00:1::]",
        ] {
            assert!(!passes(&closed, host), "{host} passed");
        }
        for host in ["10.1.2.3", "[::ffff:8.8.8.8]", "8.8.8.8", "172.32.0.1", "[2606:4700::1]"] {
            assert!(passes(&closed, host), "{host} was refused");
        }
    }

    #[test]
    fn the_narrowest_network_decides() {
        let inside = policy(PrivateNetworks::Allow, &["10.0.0.0/8", "10.1.1.1"], &["0.0.0.0/0", "::/0", "10.1.0.0/16"]);
        assert!(passes(&inside, "10.2.0.1") && passes(&inside, "10.1.1.1"));
        assert!(!passes(&inside, "10.1.1.2") && !passes(&inside, "8.8.8.8") && !passes(&inside, "[2606:4700::1]"));
        let tied = policy(PrivateNetworks::Allow, &["10.0.0.0/8"], &["10.0.0.0/8"]);
        assert!(!passes(&tied, "10.0.0.1"));
    }

    #[test]
    fn refusals_name_host_address_and_rule() {
        let error = policy(PrivateNetworks::Allow, &[], &["10.0.0.0/8"]).check("billing", "10.1.2.3".parse().unwrap());
        assert_eq!(error.unwrap_err().to_string(), "egress: billing is at 10.1.2.3, refused: denied by 10.0.0.0/8");
        let bad = EgressPolicy::new(PrivateNetworks::Allow, &["10.0.0.0/33".into()], &[]).unwrap_err();
        assert!(bad.to_string().starts_with("\"10.0.0.0/33\" is not a network"));
    }

    #[test]
    fn every_network_of_the_tables_parses() {
        for text in ALWAYS.iter().map(|(net, _)| net).chain(PRIVATE) {
            assert_eq!(text.parse::<IpNet>().unwrap().trunc().to_string(), *text);
        }
    }

    #[tokio::test]
    async fn names_are_checked_where_they_are_resolved() {
        let closed = policy(PrivateNetworks::Deny, &[], &[]);
        let refused = closed.resolve_checked("localhost").await.unwrap_err();
        assert!(refused.to_string().contains("localhost is at "), "{refused}");
        assert!(!EgressPolicy::default().resolve_checked("localhost").await.unwrap().is_empty());
    }
}
