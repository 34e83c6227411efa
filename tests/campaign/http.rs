//! A consumer over HTTP: a raw server, so that connections can be reset at any point.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::consumers::{Desk, Mood, Number, Receipt, Said, Speech, TIMEOUT, hex, odd};
use crate::history::now;

/// What goes back over the wire.
enum Answer {
    Http { said: Said, status: u16, headers: Vec<(&'static str, String)>, after: Duration },
    Raw(&'static [u8]),
    Reset,
    Never,
}

pub async fn start(desk: Arc<Desk>) -> anyhow::Result<(SocketAddr, AbortOnDropHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = AbortOnDropHandle::new(tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            connections.spawn(serve(socket, Arc::clone(&desk)));
            while connections.try_join_next().is_some() {}
        }
    }));
    Ok((address, server))
}

fn treat(desk: &Desk, number: Number, mood: Mood, coin: bool) -> Answer {
    let speaks = desk.profile.speech == Speech::Words;
    let word = |said: Said| -> Vec<(&'static str, String)> {
        let word = desk.word(number, said).filter(|_| speaks);
        word.into_iter().map(|word| ("outbox-ack", word)).collect()
    };
    let http = |said, status, headers| Answer::Http { said, status, headers, after: Duration::ZERO };
    match mood {
        Mood::Errors if coin => http(Said::Status(500), 500, Vec::new()),
        Mood::Throttles => http(Said::Status(429), 429, vec![("retry-after", "1".into())]),
        Mood::InProgress => http(Said::InProgress, 409, word(Said::InProgress)),
        Mood::NotApplied if speaks => http(Said::NotApplied, 503, word(Said::NotApplied)),
        Mood::NotApplied => http(Said::Status(503), 503, Vec::new()),
        Mood::Refuses => http(Said::Status(404), 404, Vec::new()),
        Mood::Gone => http(Said::Status(410), 410, Vec::new()),
        Mood::ResetsBefore => Answer::Reset,
        Mood::BlackHole => Answer::Never,
        Mood::Well | Mood::Errors | Mood::Garbage | Mood::ResetsAfter | Mood::Slow | Mood::Crawls => {
            let said = desk.apply(number);
            let status = match said {
                Said::Conflict => 422,
                Said::Stale => 412,
                Said::Fine => 204,
                _ => 200,
            };
            let honest = |after| Answer::Http { said, status, headers: word(said), after };
            match mood {
                Mood::Errors => http(Said::Status(500), 500, Vec::new()),
                Mood::Garbage if speaks => http(Said::Garbage, 200, vec![("outbox-ack", "perhaps; or=not".into())]),
                Mood::Garbage => Answer::Raw(b"HTTP/1.1 banana\r\n\r\n"),
                Mood::ResetsAfter => Answer::Reset,
                Mood::Slow => honest(TIMEOUT + Duration::from_millis(500)),
                Mood::Crawls => honest(Duration::from_millis(300)),
                _ => honest(Duration::ZERO),
            }
        }
    }
}

fn receipt_of(headers: &HashMap<String, String>, body: &[u8], me: &str) -> Receipt {
    let header = |name: &str| headers.get(name).cloned().unwrap_or_default();
    let key = header("webhook-id");
    let digest = Sha256::digest(body);
    let mut parts = key.split(':').map(str::to_owned);
    let pairs = [
        ("idempotency-key", header("idempotency-key"), format!("\"{key}\"")),
        ("outbox-task-id", header("outbox-task-id"), parts.next().unwrap_or_default()),
        ("outbox-lease-epoch", header("outbox-lease-epoch"), parts.next().unwrap_or_default()),
        ("outbox-consumer", header("outbox-consumer"), me.to_owned()),
        ("content-digest", header("content-digest"), format!("sha-256=:{}:", STANDARD.encode(digest))),
    ];
    Receipt {
        at: now(),
        attempt: header("outbox-attempt").parse().unwrap_or(0),
        sha256: hex(&digest),
        again: false,
        odd: odd(&pairs),
        key,
        applied: None,
        said: None,
        answered: None,
    }
}

/// Answers one request after the other.
async fn serve(mut socket: TcpStream, desk: Arc<Desk>) {
    let _ = socket.set_nodelay(true);
    let mut buffer = Vec::new();
    while let Some((headers, body)) = read_request(&mut socket, &mut buffer).await {
        let (number, mood, coin) = desk.take(receipt_of(&headers, &body, desk.profile.name));
        match treat(&desk, number, mood, coin) {
            Answer::Http { said, status, headers, after } => {
                tokio::time::sleep(after).await;
                let mut text = format!("HTTP/1.1 {status} Answer\r\n");
                headers.iter().for_each(|(name, value)| text.push_str(&format!("{name}: {value}\r\n")));
                text.push_str(if status == 204 { "\r\n" } else { "content-length: 0\r\n\r\n" });
                desk.says(number, said);
                if socket.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
            }
            Answer::Raw(bytes) => {
                desk.says(number, Said::Garbage);
                let _ = socket.write_all(bytes).await;
                return;
            }
            Answer::Reset => {
                desk.says(number, Said::Nothing);
                let _ = socket.set_zero_linger();
                return;
            }
            Answer::Never => {
                desk.says(number, Said::Nothing);
                let mut rest = [0; 1_024];
                while matches!(socket.read(&mut rest).await, Ok(count) if count > 0) {}
                return;
            }
        }
    }
}

async fn read_request(socket: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(HashMap<String, String>, Vec<u8>)> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if socket.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head: Vec<u8> = buffer.drain(..end).collect();
    let text = String::from_utf8_lossy(&head);
    let pair = |line: &str| line.split_once(':').map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()));
    let headers: HashMap<String, String> = text.lines().skip(1).filter_map(pair).collect();
    let length: usize = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    while buffer.len() < length {
        if socket.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    Some((headers, buffer.drain(..length).collect()))
}
