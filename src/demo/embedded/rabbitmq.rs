//! A private RabbitMQ node: own name, ports, cookie, epmd and data, on loopback only, for one process and its children.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::guardian::{Guarded, Guardian, Signal};
use super::postgres::{free_port, make_folder, tail, write_private};
use super::{Error, Result, install};

/// How long a node may take to start or stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// The wrapper in /usr/sbin changes the user and reads /etc/rabbitmq; the programs themselves do neither.
const PLACES: [&str; 3] = ["/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin", "/usr/local/sbin"];
const USER: &str = "fencepost";

/// What a node that speaks TLS is given, in PEM. It asks its clients for a certificate of the same authority, and lets
/// those log in by it (SASL EXTERNAL) that are named like a user.
#[derive(Clone, Debug)]
pub struct Tls {
    pub authority: String,
    pub certificate: String,
    pub key: String,
}

/// A running private node. Dropped, it is gone with its folder and its epmd.
#[derive(Debug)]
pub struct PrivateRabbitmq {
    // The order of the fields is the order of their ends: the node, its epmd, then the guardian, which removes the folder.
    node: Option<Guarded>,
    epmd: Option<Guarded>,
    guardian: Guardian,
    bin: PathBuf,
    folder: PathBuf,
    name: String,
    password: String,
    port: u16,
    tls_port: Option<u16>,
    dist_port: u16,
    epmd_port: u16,
}

impl PrivateRabbitmq {
    /// Finds a broker (or installs one where that needs no question) and starts a node of its own.
    pub async fn start() -> Result<Self> {
        Self::start_with(None).await
    }

    /// The same, which speaks TLS on a port of its own as well.
    pub async fn start_with_tls(tls: &Tls) -> Result<Self> {
        Self::start_with(Some(tls)).await
    }

    async fn start_with(tls: Option<&Tls>) -> Result<Self> {
        let bin = match find()? {
            Some(bin) => bin,
            None => {
                install::rabbitmq()?;
                find()?.ok_or_else(|| Error::NotABroker(PLACES[0].into()))?
            }
        };
        let folder = make_folder(None)?;
        let guardian = Guardian::new(&[&folder]).map_err(Error::io("cannot start sh"))?;
        let mut this = Self {
            node: None,
            epmd: None,
            guardian,
            bin,
            folder,
            name: format!("fencepost-{:08x}@localhost", rand::random::<u32>()),
            password: format!("{:032x}", rand::random::<u128>()),
            port: 0,
            tls_port: None,
            dist_port: 0,
            epmd_port: 0,
        };
        // A port is only ours once it is bound: somebody may take it in between.
        for attempt in 1.. {
            (this.port, this.dist_port, this.epmd_port) = (free_port()?, free_port()?, free_port()?);
            this.tls_port = tls.map(|_| free_port()).transpose()?;
            this.configure(tls)?;
            match this.boot().await {
                Err(_) if attempt < 3 => (this.node, this.epmd) = (None, None),
                outcome => {
                    outcome?;
                    break;
                }
            }
        }
        Ok(this)
    }

    /// The URL of the default virtual host, with credentials.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The same through another port of this machine, such as a proxy's.
    pub fn url_at(&self, port: u16) -> String {
        format!("amqp://{USER}:{}@127.0.0.1:{port}/%2f", self.password)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where it speaks TLS, if it does.
    pub fn tls_port(&self) -> Option<u16> {
        self.tls_port
    }

    /// Runs `rabbitmqctl ARGS` against this node and gives what it printed.
    pub async fn ctl(&self, args: &[&str]) -> Result<String> {
        let mut command = self.environment(Command::new(self.bin.join("rabbitmqctl")));
        command.args(["--quiet", "--node", &self.name]).args(args).stdin(Stdio::null());
        let run = tokio::process::Command::from(command).kill_on_drop(true).output();
        let output = match tokio::time::timeout(PATIENCE, run).await {
            Ok(output) => output.map_err(Error::io("cannot run rabbitmqctl"))?,
            Err(_) => return Err(Error::io("rabbitmqctl does not end")(std::io::ErrorKind::TimedOut.into())),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        Err(Error::Program {
            what: format!("rabbitmqctl {} failed ({})", args.join(" "), output.status),
            output: tail(&(text(&output.stdout) + &text(&output.stderr))),
        })
    }

    /// Ends the node as a crash would. Its epmd stays.
    pub async fn kill(&mut self) -> Result<()> {
        self.end(Signal::Kill).await
    }

    /// Ends the node in order, and waits for its end.
    pub async fn stop(&mut self) -> Result<()> {
        self.end(Signal::Term).await
    }

    /// Freezes the node: connections stay open and nothing answers. `Signal::Continue` thaws it.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let node = self.node.as_ref().ok_or_else(|| Error::io("no node")(std::io::ErrorKind::NotFound.into()))?;
        node.signal(signal).map_err(Error::io("cannot signal the node"))
    }

    /// Starts the node again on the same ports and data.
    pub async fn boot(&mut self) -> Result<()> {
        self.end(Signal::Kill).await?;
        if self.epmd.is_none() {
            // In the foreground and ours: the one a node starts by itself outlives it.
            let mut command = self.environment(Guardian::command("epmd"));
            command.stdout(Stdio::null()).stderr(Stdio::null());
            self.epmd = Some(self.guardian.spawn(command, Signal::Kill).map_err(Error::io("cannot start epmd"))?);
            let epmd_port = self.epmd_port;
            self.listens(epmd_port).await?;
        }
        let output = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .map_err(Error::io("cannot write the broker's log"))?;
        let mut command = self.environment(Guardian::command(self.bin.join("rabbitmq-server")));
        let copy = output.try_clone().map_err(Error::io("cannot write the broker's log"))?;
        command.stdout(copy).stderr(output);
        self.node = Some(self.guardian.spawn(command, Signal::Kill).map_err(Error::io("cannot start RabbitMQ"))?);
        for port in [Some(self.port), self.tls_port].into_iter().flatten() {
            self.listens(port).await?;
        }
        Ok(())
    }

    async fn end(&mut self, signal: Signal) -> Result<()> {
        let Some(mut node) = self.node.take() else { return Ok(()) };
        let what = || Error::io("cannot stop the private RabbitMQ");
        if node.ended().map_err(what())?.is_none() {
            // It may end by itself in between.
            let _ = node.signal(signal);
            node.wait(PATIENCE).await.map_err(what())?;
        }
        self.guardian.forget(&node).map_err(what())
    }

    /// Waits until something of ours listens on the port. Asking rabbitmqctl instead can block for minutes.
    async fn listens(&mut self, port: u16) -> Result<()> {
        let started = Instant::now();
        loop {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Ok(());
            }
            for child in [&mut self.node, &mut self.epmd] {
                let ended =
                    child.as_mut().map(Guarded::ended).transpose().map_err(Error::io("cannot watch RabbitMQ"))?;
                if let Some(Some(status)) = ended {
                    let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                    return Err(Error::Program { what: format!("RabbitMQ ended ({status})"), output: tail(&log) });
                }
            }
            if started.elapsed() > PATIENCE {
                return Err(Error::io("RabbitMQ does not start")(std::io::ErrorKind::TimedOut.into()));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn configure(&self, tls: Option<&Tls>) -> Result<()> {
        let mut config = vec![
            format!("default_user = {USER}"),
            format!("default_pass = {}", self.password),
            "disk_free_limit.absolute = 1MB".into(),
            "log.console = true".into(),
            "log.console.level = warning".into(),
            "log.file = false".into(),
        ];
        let mut plugins = "[].\n";
        if let (Some(tls), Some(port)) = (tls, self.tls_port) {
            plugins = "[rabbitmq_auth_mechanism_ssl].\n";
            config.extend(self.configure_tls(tls, port)?);
        }
        write_private(&self.folder.join("rabbitmq.conf"), &(config.join("\n") + "\n"), None)?;
        for (file, text) in [("plugins", plugins), ("env.conf", "")] {
            fs::write(self.folder.join(file), text).map_err(Error::io("cannot configure RabbitMQ"))?;
        }
        Ok(())
    }

    fn configure_tls(&self, tls: &Tls, port: u16) -> Result<Vec<String>> {
        let mut config = vec![
            format!("listeners.ssl.default = 127.0.0.1:{port}"),
            "ssl_options.verify = verify_peer".into(),
            "ssl_options.fail_if_no_peer_cert = true".into(),
            "ssl_cert_login_from = common_name".into(),
            "auth_mechanisms.1 = EXTERNAL".into(),
            "auth_mechanisms.2 = PLAIN".into(),
        ];
        for (option, text) in [("cacertfile", &tls.authority), ("certfile", &tls.certificate), ("keyfile", &tls.key)] {
            let path = self.folder.join(format!("{option}.pem"));
            write_private(&path, text, None)?;
            config.push(format!("ssl_options.{option} = {}", path.display()));
        }
        Ok(config)
    }

    /// Nothing of the machine's own installation is read or written.
    fn environment(&self, mut command: Command) -> Command {
        let file = |name: &str| self.folder.join(name);
        command.current_dir(&self.folder).env("HOME", &self.folder).env("LC_ALL", "C.UTF-8");
        command.env("ERL_EPMD_PORT", self.epmd_port.to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        command.env("RABBITMQ_NODENAME", &self.name);
        command.env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1").env("RABBITMQ_NODE_PORT", self.port.to_string());
        command.env("RABBITMQ_DIST_PORT", self.dist_port.to_string());
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}");
        command.env("RABBITMQ_MNESIA_BASE", file("data")).env("RABBITMQ_LOG_BASE", file("logs"));
        command.env("RABBITMQ_CONFIG_FILE", file("rabbitmq")).env("RABBITMQ_CONF_ENV_FILE", file("env.conf"));
        command.env("RABBITMQ_ADVANCED_CONFIG_FILE", file("advanced.config"));
        command.env("RABBITMQ_GENERATED_CONFIG_DIR", file("generated"));
        command.env("RABBITMQ_ENABLED_PLUGINS_FILE", file("plugins")).env("RABBITMQ_PID_FILE", file("pid"));
        command
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }
}

/// FENCEPOST_RABBITMQ_BIN alone where it is set, else the usual folders.
fn find() -> Result<Option<PathBuf>> {
    let is_bin = |folder: &Path| folder.join("rabbitmq-server").is_file() && folder.join("rabbitmqctl").is_file();
    if let Some(folder) = std::env::var_os("FENCEPOST_RABBITMQ_BIN") {
        let folder = PathBuf::from(folder);
        return if is_bin(&folder) { Ok(Some(folder)) } else { Err(Error::NotABroker(folder)) };
    }
    Ok(PLACES.iter().map(PathBuf::from).find(|folder| is_bin(folder)))
}
