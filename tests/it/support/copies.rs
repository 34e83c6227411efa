//! A streaming standby of a private PostgreSQL, on the same socket folder.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use fencepost::demo::embedded::guardian::{Guarded, Guardian, Signal};
use fencepost::demo::embedded::postgres::PrivatePostgres;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, NoTls};

use super::eventually;

/// Ends when it is dropped; its data lie in the primary's folder and go with that.
pub struct Standby {
    _server: Guarded,
    _guardian: Guardian,
    pub folder: PathBuf,
    pub port: u16,
    pub primary_port: u16,
}

impl Standby {
    pub async fn of(primary: &PrivatePostgres) -> Self {
        let config: tokio_postgres::Config = primary.url("postgres").parse().expect("a url");
        let Host::Unix(folder) = &config.get_hosts()[0] else { panic!("not on a socket") };
        let (folder, primary_port) = (folder.clone(), config.get_ports()[0]);
        let owner = std::fs::metadata(&folder).expect("the primary's folder");
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let data = folder.join("standby");
        // A client's program: not everybody who packages the server puts it beside.
        let beside = primary.bin().join("pg_basebackup");
        let mut copy = Command::new(if beside.is_file() { beside } else { "pg_basebackup".into() });
        copy.current_dir(&folder).uid(owner.uid()).gid(owner.gid()).stdin(Stdio::null());
        copy.arg("-D").arg(&data).args([
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
            "-U",
            "postgres",
            "-p",
            &primary_port.to_string(),
            "-h",
        ]);
        let output = copy.arg(&folder).output().expect("pg_basebackup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

        let mut guardian = Guardian::new(&[]).expect("a guardian");
        let mut command = Guardian::command(primary.bin().join("postgres"));
        command.current_dir(&folder).uid(owner.uid()).gid(owner.gid()).env("LC_ALL", "C");
        command.arg("-D").arg(&data).stdout(Stdio::null()).stderr(Stdio::null());
        let sockets = format!("unix_socket_directories={}", folder.display());
        for setting in [
            &format!("port={port}"),
            "listen_addresses=",
            &sockets,
            "max_connections=300",
            "max_prepared_transactions=64",
            "fsync=off",
            "wal_receiver_status_interval=1",
        ] {
            command.args(["-c", setting]);
        }
        let server = guardian.spawn(command, Signal::Quit).expect("PostgreSQL starts");
        let standby = Self { _server: server, _guardian: guardian, folder, port, primary_port };
        eventually("the standby answers", async || standby.try_connect().await).await;
        standby
    }

    pub fn url(&self) -> String {
        format!("postgresql:///postgres?host={}&port={}&user=postgres", self.folder.display(), self.port)
    }

    /// Both servers, the standby first; only the one that takes writes is wanted.
    pub fn url_of_whoever_writes(&self) -> String {
        let folder = self.folder.display();
        format!(
            "host={folder},{folder} port={},{} user=postgres dbname=postgres target_session_attrs=read-write",
            self.port, self.primary_port
        )
    }

    pub async fn connect(&self) -> Client {
        self.try_connect().await.expect("a connection to the standby")
    }

    async fn try_connect(&self) -> Option<Client> {
        let (client, connection) = tokio_postgres::connect(&self.url(), NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(client)
    }
}
