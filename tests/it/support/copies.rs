//! Copies of a private PostgreSQL, in the same socket folder: a standby that follows it, and a backup that is recovered to
//! a moment.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use fencepost::demo::embedded::guardian::{Guarded, Guardian, Signal};
use fencepost::demo::embedded::postgres::PrivatePostgres;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, NoTls};

use super::eventually;

/// Where a copy is made: beside its original, as whoever owns that.
struct Place {
    bin: PathBuf,
    folder: PathBuf,
    port: u16,
    uid: u32,
    gid: u32,
}

impl Place {
    fn beside(original: &PrivatePostgres) -> Self {
        let config: tokio_postgres::Config = original.url("postgres").parse().expect("a url");
        let Host::Unix(folder) = &config.get_hosts()[0] else { panic!("not on a socket") };
        let owner = fs::metadata(folder).expect("the original's folder");
        let (bin, folder, port) = (original.bin().to_owned(), folder.clone(), config.get_ports()[0]);
        Self { bin, folder, port, uid: owner.uid(), gid: owner.gid() }
    }

    /// A base backup of the original as it is now.
    fn base_backup(&self, name: &str, more: &[&str]) -> PathBuf {
        let data = self.folder.join(name);
        // A client's program: not everybody who packages the server puts it beside.
        let beside = self.bin.join("pg_basebackup");
        let mut copy = Command::new(if beside.is_file() { beside } else { "pg_basebackup".into() });
        copy.current_dir(&self.folder).uid(self.uid).gid(self.gid).stdin(Stdio::null());
        copy.arg("-D").arg(&data).args(["-X", "stream", "-c", "fast", "-U", "postgres"]).args(more);
        let output = copy.args(["-p", &self.port.to_string(), "-h"]).arg(&self.folder).output().expect("pg_basebackup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        data
    }

    /// Starts a server on a copy's data.
    fn serve(&self, data: &PathBuf, port: u16, settings: &[String]) -> (Guarded, Guardian) {
        let mut guardian = Guardian::new(&[]).expect("a guardian");
        let mut command = Guardian::command(self.bin.join("postgres"));
        command.current_dir(&self.folder).uid(self.uid).gid(self.gid).env("LC_ALL", "C");
        command.arg("-D").arg(data).stdout(Stdio::null()).stderr(Stdio::null());
        let place = [format!("port={port}"), format!("unix_socket_directories={}", self.folder.display())];
        let rest = ["listen_addresses=", "max_connections=300", "max_prepared_transactions=64", "fsync=off"];
        for setting in place.iter().chain(settings).map(String::as_str).chain(rest) {
            command.args(["-c", setting]);
        }
        let server = guardian.spawn(command, Signal::Quit).expect("PostgreSQL starts");
        (server, guardian)
    }

    fn url(&self, port: u16, database: &str) -> String {
        format!("postgresql:///{database}?host={}&port={port}&user=postgres", self.folder.display())
    }

    async fn try_connect(&self, port: u16, database: &str) -> Option<Client> {
        let (client, connection) = tokio_postgres::connect(&self.url(port, database), NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(client)
    }
}

/// A streaming standby. Ends when it is dropped; its data go with the primary's folder.
pub struct Standby {
    _server: Guarded,
    _guardian: Guardian,
    place: Place,
    port: u16,
}

impl Standby {
    pub async fn of(primary: &PrivatePostgres) -> Self {
        let place = Place::beside(primary);
        let data = place.base_backup("standby", &["-R"]);
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let (server, guardian) = place.serve(&data, port, &["wal_receiver_status_interval=1".into()]);
        let standby = Self { _server: server, _guardian: guardian, place, port };
        eventually("the standby answers", async || standby.place.try_connect(port, "postgres").await).await;
        standby
    }

    pub fn url(&self) -> String {
        self.place.url(self.port, "postgres")
    }

    /// Both servers, the standby first; only the one that takes writes is wanted.
    pub fn url_of_whoever_writes(&self) -> String {
        let folder = self.place.folder.display();
        format!(
            "host={folder},{folder} port={},{} user=postgres dbname=postgres target_session_attrs=read-write",
            self.port, self.place.port
        )
    }

    pub async fn connect(&self) -> Client {
        self.place.try_connect(self.port, "postgres").await.expect("a connection to the standby")
    }
}

/// A base backup, and an archive of all that was written since.
pub struct Backup {
    place: Place,
    data: PathBuf,
    archive: PathBuf,
}

/// What became of a [`Backup`]: it stands in for its original, at the same address. Ends when it is dropped.
pub struct Recovered {
    _server: Guarded,
    _guardian: Guardian,
}

impl Backup {
    /// Lets the server archive, for which it is restarted, and backs it up.
    pub async fn of(original: &mut PrivatePostgres) -> Self {
        let place = Place::beside(original);
        let archive = place.folder.join("archive");
        fs::create_dir(&archive).and_then(|()| chown(&archive, Some(place.uid), Some(place.gid))).expect("an archive");
        let client = place.try_connect(place.port, "postgres").await.expect("a connection");
        for setting in ["archive_mode = on".into(), format!("archive_command = 'cp %p {}/%f'", archive.display())] {
            client.batch_execute(&format!("alter system set {setting}")).await.expect("a setting");
        }
        original.restart().await.expect("a restart");
        let data = place.base_backup("backup", &[]);
        Self { place, data, archive }
    }

    /// Waits until all that was written so far is in the archive.
    pub async fn holds_all(&self) {
        let client = self.place.try_connect(self.place.port, "postgres").await.expect("a connection");
        let switch = "select pg_walfile_name(pg_switch_wal())";
        let last: String = client.query_one(switch, &[]).await.expect("a switch").get(0);
        eventually("the archive has all", async || self.archive.join(&last).exists().then_some(())).await;
        eventually("the archiver is done with it", async || {
            let sql = "select last_archived_wal >= $1 from pg_stat_archiver";
            client.query_one(sql, &[&last]).await.expect("the archiver").get::<_, Option<bool>>(0)?.then_some(())
        })
        .await;
    }

    /// Recovers to a restore point, and no further, at the address of the original, which has been stopped.
    pub async fn recover_to(self, point: &str) -> Recovered {
        let Self { place, data, archive } = self;
        fs::write(data.join("recovery.signal"), "").expect("a signal");
        let (server, guardian) = place.serve(
            &data,
            place.port,
            &[
                format!("restore_command=cp {}/%f %p", archive.display()),
                format!("recovery_target_name={point}"),
                "recovery_target_action=promote".into(),
            ],
        );
        eventually("the recovery has ended", async || {
            let client = place.try_connect(place.port, "postgres").await?;
            let standby: bool = client.query_one("select pg_is_in_recovery()", &[]).await.ok()?.get(0);
            (!standby).then_some(())
        })
        .await;
        Recovered { _server: server, _guardian: guardian }
    }
}
