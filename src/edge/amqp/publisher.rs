//! The one task that publishes to a consumer: it keeps a connection with one confirm channel, and gives every message
//! handed to it exactly one fate. A connection that misbehaves is dropped, with everything that is on it, and made
//! again; nothing is recovered behind anybody's back.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Event};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::link::{self, Link, LinkError, Purpose};
use super::message::Message;
use super::suspects::Suspects;
use super::topology;
use super::window::{Done, Publishing, Verdict, Window, Written};
use crate::edge::error::report;
use crate::model::broker::Broker;
use crate::mutant::{self, Mutant};

/// The pause before a connection is made again doubles from here to there.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// How long the client library may take to report what a dead connection had under way.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often an idle channel is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Where one consumer's messages go, and how long to wait for what.
#[derive(Clone, Debug)]
pub struct Plan {
    pub consumer: String,
    pub broker: Arc<Broker>,
    pub exchange: ShortString,
    pub routing_key: ShortString,
    /// Messages without a confirm at any time.
    pub window: usize,
    pub connect_timeout: Duration,
    pub confirm_timeout: Duration,
}

/// How a message ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// The broker has it.
    Confirmed,
    /// The broker found no queue.
    Unroutable(String),
    /// It did not leave, and the same message may be tried again at once.
    Shut(String),
    /// The broker took nothing; the reason may pass.
    NotDelivered(String),
    /// The broker took nothing, and will not.
    Refused(String),
    Ambiguous(String),
}

/// A message and where its fate is told.
pub struct Job {
    pub message: Message,
    pub reply: oneshot::Sender<Fate>,
}

/// Why nothing can be published now; `None` while it can.
pub type Gate = Option<Arc<str>>;

/// Publishes until every sender of jobs is gone and nothing is out any more.
pub async fn run(plan: Plan, mut jobs: mpsc::Receiver<Job>, gate: watch::Sender<Gate>) {
    let mut pause = PAUSE.0;
    let mut suspects = Suspects::default();
    loop {
        let opened = tokio::select! {
            opened = open(&plan) => opened,
            () = refuse(&mut jobs, &gate) => return,
        };
        let why = match opened {
            Err(error) => report(&error),
            Ok((link, channel)) => {
                tracing::info!(consumer = %plan.consumer, broker = %plan.broker.name, "the broker's channel is open");
                gate.send_replace(None);
                let session = Session {
                    plan: &plan,
                    events: link.events(),
                    link,
                    channel,
                    window: Window::default(),
                    standing: Standing::Fresh,
                    suspects: &mut suspects,
                    lone: Lone::Nobody,
                    doomed: 0,
                    blocked_since: None,
                    unblocked_at: Instant::now(),
                };
                match session.run(&mut jobs, &gate).await {
                    Closed::Finished => return,
                    Closed::Lost { why, standing } => {
                        if standing == Standing::Proved {
                            pause = PAUSE.0;
                        }
                        why
                    }
                }
            }
        };
        tracing::warn!(consumer = %plan.consumer, broker = %plan.broker.name, reason = %why, "the way to the broker is shut");
        metrics::counter!("fencepost_amqp_lost_connections_total", "consumer" => plan.consumer.clone()).increment(1);
        gate.send_replace(Some(why.into()));
        let again = Instant::now() + pause.mul_f64(rand::random_range(0.5..=1.0));
        pause = (pause * 2).min(PAUSE.1);
        tokio::select! {
            () = sleep_until(again) => {}
            () = refuse(&mut jobs, &gate) => return,
        }
    }
}

/// Answers what comes while nothing can be sent. Ends when nothing can come any more.
async fn refuse(jobs: &mut mpsc::Receiver<Job>, gate: &watch::Sender<Gate>) {
    while let Some(job) = jobs.recv().await {
        let why = gate.borrow().as_deref().unwrap_or("not connected").to_string();
        // Whoever gave the attempt up needs no answer.
        let _ = job.reply.send(Fate::Shut(why));
    }
}

async fn open(plan: &Plan) -> Result<(Link, Channel), LinkError> {
    let link = Link::open(&plan.broker, Purpose::Publish, plan.connect_timeout).await?;
    if !plan.exchange.as_str().is_empty() {
        topology::exchange_exists(&link, plan.exchange.clone(), &plan.broker.vhost).await?;
    }
    let channel = link.channel().await?;
    link.answer("confirm.select", channel.confirm_select(ConfirmSelectOptions { nowait: false })).await?;
    Ok((link, channel))
}

/// A connection from its opening to its end.
struct Session<'a> {
    plan: &'a Plan,
    link: Link,
    events: Pin<Box<dyn Stream<Item = Event> + Send>>,
    channel: Channel,
    window: Window<oneshot::Sender<Fate>>,
    standing: Standing,
    suspects: &'a mut Suspects,
    lone: Lone,
    /// Messages the channel took with it when it died. They are told in parts: the last one was not alone for that.
    doomed: usize,
    blocked_since: Option<Instant>,
    unblocked_at: Instant,
}

/// A fresh connection proves itself with one message before it gets a window's worth.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Fresh,
    /// It carried a message to its end: the next pause is the shortest again.
    Proved,
}

/// Whether a suspect has the channel to itself.
enum Lone {
    Nobody,
    /// It waits until nothing else is out.
    Waiting(Box<Job>),
    Out,
}

enum Closed {
    Finished,
    Lost { why: String, standing: Standing },
}

/// What a session noticed. Lives for one turn of its loop.
#[allow(clippy::large_enum_variant)]
enum Noticed {
    Event(Option<Event>),
    Done(Vec<Done<oneshot::Sender<Fate>>>),
    Job(Option<Job>),
    Time,
}

impl Session<'_> {
    async fn run(mut self, jobs: &mut mpsc::Receiver<Job>, gate: &watch::Sender<Gate>) -> Closed {
        let mut more = true;
        loop {
            self.send_lone();
            if !more && self.window.is_empty() && !matches!(self.lone, Lone::Waiting(_)) {
                self.link.close().await;
                return Closed::Finished;
            }
            let room = more && self.has_room();
            let look_at = self.deadline().min(Instant::now() + LOOK_EVERY);
            let noticed = tokio::select! {
                biased;
                event = self.events.next() => Noticed::Event(event),
                done = self.window.done(), if !self.window.is_empty() => Noticed::Done(done),
                () = sleep_until(look_at) => Noticed::Time,
                job = jobs.recv(), if room => Noticed::Job(job),
            };
            match noticed {
                Noticed::Event(Some(Event::ConnectionBlocked(reason))) => self.blocked(&reason, gate),
                Noticed::Event(Some(Event::ConnectionUnblocked)) => self.unblocked(gate),
                Noticed::Event(Some(Event::Error(error))) => {
                    let why = self.explain(&error);
                    return self.lost(why, gate).await;
                }
                Noticed::Event(Some(_)) => {}
                Noticed::Event(None) => return self.lost("the connection ended".into(), gate).await,
                Noticed::Done(done) => {
                    if let Some(why) = self.answer(done) {
                        return self.lost(why, gate).await;
                    }
                }
                Noticed::Job(None) => more = false,
                Noticed::Job(Some(job)) => {
                    self.take(job);
                    while self.has_room() {
                        let Ok(job) = jobs.try_recv() else { break };
                        self.take(job);
                    }
                }
                Noticed::Time => {
                    // In case the news came before anybody listened.
                    match (self.link.is_blocked(), self.blocked_since) {
                        (true, None) => self.blocked("no reason was heard", gate),
                        (false, Some(_)) => self.unblocked(gate),
                        _ => {}
                    }
                    if let Some(why) = self.overdue() {
                        return self.lost(why, gate).await;
                    }
                }
            }
        }
    }

    fn has_room(&self) -> bool {
        let window = if self.standing == Standing::Fresh { 1 } else { self.plan.window };
        self.window.len() < window && matches!(self.lone, Lone::Nobody) && !self.is_blocked()
    }

    fn is_blocked(&self) -> bool {
        self.blocked_since.is_some() || self.link.is_blocked()
    }

    /// Publishes a message, or keeps it until it can go alone.
    fn take(&mut self, job: Job) {
        if !self.suspects.contains(&job.message.id) {
            self.publish(job);
        } else {
            self.lone = Lone::Waiting(Box::new(job));
            self.send_lone();
        }
    }

    /// A suspect goes when nothing else is out; when it has ended, others may go again.
    fn send_lone(&mut self) {
        if !self.window.is_empty() || self.is_blocked() {
            return;
        }
        if let Lone::Waiting(job) = std::mem::replace(&mut self.lone, Lone::Nobody) {
            self.publish(*job);
            if !self.window.is_empty() {
                self.lone = Lone::Out;
            }
        }
    }

    /// When patience ends: with a broker that blocks, else with the oldest confirm. Blocked time does not count.
    fn deadline(&self) -> Instant {
        match (self.blocked_since, self.window.oldest()) {
            (Some(since), _) => since + self.plan.broker.blocked_max,
            (None, Some(oldest)) => oldest.max(self.unblocked_at) + self.plan.confirm_timeout,
            (None, None) => Instant::now() + LOOK_EVERY,
        }
    }

    fn overdue(&self) -> Option<String> {
        if !self.link.is_up() || !self.channel.status().connected() {
            return Some("the channel is gone".into());
        }
        if self.window.is_empty() && self.blocked_since.is_none() || self.deadline() > Instant::now() {
            return None;
        }
        Some(match self.blocked_since {
            Some(_) => format!("the broker has blocked publishing for {:?}", self.plan.broker.blocked_max),
            None => format!("no confirm within {:?}", self.plan.confirm_timeout),
        })
    }

    fn blocked(&mut self, reason: &str, gate: &watch::Sender<Gate>) {
        self.blocked_since.get_or_insert_with(Instant::now);
        let why = format!("the broker has blocked publishing: {}", crate::edge::error::printable(reason, 200));
        tracing::warn!(consumer = %self.plan.consumer, broker = %self.plan.broker.name, %why, "shut");
        gate.send_replace(Some(why.into()));
    }

    fn unblocked(&mut self, gate: &watch::Sender<Gate>) {
        if self.blocked_since.take().is_some() {
            self.unblocked_at = Instant::now();
            tracing::info!(consumer = %self.plan.consumer, broker = %self.plan.broker.name, "the broker publishes again");
            gate.send_replace(None);
        }
    }

    fn publish(&mut self, job: Job) {
        let Job { message, reply } = job;
        if reply.is_closed() {
            return;
        }
        if self.window.holds(&message.id) {
            let _ = reply.send(Fate::Shut("the same key is on its way already".into()));
            return;
        }
        let (channel, exchange, routing_key) =
            (self.channel.clone(), self.plan.exchange.clone(), self.plan.routing_key.clone());
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let Message { id, properties, body } = message;
        let publishing: Publishing = Box::pin(async move {
            match channel.basic_publish(exchange, routing_key, options, &body, properties).await {
                Ok(_) if mutant::is(Mutant::FinishBeforeConfirm) => (Written::Wholly, Ok(Confirmation::Ack(None))),
                Ok(confirm) => (Written::Wholly, confirm.await),
                Err(error) => (Written::No, Err(error)),
            }
        });
        self.window.push(id, reply, publishing);
    }

    /// Tells each sender its message's fate. Gives the reason where the connection is good for nothing any more.
    fn answer(&mut self, done: Vec<Done<oneshot::Sender<Fate>>>) -> Option<String> {
        let failed = |verdict: &Verdict| matches!(verdict, Verdict::Lost(_) | Verdict::Unsent(_));
        let dead = done.iter().filter(|done| failed(&done.verdict)).count();
        if dead > 0 {
            self.doomed = self.doomed.max(self.window.len() + dead);
        }
        let mut broken = None;
        let mut died_with = HashSet::new();
        for Done { id, sender, verdict } in done {
            let fate = match verdict {
                Verdict::Confirmed => Fate::Confirmed,
                Verdict::Unroutable(reason) => Fate::Unroutable(reason),
                Verdict::Nacked if mutant::is(Mutant::NackAsSuccess) => Fate::Confirmed,
                Verdict::Nacked => Fate::Ambiguous("the broker answered nack: a queue may have taken it".into()),
                Verdict::Unasked => {
                    broken = Some("the channel does not confirm".to_string());
                    Fate::Ambiguous("the channel does not confirm".into())
                }
                Verdict::Unsent(ref error) | Verdict::Lost(ref error) => {
                    let why = self.explain(error);
                    broken.get_or_insert_with(|| why.clone());
                    let refused = link::reply_code(error).filter(|_| link::is_channels(error));
                    match refused {
                        // With nothing else out, the broker's refusal is about this message. It may come before the
                        // last byte is written.
                        Some(code) if self.doomed == 1 => refusal(code, why),
                        _ => {
                            if refused.is_some() {
                                died_with.insert(id.clone());
                            }
                            if matches!(verdict, Verdict::Unsent(_)) { Fate::Shut(why) } else { Fate::Ambiguous(why) }
                        }
                    }
                }
            };
            match fate {
                Fate::Ambiguous(_) | Fate::Shut(_) => {}
                // Nothing gets through as long as that stands.
                Fate::NotDelivered(_) => self.suspects.clear(&id),
                Fate::Confirmed | Fate::Unroutable(_) | Fate::Refused(_) => {
                    self.standing = Standing::Proved;
                    self.suspects.clear(&id);
                }
            }
            // Whoever gave the attempt up needs no answer.
            let _ = sender.send(fate);
        }
        self.suspects.remember(died_with);
        broken
    }

    /// What an error says, with what to do where the object is to blame and not the message.
    fn explain(&self, error: &lapin::Error) -> String {
        let (broker, words) = (&self.plan.broker, report(error));
        let exchange = match self.plan.exchange.as_str() {
            "" => "amq.default",
            name => name,
        };
        match link::reply_code(error) {
            Some(403) => format!(
                "{words} (the login of [brokers.{}] needs write on exchange {exchange:?}: rabbitmqctl set_permissions)",
                broker.name
            ),
            Some(404) => format!("{words} (the owner of exchange {exchange:?} must declare it in {:?})", broker.vhost),
            _ => words,
        }
    }

    /// Drops the connection and settles what was on it. Nobody is to start anything meanwhile.
    async fn lost(mut self, why: String, gate: &watch::Sender<Gate>) -> Closed {
        gate.send_replace(Some(why.as_str().into()));
        if self.link.is_up() {
            // The channel alone is gone.
            self.suspects.remember(self.window.ids().cloned().collect());
        }
        self.doomed = self.doomed.max(self.window.len());
        let standing = self.standing;
        self.link.kill();
        if let Lone::Waiting(job) = std::mem::replace(&mut self.lone, Lone::Nobody) {
            let _ = job.reply.send(Fate::Shut(why.clone()));
        }
        let end = Instant::now() + LAST_WORDS;
        while !self.window.is_empty() {
            match timeout(end.saturating_duration_since(Instant::now()), self.window.done()).await {
                Ok(done) => {
                    self.answer(done);
                }
                Err(_) => break,
            }
        }
        for sender in self.window.abandon() {
            let _ = sender.send(Fate::Ambiguous(why.clone()));
        }
        Closed::Lost { why, standing }
    }
}

/// What a channel's death says about the only message that was out.
fn refusal(code: u16, why: String) -> Fate {
    match code {
        // PRECONDITION_FAILED, CONTENT_TOO_LARGE: about the message itself.
        406 | 311 => Fate::Refused(why),
        _ => Fate::NotDelivered(why),
    }
}
