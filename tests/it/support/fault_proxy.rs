//! A TCP proxy that misbehaves on demand: cuts, resets, swallows, delays. For whatever speaks TCP, broker or database.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Whose bytes a fault concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the one who connected.
    ToServer,
    ToClient,
}

/// What happens to the bytes of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// They pass.
    None,
    /// They are read and never passed on; the connection stays open.
    Swallow,
    /// They are kept, and pass when this is over.
    Hold,
    /// They pass after so long.
    Delay(Duration),
    /// After so many more the connection is reset.
    CutAfter(u64),
}

/// How connections end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    Live,
    /// With RST, and no new one is accepted while this stands.
    Reset,
}

/// A proxy in front of one server. Dropped, it is gone with its connections.
pub struct FaultProxy {
    address: SocketAddr,
    to_server: watch::Sender<Fault>,
    to_client: watch::Sender<Fault>,
    order: watch::Sender<(u64, Order)>,
    accepted: Arc<AtomicU64>,
    open: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl FaultProxy {
    pub async fn start(server: SocketAddr) -> Self {
        Self::start_for(server, b"").await
    }

    /// Its faults concern only connections over which the client has said `name`; orders concern all.
    pub async fn start_for(server: SocketAddr, name: &'static [u8]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let (to_server, to_server_rx) = watch::channel(Fault::None);
        let (to_client, to_client_rx) = watch::channel(Fault::None);
        let (order, order_rx) = watch::channel((0, Order::Live));
        let accepted = Arc::new(AtomicU64::new(0));
        let (open, counts) = (Arc::new(AtomicU64::new(0)), Arc::clone(&accepted));
        let opens = Arc::clone(&open);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if order_rx.borrow().1 == Order::Reset {
                    reset(client);
                    continue;
                }
                counts.fetch_add(1, Ordering::SeqCst);
                opens.fetch_add(1, Ordering::SeqCst);
                let concerned = Arc::new(AtomicBool::new(name.is_empty()));
                let listening = Listening { name, heard: Vec::new(), concerned: Arc::clone(&concerned) };
                let up =
                    Side { fault: to_server_rx.clone(), concerned: Arc::clone(&concerned), listening: Some(listening) };
                let down = Side { fault: to_client_rx.clone(), concerned, listening: None };
                let (order, opens) = (order_rx.clone(), Arc::clone(&opens));
                tokio::spawn(async move {
                    serve(client, server, up, down, order).await;
                    opens.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, to_server, to_client, order, accepted, open, task }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Connections made through it so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> u64 {
        self.open.load(Ordering::SeqCst)
    }

    /// From now on, for open and new connections.
    pub fn set(&self, direction: Direction, fault: Fault) {
        match direction {
            Direction::ToServer => self.to_server.send_replace(fault),
            Direction::ToClient => self.to_client.send_replace(fault),
        };
    }

    /// Neither side hears the other, and neither is told.
    pub fn blackhole(&self) {
        self.set(Direction::ToServer, Fault::Swallow);
        self.set(Direction::ToClient, Fault::Swallow);
    }

    /// No faults any more. Connections that lost bytes are reset, since what was swallowed is gone.
    pub fn heal(&self) {
        self.reset_all();
        self.set(Direction::ToServer, Fault::None);
        self.set(Direction::ToClient, Fault::None);
    }

    /// Resets every open connection; new ones work.
    pub fn reset_all(&self) {
        self.order.send_modify(|order| *order = (order.0 + 1, Order::Live));
    }

    /// Resets every connection, open and new, until [`FaultProxy::heal`].
    pub fn refuse(&self) {
        self.order.send_modify(|order| *order = (order.0 + 1, Order::Reset));
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
        self.reset_all();
    }
}

async fn serve(
    mut client: TcpStream,
    server: SocketAddr,
    up: Side,
    down: Side,
    mut order: watch::Receiver<(u64, Order)>,
) {
    order.mark_unchanged();
    let Ok(mut server) = TcpStream::connect(server).await else { return reset(client) };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("a socket's option");
    }
    let orderly = {
        let (client_read, client_write) = client.split();
        let (server_read, server_write) = server.split();
        let both = async {
            let up = pump(client_read, server_write, up);
            let down = pump(server_read, client_write, down);
            // Each direction ends on its own, as in a half-closed connection; a cut ends both.
            tokio::try_join!(up, down).is_ok()
        };
        tokio::select! {
            orderly = both => orderly,
            _ = order.changed() => false,
        }
    };
    if !orderly {
        reset(client);
        reset(server);
    }
}

/// Ends the connection with RST instead of FIN.
fn reset(stream: TcpStream) {
    stream.set_zero_linger().expect("a socket's option");
}

/// The connection is to be reset.
struct Cut;

/// One direction of a connection.
struct Side {
    fault: watch::Receiver<Fault>,
    /// Whether faults concern this connection.
    concerned: Arc<AtomicBool>,
    listening: Option<Listening>,
}

/// Hears whether the client says the name that makes its connection concerned.
struct Listening {
    name: &'static [u8],
    heard: Vec<u8>,
    concerned: Arc<AtomicBool>,
}

impl Listening {
    /// `None` once nothing is listened for any more.
    fn hear(mut self, bytes: &[u8]) -> Option<Self> {
        self.heard.extend_from_slice(bytes);
        if self.name.is_empty() || self.heard.windows(self.name.len()).any(|said| said == self.name) {
            self.concerned.store(true, Ordering::SeqCst);
            return None;
        }
        // Names are said at the beginning.
        (self.heard.len() < 64 * 1024).then_some(self)
    }
}

/// Passes bytes on until their end, as the fault in force says.
async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut side: Side) -> Result<(), Cut> {
    let mut buffer = vec![0; 16 * 1024];
    let mut passed = 0;
    let mut held = Vec::new();
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read.map_err(|_| Cut)?,
            _ = side.fault.changed() => {
                passed = 0;
                if *side.fault.borrow() != Fault::Hold {
                    to.write_all(&std::mem::take(&mut held)).await.map_err(|_| Cut)?;
                }
                continue;
            }
        };
        if read == 0 {
            return to.shutdown().await.map_err(|_| Cut);
        }
        let bytes = &buffer[..read];
        side.listening = side.listening.take().and_then(|listening| listening.hear(bytes));
        let current = if side.concerned.load(Ordering::SeqCst) { *side.fault.borrow() } else { Fault::None };
        match current {
            Fault::Hold => held.extend_from_slice(bytes),
            Fault::None => to.write_all(bytes).await.map_err(|_| Cut)?,
            Fault::Swallow => {}
            Fault::Delay(wait) => {
                tokio::time::sleep(wait).await;
                to.write_all(bytes).await.map_err(|_| Cut)?;
            }
            Fault::CutAfter(limit) => {
                let room = usize::try_from(limit.saturating_sub(passed)).unwrap_or(usize::MAX).min(read);
                to.write_all(&bytes[..room]).await.map_err(|_| Cut)?;
                passed += room as u64;
                if passed >= limit {
                    return Err(Cut);
                }
            }
        }
    }
}
