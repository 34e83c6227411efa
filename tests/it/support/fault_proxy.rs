//! A TCP proxy that misbehaves on demand: cuts, resets, swallows, delays. For whatever speaks TCP, broker or database.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    task: tokio::task::JoinHandle<()>,
}

impl FaultProxy {
    pub async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let (to_server, to_server_rx) = watch::channel(Fault::None);
        let (to_client, to_client_rx) = watch::channel(Fault::None);
        let (order, order_rx) = watch::channel((0, Order::Live));
        let accepted = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&accepted);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if order_rx.borrow().1 == Order::Reset {
                    reset(client);
                    continue;
                }
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(client, server, to_server_rx.clone(), to_client_rx.clone(), order_rx.clone()));
            }
        });
        Self { address, to_server, to_client, order, accepted, task }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Connections made through it so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::SeqCst)
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
    to_server: watch::Receiver<Fault>,
    to_client: watch::Receiver<Fault>,
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
            let up = pump(client_read, server_write, to_server);
            let down = pump(server_read, client_write, to_client);
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

/// Passes bytes on until their end, as the fault in force says.
async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut fault: watch::Receiver<Fault>) -> Result<(), Cut> {
    let mut buffer = vec![0; 16 * 1024];
    let mut passed = 0;
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read.map_err(|_| Cut)?,
            _ = fault.changed() => {
                passed = 0;
                continue;
            }
        };
        if read == 0 {
            return to.shutdown().await.map_err(|_| Cut);
        }
        let bytes = &buffer[..read];
        let current = *fault.borrow();
        match current {
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
