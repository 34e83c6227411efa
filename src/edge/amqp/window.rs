//! Messages that are out and not confirmed yet, and what becomes of them.
//!
//! The client library pairs a returned message with whichever confirm resolves next, so a confirm alone says nothing
//! about routing. The broker sends a message's return before its confirm; hence, once every confirm that had resolved
//! before it is looked at, a message is unroutable exactly if its id is among the returned ones. A confirm that carried
//! somebody else's return may have left its own behind: it is held until that shows up or until everything that was out
//! at that moment has resolved, by when the library has handed all of those returns over.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::Confirmation;
use lapin::message::BasicReturnMessage;
use tokio::time::Instant;

use crate::mutant::{self, Mutant};

/// How one message ended, as far as the broker's own words go.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Confirmed,
    /// The broker's reason.
    Unroutable(String),
    /// A queue may have taken it all the same.
    Nacked,
    /// Its last byte was never handed to the system: the broker cannot have it.
    Unsent(lapin::Error),
    /// It may have arrived.
    Lost(lapin::Error),
    /// The library says confirms were never asked for.
    Unasked,
}

/// A message on its way: resolves with whether all of it was written, and what came back.
pub type Publishing = Pin<Box<dyn Future<Output = (Written, lapin::Result<Confirmation>)> + Send>>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    Wholly,
    No,
}

type Seq = u64;
type Tagged = Pin<Box<dyn Future<Output = (Seq, Written, lapin::Result<Confirmation>)> + Send>>;

/// Unconfirmed messages, each with what its sender wants back.
pub struct Window<T> {
    resolving: FuturesUnordered<Tagged>,
    out: BTreeMap<Seq, Out<T>>,
    /// Confirmed, but their own return may still be to come.
    held: Vec<Held<T>>,
    returned: HashMap<String, String>,
    /// The channel is gone: no return comes any more.
    broken: Option<lapin::Error>,
    ids: HashSet<String>,
    next: Seq,
}

struct Out<T> {
    id: String,
    since: Instant,
    sender: T,
}

struct Held<T> {
    id: String,
    sender: T,
    /// Everything before this was out when it was confirmed.
    barrier: Seq,
    nacked: bool,
}

/// A message that has ended.
pub struct Done<T> {
    pub id: String,
    pub sender: T,
    pub verdict: Verdict,
}

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self {
            resolving: FuturesUnordered::new(),
            out: BTreeMap::new(),
            held: Vec::new(),
            returned: HashMap::new(),
            broken: None,
            ids: HashSet::new(),
            next: 0,
        }
    }
}

impl<T> Window<T> {
    /// Messages whose end is not known.
    pub fn len(&self) -> usize {
        self.out.len() + self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids of what is out.
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.ids.iter()
    }

    /// Whether a message with this id is out: a second one could not be told from it.
    pub fn holds(&self, id: &str) -> bool {
        self.ids.contains(id)
    }

    /// When the oldest unconfirmed message was handed over.
    pub fn oldest(&self) -> Option<Instant> {
        self.out.first_key_value().map(|(_, out)| out.since)
    }

    pub fn push(&mut self, id: String, sender: T, publishing: Publishing) {
        let seq = self.next;
        self.next += 1;
        self.ids.insert(id.clone());
        self.out.insert(seq, Out { id, since: Instant::now(), sender });
        self.resolving.push(Box::pin(async move {
            let (written, result) = publishing.await;
            (seq, written, result)
        }));
    }

    /// The messages that have ended; pending while none has. Never ready with nothing.
    pub fn poll_done(&mut self, cx: &mut Context<'_>) -> Poll<Vec<Done<T>>> {
        let mut confirmed = Vec::new();
        let mut done = Vec::new();
        self.drain(cx, &mut confirmed, &mut done);
        for (out, carried, nacked) in confirmed {
            self.classify(out, carried, nacked, &mut done);
        }
        self.release_held(&mut done);
        for ended in &done {
            self.ids.remove(&ended.id);
        }
        if done.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(done)
    }

    pub async fn done(&mut self) -> Vec<Done<T>> {
        std::future::poll_fn(|cx| self.poll_done(cx)).await
    }

    /// Takes in every confirm that has resolved. Only when the set is seen at rest have all those been looked at that
    /// resolved before any of them, so nothing is classified earlier.
    fn drain(&mut self, cx: &mut Context<'_>, confirmed: &mut Vec<(Out<T>, Carried, bool)>, done: &mut Vec<Done<T>>) {
        let flag = Arc::new(Flag { woken: AtomicBool::new(false), outer: cx.waker().clone() });
        let waker = Waker::from(Arc::clone(&flag));
        let mut cx = Context::from_waker(&waker);
        loop {
            flag.woken.store(false, Ordering::SeqCst);
            match self.resolving.poll_next_unpin(&mut cx) {
                Poll::Ready(Some((seq, written, result))) => {
                    // Pushed together, removed together.
                    let Some(out) = self.out.remove(&seq) else { continue };
                    match result {
                        Ok(Confirmation::Ack(message)) => confirmed.push(self.took(out, message, false)),
                        Ok(Confirmation::Nack(message)) => confirmed.push(self.took(out, message, true)),
                        Ok(Confirmation::NotRequested) => done.push(ended(out.id, out.sender, Verdict::Unasked)),
                        Err(error) => {
                            self.broken.get_or_insert_with(|| error.clone());
                            let verdict = match written {
                                Written::Wholly => Verdict::Lost(error),
                                Written::No => Verdict::Unsent(error),
                            };
                            done.push(ended(out.id, out.sender, verdict));
                        }
                    }
                }
                Poll::Ready(None) => return,
                // It may also give up early and wake itself: then it is not at rest.
                Poll::Pending if flag.woken.load(Ordering::SeqCst) => {}
                Poll::Pending => return,
            }
        }
    }

    fn took(&mut self, out: Out<T>, message: Option<BasicReturnMessage>, nacked: bool) -> (Out<T>, Carried, bool) {
        let Some(message) = message else { return (out, Carried::Nothing, nacked) };
        let id = message.delivery.properties.message_id().as_ref().map(|id| id.as_str().to_string());
        let foreign = id.as_deref() != Some(out.id.as_str());
        if let Some(id) = id {
            let reason = format!("{} {}", message.reply_code, message.reply_text);
            self.returned.insert(id, reason);
        }
        (out, if foreign { Carried::Foreign } else { Carried::Own }, nacked)
    }

    fn classify(&mut self, out: Out<T>, carried: Carried, nacked: bool, done: &mut Vec<Done<T>>) {
        if mutant::is(Mutant::PairingTrusted) {
            let returned = || Verdict::Unroutable("returned with its confirm".into());
            let verdict = if carried == Carried::Nothing { settled(nacked) } else { returned() };
            done.push(ended(out.id, out.sender, verdict));
        } else if let Some(reason) = self.returned.remove(&out.id) {
            done.push(ended(out.id, out.sender, Verdict::Unroutable(reason)));
        } else if carried == Carried::Foreign {
            self.held.push(Held { id: out.id, sender: out.sender, barrier: self.next, nacked });
        } else {
            done.push(ended(out.id, out.sender, settled(nacked)));
        }
    }

    fn release_held(&mut self, done: &mut Vec<Done<T>>) {
        let oldest = self.out.first_key_value().map(|(seq, _)| *seq);
        for held in std::mem::take(&mut self.held) {
            if let Some(reason) = self.returned.remove(&held.id) {
                done.push(ended(held.id, held.sender, Verdict::Unroutable(reason)));
            } else if let Some(error) = &self.broken {
                done.push(ended(held.id, held.sender, Verdict::Lost(error.clone())));
            } else if oldest.is_none_or(|oldest| oldest >= held.barrier) {
                done.push(ended(held.id, held.sender, settled(held.nacked)));
            } else {
                self.held.push(held);
            }
        }
    }

    /// Gives up: what is still unknown now stays unknown.
    pub fn abandon(self) -> Vec<T> {
        let held = self.held.into_iter().map(|held| held.sender);
        self.out.into_values().map(|out| out.sender).chain(held).collect()
    }
}

/// What a confirm brought with it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carried {
    Nothing,
    Own,
    Foreign,
}

fn settled(nacked: bool) -> Verdict {
    if nacked { Verdict::Nacked } else { Verdict::Confirmed }
}

fn ended<T>(id: String, sender: T, verdict: Verdict) -> Done<T> {
    Done { id, sender, verdict }
}

/// Notices that something was woken meanwhile, and passes it on.
struct Flag {
    woken: AtomicBool,
    outer: Waker,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.outer.wake_by_ref();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use lapin::BasicProperties;
    use lapin::message::Delivery;
    use proptest::prelude::*;
    use tokio::sync::oneshot;

    use super::*;

    type Confirm = oneshot::Sender<lapin::Result<Confirmation>>;

    /// The client library as it is: returns wait in one line, and whichever confirm resolves next takes the first.
    #[derive(Default)]
    struct Library {
        waiting: VecDeque<usize>,
        confirms: HashMap<usize, Confirm>,
    }

    impl Library {
        fn publish(&mut self, window: &mut Window<usize>, n: usize) {
            let (confirm, resolved) = oneshot::channel();
            self.confirms.insert(n, confirm);
            let publishing = async move { (Written::Wholly, resolved.await.unwrap()) };
            window.push(id(n), n, Box::pin(publishing));
        }

        fn confirm(&mut self, n: usize) {
            let carried = self.waiting.pop_front().map(returned);
            self.confirms.remove(&n).unwrap().send(Ok(Confirmation::Ack(carried))).unwrap();
        }
    }

    fn id(n: usize) -> String {
        format!("m{n}:1")
    }

    fn returned(n: usize) -> BasicReturnMessage {
        let mut delivery = Delivery::mock(0, "".into(), "".into(), false, Vec::new());
        delivery.properties = BasicProperties::default().with_message_id(id(n).as_str().into());
        BasicReturnMessage { delivery, reply_code: 312, reply_text: "NO_ROUTE".into() }
    }

    fn poll(window: &mut Window<usize>, known: &mut HashMap<usize, Verdict>) {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(done) = window.poll_done(&mut cx) {
            assert!(!done.is_empty());
            for Done { sender, verdict, .. } in done {
                assert!(known.insert(sender, verdict).is_none(), "{sender} ended twice");
            }
        }
    }

    fn is_unroutable(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Unroutable(_))
    }

    #[test]
    fn a_confirm_that_took_anothers_return_is_held_until_its_own_is_seen() {
        let (mut window, mut library, mut known) = (Window::default(), Library::default(), HashMap::new());
        for n in 0..4 {
            library.publish(&mut window, n);
        }
        poll(&mut window, &mut known);
        library.waiting.extend([0, 1]);
        // The second is confirmed first, and takes the return of the first.
        library.confirm(1);
        poll(&mut window, &mut known);
        assert!(known.is_empty(), "{known:?}");
        library.confirm(0);
        poll(&mut window, &mut known);
        assert!(is_unroutable(&known[&0]) && is_unroutable(&known[&1]));
        // A routed one that took a return is released when everything that was out with it has resolved.
        library.publish(&mut window, 4);
        library.waiting.push_back(4);
        library.confirm(2);
        poll(&mut window, &mut known);
        assert_eq!(known.get(&2), None);
        library.confirm(4);
        poll(&mut window, &mut known);
        assert!(is_unroutable(&known[&4]), "told of by the other's confirm");
        assert_eq!(known.get(&2), None, "3 is still out");
        library.confirm(3);
        poll(&mut window, &mut known);
        assert_eq!((&known[&2], &known[&3]), (&Verdict::Confirmed, &Verdict::Confirmed));
        assert!(window.is_empty());
    }

    #[test]
    fn what_is_held_when_the_channel_dies_is_lost() {
        let (mut window, mut library, mut known) = (Window::default(), Library::default(), HashMap::new());
        for n in 0..3 {
            library.publish(&mut window, n);
        }
        library.waiting.push_back(0);
        library.confirm(1);
        poll(&mut window, &mut known);
        let dead = || lapin::Error::from(lapin::ErrorKind::MissingHeartbeatError);
        for n in [0, 2] {
            library.confirms.remove(&n).unwrap().send(Err(dead())).unwrap();
        }
        poll(&mut window, &mut known);
        assert!((0..3).all(|n| matches!(known[&n], Verdict::Lost(_))), "{known:?}");
    }

    proptest! {
        /// Whatever is routed, in whatever order confirms come and however they are batched: every message gets its own.
        #[test]
        fn nobody_is_given_anothers_fate(
            routed in proptest::collection::vec(any::<bool>(), 1..60),
            order in any::<prop::sample::Index>(),
            steps in proptest::collection::vec((0usize..4, any::<prop::sample::Index>()), 1..400),
        ) {
            let (mut window, mut library, mut known) = (Window::default(), Library::default(), HashMap::new());
            let (mut next, mut unreturned, mut unconfirmed) = (0, VecDeque::new(), Vec::new());
            let all = steps.into_iter().chain(std::iter::repeat_n((3, order), 4 * routed.len() + 8));
            for (step, pick) in all {
                match step {
                    0 if next < routed.len() => {
                        library.publish(&mut window, next);
                        if routed[next] { unconfirmed.push(next) } else { unreturned.push_back(next) }
                        next += 1;
                    }
                    // The broker returns a message before it confirms it, others in between.
                    1 => if let Some(n) = unreturned.pop_front() {
                        library.waiting.push_back(n);
                        unconfirmed.push(n);
                    },
                    2 => poll(&mut window, &mut known),
                    _ if !unconfirmed.is_empty() => {
                        let n = unconfirmed.swap_remove(pick.index(unconfirmed.len()));
                        library.confirm(n);
                    }
                    _ => if let Some(n) = unreturned.pop_front() {
                        library.waiting.push_back(n);
                        unconfirmed.push(n);
                    },
                }
            }
            poll(&mut window, &mut known);
            prop_assert_eq!((known.len(), window.len()), (next, 0));
            for (n, verdict) in known {
                prop_assert_eq!(is_unroutable(&verdict), !routed[n], "{}", n);
            }
        }
    }
}
