//! `fencepost health`: for a container's health check, so that its image needs no other program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use url::Url;

use super::Exit;
use super::global::Global;
use super::output;

/// Longer than the relay's own wait for its database.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(clap::Args, Debug)]
pub struct Args {
    /// What is asked instead of this configuration's own relay: healthy is what answers 2xx.
    #[arg(long, value_name = "URL")]
    url: Option<Url>,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let url = match args.url {
        Some(url) => url,
        None => format!("http://{}/readyz", here(global.config()?.admin.listen)).parse()?,
    };
    let client =
        reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).timeout(PATIENCE).build()?;
    let answer = client.get(url.clone()).send().await.with_context(|| format!("{url} does not answer"))?;
    let status = answer.status();
    let body = answer.text().await.unwrap_or_default();
    output::write(&format!("{} {}\n", status.as_u16(), output::plain(body.trim())))?;
    Ok(if status.is_success() { Exit::Done } else { Exit::Found })
}

/// Where to reach a listener of this machine: one on every address is on loopback too.
fn here(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_every_address_is_asked_on_loopback() {
        assert_eq!(here("0.0.0.0:9187".parse().unwrap()).to_string(), "127.0.0.1:9187");
        assert_eq!(here("[::]:1".parse().unwrap()).to_string(), "[::1]:1");
        assert_eq!(here("10.0.0.1:1".parse().unwrap()).to_string(), "10.0.0.1:1");
    }
}
