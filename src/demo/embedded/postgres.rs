//! A private PostgreSQL: the newest installed server, in a temporary folder, for one process and its children.
//!
//! Local programs of this user reach it over a socket folder only they can enter; TCP on loopback wants a password.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::guardian::{Guarded, Guardian, Signal};
use super::install;
use super::{Error, Result};

/// How long a server may take to start or stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const OLDEST: u32 = 14;

/// What a crash of the machine may cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// As in production.
    Full,
    /// Everything: no fsync. For tests, whose crashes are crashes of processes.
    None,
}

/// A running private server. Dropped, it is gone with its folder.
#[derive(Debug)]
pub struct PrivatePostgres {
    // The order of the fields is the order of their ends: the server first, then its guardian, which removes the folder.
    server: Option<Guarded>,
    guardian: Guardian,
    bin: PathBuf,
    folder: PathBuf,
    owner: Option<Owner>,
    port: u16,
    password: String,
    durability: Durability,
}

/// The user to run as where we are root, since PostgreSQL refuses root.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    uid: u32,
    gid: u32,
}

impl PrivatePostgres {
    /// Finds a server (or installs one where that needs no question), makes a cluster, and starts it.
    pub async fn start(durability: Durability) -> Result<Self> {
        Self::make(durability, Self::initdb).await
    }

    /// Another server that follows this one as a hot standby, from a base backup of now.
    pub async fn standby(&self) -> Result<Self> {
        Self::make(self.durability, |this| this.base_backup(&self.url("postgres"))).await
    }

    async fn make(durability: Durability, fill: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let bin = match find()? {
            Some(bin) => bin,
            None => {
                install::postgres()?;
                find()?.ok_or_else(|| Error::NotAServer("/usr/lib/postgresql".into()))?
            }
        };
        let owner = install::am_root().then(owner).transpose()?;
        let folder = make_folder(owner)?;
        let guardian = Guardian::new(&[&folder]).map_err(Error::io("cannot start sh"))?;
        let password = format!("{:032x}", rand::random::<u128>());
        let mut this = Self { server: None, guardian, bin, folder, owner, port: 0, password, durability };
        fill(&this)?;
        // A port is only ours once it is bound: somebody may take it in between.
        for attempt in 1.. {
            this.port = free_port()?;
            match this.restart().await {
                Err(_) if attempt < 5 => this.server = None,
                outcome => {
                    outcome?;
                    break;
                }
            }
        }
        Ok(this)
    }

    /// The URL of a database over the socket: no password, not for other users of this machine.
    pub fn url(&self, database: &str) -> String {
        format!("postgresql:///{database}?host={}&port={}&user=postgres", self.folder.display(), self.port)
    }

    /// The URL of a database over TCP on loopback, for what cannot speak over a socket, such as a proxy.
    pub fn tcp_url(&self, database: &str) -> String {
        format!("postgresql://postgres:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// The folder with the programs of this server.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// A client program such as `pg_dump`: the one beside the server, else whatever PATH has.
    pub fn program(&self, name: &str) -> PathBuf {
        Some(self.bin.join(name)).filter(|path| path.is_file()).unwrap_or_else(|| name.into())
    }

    /// Ends the server as a crash would: no checkpoint, every connection cut.
    pub async fn stop_immediate(&mut self) -> Result<()> {
        self.stop(Signal::Quit).await
    }

    /// Starts the server again, on the same port and data; one that still runs is ended immediately first.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop_immediate().await?;
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .map_err(Error::io("cannot write the server's log"))?;
        let mut command = self.as_owner(Guardian::command(self.bin.join("postgres")));
        command.arg("-D").arg(self.data()).stdout(Stdio::null()).stderr(log);
        for setting in self.settings() {
            command.args(["-c", &setting]);
        }
        let server = self.guardian.spawn(command, Signal::Quit).map_err(Error::io("cannot start PostgreSQL"))?;
        self.server = Some(server);
        self.ready().await
    }

    fn settings(&self) -> Vec<String> {
        let mut settings = vec![
            format!("port={}", self.port),
            "listen_addresses=127.0.0.1".into(),
            format!("unix_socket_directories={}", self.folder.display()),
            "max_connections=300".into(),
            "max_prepared_transactions=64".into(),
            "timezone=UTC".into(),
            "logging_collector=off".into(),
        ];
        if self.durability == Durability::None {
            settings.extend(["fsync=off".into(), "full_page_writes=off".into()]);
        }
        settings
    }

    fn initdb(&self) -> Result<()> {
        let password = self.folder.join("password");
        write_private(&password, &self.password, self.owner)?;
        let mut command = self.as_owner(Command::new(self.bin.join("initdb")));
        command.arg("-D").arg(self.data()).arg(format!("--pwfile={}", password.display())).args([
            "-N",
            "-E",
            "UTF8",
            "--locale=C",
            "-U",
            "postgres",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
        ]);
        finish(command, "initdb")
    }

    fn base_backup(&self, of: &str) -> Result<()> {
        let mut command = self.as_owner(Command::new(self.program("pg_basebackup")));
        command.arg("-D").arg(self.data()).args(["-d", of, "-R", "-X", "stream", "-c", "fast", "--no-sync"]);
        finish(command, "pg_basebackup")
    }

    async fn stop(&mut self, signal: Signal) -> Result<()> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let what = || Error::io("cannot stop the private PostgreSQL");
        if server.ended().map_err(what())?.is_none() {
            // It may end by itself in between.
            let _ = server.signal(signal);
            server.wait(PATIENCE).await.map_err(what())?;
        }
        self.guardian.forget(&server).map_err(what())
    }

    async fn ready(&mut self) -> Result<()> {
        let started = Instant::now();
        let url = self.url("postgres");
        loop {
            let failed = match tokio_postgres::connect(&url, tokio_postgres::NoTls).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let server = self.server.as_mut().map(Guarded::ended).transpose();
            if let Some(Some(status)) = server.map_err(Error::io("cannot watch PostgreSQL"))? {
                let log = fs::read_to_string(self.log()).unwrap_or_default();
                return Err(Error::Program { what: format!("PostgreSQL ended ({status})"), output: tail(&log) });
            }
            if started.elapsed() > PATIENCE {
                return Err(failed.into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn as_owner(&self, mut command: Command) -> Command {
        command.current_dir(&self.folder).env("LC_ALL", "C");
        if let Some(Owner { uid, gid }) = self.owner {
            command.uid(uid).gid(gid);
        }
        command
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Where the server writes what it has to say.
    pub fn log(&self) -> PathBuf {
        self.folder.join("server.log")
    }
}

/// Runs a program to its end.
fn finish(mut command: Command, program: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().map_err(Error::io(format!("cannot run {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Program {
        what: format!("{program} failed ({})", output.status),
        output: tail(&String::from_utf8_lossy(&output.stderr)),
    })
}

/// The newest server that runs here: FENCEPOST_PG_BIN alone where it is set, else the usual folders, PATH and pg_config.
fn find() -> Result<Option<PathBuf>> {
    if let Some(folder) = std::env::var_os("FENCEPOST_PG_BIN") {
        let folder = PathBuf::from(folder);
        return match version(&folder) {
            Some(version) if version >= OLDEST => Ok(Some(folder)),
            _ => Err(Error::NotAServer(folder)),
        };
    }
    let mut folders: Vec<PathBuf> =
        std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect()).unwrap_or_default();
    for (parent, prefix) in [("/usr/lib/postgresql", ""), ("/usr", "pgsql-"), ("/opt/homebrew/opt", "postgresql")] {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        folders.extend(
            entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path().join("bin")),
        );
    }
    if let Ok(output) = Command::new("pg_config").arg("--bindir").stdin(Stdio::null()).output() {
        folders.push(String::from_utf8_lossy(&output.stdout).trim().into());
    }
    let servers = folders.into_iter().filter_map(|folder| version(&folder).map(|version| (version, folder)));
    Ok(servers.filter(|(version, _)| *version >= OLDEST).max().map(|(_, folder)| folder))
}

/// The major version of the server in a folder, if both of its programs run.
fn version(folder: &Path) -> Option<u32> {
    let said = |program: &str| {
        let path = folder.join(program);
        if !path.is_file() {
            return None;
        }
        let output = Command::new(path).arg("--version").stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    said("initdb")?;
    major(&said("postgres")?)
}

/// `postgres (PostgreSQL) 15.18 (Debian …)` → 15; betas read `17beta1`.
fn major(text: &str) -> Option<u32> {
    let number = text.split_once("(PostgreSQL) ")?.1;
    number[..number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len())].parse().ok()
}

/// `postgres`, else `nobody`.
fn owner() -> Result<Owner> {
    let passwd = fs::read_to_string("/etc/passwd").map_err(Error::io("cannot read /etc/passwd"))?;
    let find = |name: &str| {
        passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let (user, _, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
            (user == name).then_some(Owner { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
        })
    };
    find("postgres").or_else(|| find("nobody")).ok_or_else(|| Error::Missing {
        what: "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody:".into(),
        line: "useradd --system postgres".into(),
    })
}

/// Short, since the path of a socket may have only 107 bytes.
pub(super) fn make_folder(owner: Option<Owner>) -> Result<PathBuf> {
    let parent = Some(std::env::temp_dir()).filter(|d| d.as_os_str().len() <= 40).unwrap_or_else(|| "/tmp".into());
    let folder = parent.join(format!("fencepost-{:012x}", rand::random::<u64>() >> 16));
    let what = || Error::io(format!("cannot make {}", folder.display()));
    fs::create_dir(&folder).map_err(what())?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).map_err(what())?;
    if let Some(Owner { uid, gid }) = owner {
        std::os::unix::fs::chown(&folder, Some(uid), Some(gid)).map_err(what())?;
    }
    Ok(folder)
}

pub(super) fn write_private(path: &Path, text: &str, owner: Option<Owner>) -> Result<()> {
    let what = || Error::io(format!("cannot write {}", path.display()));
    fs::write(path, text).map_err(what())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(what())?;
    match owner {
        Some(Owner { uid, gid }) => std::os::unix::fs::chown(path, Some(uid), Some(gid)).map_err(what()),
        None => Ok(()),
    }
}

/// A port nobody listens on, below those the system gives to outgoing connections: a server that restarts would find one
/// of these taken, even by a client that tries to reach it meanwhile.
pub(super) fn free_port() -> Result<u16> {
    let bind = || TcpListener::bind(("127.0.0.1", rand::random_range(10_000..32_000)));
    let found = (0..100).find_map(|_| bind().and_then(|listener| listener.local_addr()).ok());
    let none = Error::io("no free port on 127.0.0.1");
    found.map(|address| address.port()).ok_or_else(|| none(std::io::ErrorKind::AddrInUse.into()))
}

pub(super) fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_server_writes_them() {
        assert_eq!(major("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some(15));
        assert_eq!(major("postgres (PostgreSQL) 17beta1\n"), Some(17));
        assert_eq!(major("postgres (EnterpriseDB) 9\n"), None);
    }
}
