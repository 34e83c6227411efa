//! A proxy between a program and its server that does harm on order: cuts connections, swallows answers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Notify;

/// Where the server is.
#[derive(Clone, Debug)]
pub enum Upstream {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

#[derive(Default)]
struct Orders {
    /// The first answer with these bytes is swallowed, and its connection cut.
    swallow: Mutex<Option<Vec<u8>>>,
    /// The next answer to the prepared statement with this first line is swallowed, and its connection cut. Empty: it was.
    swallow_to: Mutex<Option<Vec<u8>>>,
    /// PostgreSQL's NotificationResponse never arrives, as behind a transaction pooler.
    deaf: AtomicBool,
    cuts: AtomicUsize,
    cut_all: Notify,
}

/// A proxy on a port of its own; its connections end with its handle.
pub struct PostgresProxy {
    address: SocketAddr,
    orders: Arc<Orders>,
    task: tokio::task::JoinHandle<()>,
}

impl PostgresProxy {
    pub async fn start(upstream: Upstream) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let orders = Arc::new(Orders::default());
        let task = tokio::spawn(accept(listener, upstream, Arc::clone(&orders)));
        Self { address, orders, task }
    }

    /// In front of the PostgreSQL of this URL, with the URL of the same database through the proxy.
    pub async fn before_postgres(url: &str) -> (Self, String) {
        let config: tokio_postgres::Config = url.parse().expect("a url");
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let upstream = match &config.get_hosts()[0] {
            tokio_postgres::config::Host::Unix(folder) => Upstream::Unix(folder.join(format!(".s.PGSQL.{port}"))),
            tokio_postgres::config::Host::Tcp(name) => {
                let mut found = tokio::net::lookup_host((name.as_str(), port)).await.expect("an address");
                Upstream::Tcp(found.next().expect("an address"))
            }
        };
        let proxy = Self::start(upstream).await;
        let password = config.get_password().map(|p| String::from_utf8_lossy(p).into_owned());
        let user = match (config.get_user().expect("a user"), password) {
            (user, None) => user.to_owned(),
            (user, Some(password)) => format!("{user}:{password}"),
        };
        let database = config.get_dbname().expect("a database");
        let url = format!("postgresql://{user}@{}/{database}?sslmode=disable", proxy.address);
        (proxy, url)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next answer that holds these bytes does not arrive: its connection is cut instead.
    pub fn swallow(&self, bytes: &[u8]) {
        *self.orders.swallow.lock().expect("no holder panics") = Some(bytes.to_vec());
    }

    /// The next answer to the prepared statement with this first line does not arrive.
    pub fn swallow_answer_to(&self, line: &str) {
        *self.orders.swallow_to.lock().expect("no holder panics") = Some(line.as_bytes().to_vec());
    }

    /// From now on PostgreSQL's notifications do not arrive.
    pub fn swallow_notifications(&self) {
        self.orders.deaf.store(true, Ordering::SeqCst);
    }

    /// Cuts every connection there is.
    pub fn cut_all(&self) {
        self.orders.cut_all.notify_waiters();
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> usize {
        self.orders.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for PostgresProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, upstream: Upstream, orders: Arc<Orders>) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let (upstream, orders) = (upstream.clone(), Arc::clone(&orders));
        let _ = client.set_nodelay(true);
        connections.spawn(async move {
            match upstream {
                Upstream::Tcp(address) => match TcpStream::connect(address).await {
                    Ok(server) => {
                        let _ = server.set_nodelay(true);
                        let (from, to) = server.into_split();
                        carry(client, from, to, &orders).await;
                    }
                    Err(_) => drop(client),
                },
                Upstream::Unix(path) => match UnixStream::connect(path).await {
                    Ok(server) => {
                        let (from, to) = server.into_split();
                        carry(client, from, to, &orders).await;
                    }
                    Err(_) => drop(client),
                },
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Carries bytes both ways until either side ends or an order cuts.
async fn carry(mut client: TcpStream, from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, orders: &Orders) {
    let cut = orders.cut_all.notified();
    let harmed = {
        let (mut asks, mut answers) = client.split();
        let swallow_next = AtomicBool::new(false);
        let asking = async {
            ask(&mut asks, &mut to, orders, &swallow_next).await;
            false
        };
        tokio::select! {
            harmed = asking => harmed,
            harmed = answer(from, &mut answers, orders, &swallow_next) => harmed,
            () = cut => true,
        }
    };
    if harmed {
        orders.cuts.fetch_add(1, Ordering::SeqCst);
        client.set_zero_linger().expect("a socket's option");
    }
}

/// Carries what is asked, and says when the next answer is the one to be swallowed.
async fn ask(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    orders: &Orders,
    swallow_next: &AtomicBool,
) {
    const TEXT: &[u8] = b"-- store::";
    let mut chunk = vec![0; 64 * 1024];
    // The first line of each prepared statement, and how Bind names it.
    let mut prepared: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    while let Ok(count @ 1..) = from.read(&mut chunk).await {
        let bytes = &chunk[..count];
        let at = bytes.windows(TEXT.len()).position(|window| window == TEXT);
        // Parse: a length, the statement's name (`s` and a number), its text.
        let named = at.and_then(|at| Some((at, bytes[..at].iter().rposition(|byte| *byte == b's')?)));
        if let Some((at, name)) = named {
            let line = bytes[at..].split(|byte| *byte == b'\n').next().unwrap_or_default();
            prepared.push((line.to_vec(), [b"\0", &bytes[name..at]].concat()));
        } else if let Some(wanted) = &mut *orders.swallow_to.lock().expect("no holder panics") {
            let is_bound = |name: &Vec<u8>| bytes.windows(name.len()).any(|window| window == name);
            if prepared.iter().any(|(line, name)| line == wanted && is_bound(name)) {
                wanted.clear();
                swallow_next.store(true, Ordering::SeqCst);
            }
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
}

/// `true`: an order ended it.
async fn answer(
    mut from: impl AsyncRead + Unpin,
    to: &mut (impl AsyncWrite + Unpin),
    orders: &Orders,
    swallow_next: &AtomicBool,
) -> bool {
    let mut chunk = vec![0; 64 * 1024];
    // The end of what has passed, so that the bytes looked for may lie across two reads.
    let mut tail: Vec<u8> = Vec::new();
    let mut frames = Vec::new();
    loop {
        let count = match from.read(&mut chunk).await {
            Ok(0) | Err(_) => return false,
            Ok(count) => count,
        };
        if swallow_next.load(Ordering::SeqCst) {
            return true;
        }
        let bytes = &chunk[..count];
        {
            let mut swallow = orders.swallow.lock().expect("no holder panics");
            if let Some(wanted) = swallow.as_ref() {
                tail.extend_from_slice(bytes);
                if tail.windows(wanted.len()).any(|window| window == wanted) {
                    *swallow = None;
                    return true;
                }
                tail.drain(..tail.len().saturating_sub(wanted.len()));
            }
        }
        let passing = if orders.deaf.load(Ordering::SeqCst) {
            frames.extend_from_slice(bytes);
            without_notifications(&mut frames)
        } else {
            bytes.to_vec()
        };
        if to.write_all(&passing).await.is_err() {
            return false;
        }
    }
}

/// Takes whole messages (a type, a length, a body) out of `frames` and drops those of type `A`.
fn without_notifications(frames: &mut Vec<u8>) -> Vec<u8> {
    let mut kept = Vec::new();
    while let Some(length) = frames.get(1..5) {
        let length = 1 + u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
        if frames.len() < length {
            break;
        }
        let frame: Vec<u8> = frames.drain(..length).collect();
        if frame[0] != b'A' {
            kept.extend(frame);
        }
    }
    kept
}
