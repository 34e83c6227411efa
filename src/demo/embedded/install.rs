//! Debian's and Ubuntu's packages, for a machine that has no server yet.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Error, Result};

/// The package's own cluster would be a server nobody asked for.
const NO_CLUSTER: &str = "mkdir -p /etc/postgresql-common && \
    { [ -e /etc/postgresql-common/createcluster.conf ] || \
      echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf; }";

/// A package's service must not start with its installation; a policy of the machine's own is left as it is.
const NO_SERVICE: &str = "[ -e /usr/sbin/policy-rc.d ] || \
    { printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d && \
      trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }";

/// Installs PostgreSQL's server from the distribution, or says what to type.
pub fn postgres() -> Result<()> {
    install(
        "postgresql",
        &[NO_CLUSTER, "apt-get update -q", &apt_install("postgresql")],
        "no PostgreSQL server (14 or later) is installed here; install one, or pass --database-url:",
    )
}

/// Installs RabbitMQ from the distribution, or says what to type. Its own service is neither started nor enabled.
pub fn rabbitmq() -> Result<()> {
    let quietly = format!(
        "{NO_SERVICE}; {} && {{ systemctl disable rabbitmq-server 2>/dev/null || true; }}",
        apt_install("rabbitmq-server")
    );
    install(
        "rabbitmq-server",
        &["apt-get update -q", &quietly],
        "no RabbitMQ server is installed here; install one, or set AMQP_URL to one that runs:",
    )
}

fn apt_install(package: &str) -> String {
    format!("apt-get install -q -y --no-install-recommends -o Dpkg::Options::=--force-confold {package}")
}

fn install(package: &str, steps: &[&str], what: &str) -> Result<()> {
    let missing = || Error::Missing { what: what.into(), line: format!("sudo apt-get install -y {package}") };
    let Some(prefix) = privileged() else { return Err(missing()) };
    eprintln!("Installing the package {package} (nothing of it is started).");
    for step in steps {
        let status = Command::new(prefix[0])
            .args(&prefix[1..])
            .args(["env", "DEBIAN_FRONTEND=noninteractive", "sh", "-c", &format!("{{ {step}; }} >&2")])
            .stdin(Stdio::null())
            .status()
            .map_err(Error::io(format!("cannot run {}", prefix[0])))?;
        if !status.success() {
            eprintln!("{step}: {status}");
            return Err(missing());
        }
    }
    Ok(())
}

/// How to run a command as root without being asked for anything, where that is possible.
fn privileged() -> Option<&'static [&'static str]> {
    if !Path::new("/usr/bin/apt-get").exists() {
        return None;
    }
    if am_root() {
        return Some(&["env"]);
    }
    let sudo = Command::new("sudo").args(["-n", "true"]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    sudo.is_ok_and(|s| s.success()).then_some(&["sudo", "-n"])
}

/// Whether this process is root's.
pub fn am_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}
