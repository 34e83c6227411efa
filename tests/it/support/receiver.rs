//! A consumer that does as it is told: a raw HTTP/1.1 server whose every answer, stall and cut is scripted, and that
//! keeps every request as it came.
//!
//! ```ignore
//! let receiver = Receiver::start().await;              // answers 200 `Outbox-Ack: applied` until told otherwise
//! receiver.next(Script::answer(503));                  // the next request, once
//! receiver.on_key("task:1", Script::stall());          // every request with that webhook-id
//! receiver.always(Script::answer(200).ack("applied"));
//! let requests = receiver.wait_until(2).await;
//! ```

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::eventually;
use super::script::Step;
pub use super::script::{Answer, Cut, Gate, Script};

/// What to do with a connection before anything is read from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnAccept {
    Serve,
    /// Never reads a byte.
    Stall,
    Cut(Cut),
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which connection brought it, from 0.
    pub connection: usize,
    /// With the empty line; of a request that was cut unread, whatever had arrived.
    pub head: Vec<u8>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn line(&self) -> String {
        String::from_utf8_lossy(&self.head).lines().next().unwrap_or_default().to_owned()
    }

    /// Names in lower case, in the order they came.
    pub fn headers(&self) -> Vec<(String, String)> {
        let text = String::from_utf8_lossy(&self.head).into_owned();
        let pair = |line: &str| line.split_once(':').map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()));
        text.lines().skip(1).filter_map(pair).collect()
    }

    /// The value of a header; panics where it came twice.
    pub fn header(&self, name: &str) -> Option<String> {
        let mut found = self.headers().into_iter().filter(|(n, _)| n == name).map(|(_, value)| value);
        let first = found.next();
        assert!(found.next().is_none(), "{name} came twice");
        first
    }

    pub fn key(&self) -> String {
        self.header("webhook-id").unwrap_or_default()
    }

    pub fn attempt(&self) -> u32 {
        self.header("outbox-attempt").and_then(|n| n.parse().ok()).expect("an attempt number")
    }
}

type Chooser = Box<dyn Fn(&Request) -> Option<Script> + Send>;

struct Book {
    requests: Vec<Request>,
    connections: usize,
    accepts: VecDeque<OnAccept>,
    queue: VecDeque<Script>,
    by_key: HashMap<String, VecDeque<Script>>,
    chooser: Chooser,
    otherwise: Script,
}

/// A scripted consumer on a port of its own; it ends with its handle.
pub struct Receiver {
    address: SocketAddr,
    scheme: &'static str,
    book: Arc<Mutex<Book>>,
    tasks: tokio::task::JoinHandle<()>,
}

impl Receiver {
    pub async fn start() -> Self {
        Self::serve(None).await
    }

    pub async fn start_tls(acceptor: TlsAcceptor) -> Self {
        Self::serve(Some(acceptor)).await
    }

    async fn serve(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let book = Arc::new(Mutex::new(Book {
            requests: Vec::new(),
            connections: 0,
            accepts: VecDeque::new(),
            queue: VecDeque::new(),
            by_key: HashMap::new(),
            chooser: Box::new(|_| None),
            otherwise: Script::answer(200).ack("applied").into(),
        }));
        let scheme = if tls.is_some() { "https" } else { "http" };
        let tasks = tokio::spawn(accept(listener, tls, Arc::clone(&book)));
        Self { address, scheme, book, tasks }
    }

    pub fn url(&self) -> String {
        format!("{}://{}/hook", self.scheme, self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// What a request gets that no other rule names.
    pub fn always(&self, script: impl Into<Script>) {
        self.book().otherwise = script.into();
    }

    /// What the next request gets, once; calls queue up and come before every other rule.
    pub fn next(&self, script: impl Into<Script>) {
        self.book().queue.push_back(script.into());
    }

    /// What every request with this `webhook-id` gets.
    pub fn on_key(&self, key: &str, script: impl Into<Script>) {
        self.on_key_in_turn(key, [script.into()]);
    }

    /// What the requests with this `webhook-id` get one after the other; the last stays.
    pub fn on_key_in_turn(&self, key: &str, scripts: impl IntoIterator<Item = Script>) {
        self.book().by_key.insert(key.into(), scripts.into_iter().collect());
    }

    /// Asks `choose` where neither the queue nor a key decides; `None` leaves it to [`Receiver::always`].
    pub fn choose(&self, choose: impl Fn(&Request) -> Option<Script> + Send + 'static) {
        self.book().chooser = Box::new(choose);
    }

    /// What the next connection gets before anything is read from it; calls queue up.
    pub fn next_connection(&self, what: OnAccept) {
        self.book().accepts.push_back(what);
    }

    /// Every request so far, in the order in which it was taken up.
    pub fn requests(&self) -> Vec<Request> {
        self.book().requests.clone()
    }

    pub fn requests_for(&self, key: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.key() == key).collect()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.book().connections
    }

    /// Waits until `count` requests have been taken up.
    pub async fn wait_until(&self, count: usize) -> Vec<Request> {
        let reached = async || Some(self.requests()).filter(|requests| requests.len() >= count);
        eventually(&format!("{count} requests"), reached).await
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.tasks.abort();
    }
}

/// A socket, with TLS or without, that can be cut below it.
trait Wire: AsyncRead + AsyncWrite + Unpin + Send {
    fn tcp(&self) -> &TcpStream;
}

impl Wire for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Wire for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, book: Arc<Mutex<Book>>) {
    // Connections end with the listener: their tasks live in this one.
    let mut served = tokio::task::JoinSet::new();
    while let Ok((mut socket, _)) = listener.accept().await {
        let _ = socket.set_nodelay(true);
        let (number, what) = {
            let mut book = book.lock().expect("no holder panics");
            book.connections += 1;
            (book.connections - 1, book.accepts.pop_front().unwrap_or(OnAccept::Serve))
        };
        let (tls, book) = (tls.clone(), Arc::clone(&book));
        served.spawn(async move {
            match (what, tls) {
                (OnAccept::Cut(how), _) => cut(&mut socket, how).await,
                (OnAccept::Stall, _) => std::future::pending().await,
                (OnAccept::Serve, None) => serve(socket, number, &book).await,
                (OnAccept::Serve, Some(tls)) => {
                    if let Ok(wire) = tls.accept(socket).await {
                        serve(wire, number, &book).await;
                    }
                }
            }
        });
        while served.try_join_next().is_some() {}
    }
}

/// Answers one request after the other until a script or the peer ends the connection.
async fn serve(mut wire: impl Wire, number: usize, book: &Mutex<Book>) {
    let mut buffer = Vec::new();
    loop {
        let Some(end) = read_head(&mut wire, &mut buffer).await else { return };
        let mut request = Request { connection: number, head: buffer.drain(..end).collect(), body: Vec::new() };
        let length = request.header("content-length").and_then(|n| n.parse().ok()).unwrap_or(0usize);
        let Script(steps) = choose(book, &request);
        let mut steps = steps.into_iter().peekable();
        if matches!(steps.peek(), Some(Step::ReadBody)) {
            steps.next();
            if !read_to(&mut wire, &mut buffer, length).await {
                return;
            }
            request.body = buffer.drain(..length).collect();
        }
        let unread = length - request.body.len();
        book.lock().expect("no holder panics").requests.push(request);
        for step in steps {
            if !act(&mut wire, step, number, book).await {
                return;
            }
        }
        if unread > 0 {
            return;
        }
    }
}

fn choose(book: &Mutex<Book>, request: &Request) -> Script {
    let mut book = book.lock().expect("no holder panics");
    if let Some(script) = book.queue.pop_front() {
        return script;
    }
    let by_key = book.by_key.get_mut(&request.key()).and_then(|scripts| match scripts.len() {
        0 | 1 => scripts.front().cloned(),
        _ => scripts.pop_front(),
    });
    by_key.or_else(|| (book.chooser)(request)).unwrap_or_else(|| book.otherwise.clone())
}

/// `false`: the connection is over.
async fn act(wire: &mut impl Wire, step: Step, number: usize, book: &Mutex<Book>) -> bool {
    match step {
        Step::ReadBody => true,
        Step::Send(bytes) => wire.write_all(&bytes).await.is_ok() && wire.flush().await.is_ok(),
        Step::Drip(bytes) => {
            for byte in bytes {
                if wire.write_all(&[byte]).await.is_err() || wire.flush().await.is_err() {
                    return false;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            true
        }
        Step::Repeat(bytes) => {
            while wire.write_all(&bytes).await.is_ok() {}
            false
        }
        Step::Hold(gate) => {
            // An opened gate has closed its semaphore: both answers let us pass.
            if let Ok(permit) = gate.0.acquire().await {
                permit.forget();
            }
            true
        }
        Step::Stall => {
            // Until the peer goes; what it still sends is not read, so that a large body stays stuck.
            loop {
                let gone = wire.tcp().peek(&mut [0]).await;
                if matches!(gone, Ok(0) | Err(_)) {
                    return false;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
        Step::Cut(how) => {
            cut(wire, how).await;
            false
        }
        Step::CutNext(how) => {
            let mut seen = vec![0; 64 * 1024];
            match wire.tcp().peek(&mut seen).await {
                Ok(count) if count > 0 => {
                    seen.truncate(count);
                    let request = Request { connection: number, head: seen, body: Vec::new() };
                    book.lock().expect("no holder panics").requests.push(request);
                    cut(wire, how).await;
                }
                _ => {}
            }
            false
        }
    }
}

/// Ends a connection. RST goes out when the socket is dropped, right after this; a FIN must come before what is unread
/// is dropped, or that would send RST as well.
async fn cut(wire: &mut impl Wire, how: Cut) {
    match how {
        Cut::Rst => wire.tcp().set_zero_linger().expect("a socket's option"),
        Cut::Fin => {
            let _ = wire.shutdown().await;
            let mut rest = vec![0; 64 * 1024];
            while matches!(wire.read(&mut rest).await, Ok(count) if count > 0) {}
        }
    }
}

async fn read_head(wire: &mut impl Wire, buffer: &mut Vec<u8>) -> Option<usize> {
    loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            return Some(at + 4);
        }
        if wire.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

async fn read_to(wire: &mut impl Wire, buffer: &mut Vec<u8>, length: usize) -> bool {
    while buffer.len() < length {
        if !matches!(wire.read_buf(buffer).await, Ok(count) if count > 0) {
            return false;
        }
    }
    true
}
