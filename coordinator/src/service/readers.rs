//! How many may read at once, and for how long: of everybody, of one caller, on one connection. What is over
//! a bound is refused with a time to wait, and the connection it came on is read slowly for a while.
//!
//! | what is read | at once |
//! |---|---|
//! | status, memory, metrics, reflection | `MAX_READS` |
//! | ledger, history | `MAX_RECORD_READS` |
//! | events, health's `Watch` | `MAX_WATCHERS`; launchers are let in all the same |
//!
//! What a caller's reads take of a processor is measured while they are answered, and rationed.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use coxswain_proto::{
    calls::PUSHBACK,
    limits::{
        MAX_READS, MAX_READS_OF_CONNECTION, MAX_RECORD_READS, MAX_WATCHERS, NO_ROOM_PAUSE, READ_PAUSE,
        READ_TIMEOUT,
    },
};
use http_body::Frame;
use tokio::time::{Instant, Sleep};
use tonic::{Status, metadata::MetadataValue};

use crate::{clock, pace::Peer, ration::Ration};

/// Callers of whom something is remembered, before those of whom nothing needs to be are forgotten.
const CALLERS: usize = 256;
/// An answer is handed to its connection in pieces of so many bytes at most: what the other side does not
/// take stays with its place, and is not copied.
const PIECE: usize = 16 << 10;

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadKind {
    /// The run at this moment, and what can be asked of it.
    Look,
    /// What the journal has.
    Records,
    /// A stream without an end.
    Watch,
}

impl ReadKind {
    /// How many at once: of everybody, and of one caller.
    const fn most(self) -> (usize, usize) {
        match self {
            Self::Look => MAX_READS,
            Self::Records => MAX_RECORD_READS,
            Self::Watch => MAX_WATCHERS,
        }
    }
}

/// Who reads.
#[derive(Clone)]
pub struct ReadCaller {
    /// A number for the caller, the same for all calls with one token.
    pub caller: u64,
    /// It may start and end workers.
    pub is_launcher: bool,
    /// The caller's connection.
    pub peer: Option<Arc<Peer>>,
}

/// All who read now. Clones share it.
#[derive(Clone)]
pub struct Readers {
    counts: Arc<Mutex<ReadCounts>>,
    /// For the rest of a request, and for its answer to be taken.
    patience: Duration,
}

#[derive(Default)]
struct ReadCounts {
    /// By kind.
    reads: [usize; 3],
    callers: HashMap<u64, CallerCounts>,
    /// Since the last line about it.
    refused: u64,
    told: Option<Instant>,
}

struct CallerCounts {
    reads: [usize; 3],
    ration: Ration,
}

/// A place among those who read; given back when it is dropped.
pub struct Place {
    readers: Readers,
    kind: ReadKind,
    reader: ReadCaller,
}

impl Default for Readers {
    fn default() -> Self {
        Self::with(READ_TIMEOUT)
    }
}

impl Readers {
    /// Nobody yet.
    pub fn with(patience: Duration) -> Self {
        Self { counts: Arc::default(), patience }
    }

    /// Answers a read, or refuses it.
    pub async fn serve(&self, kind: ReadKind, reader: ReadCaller, request: Request, next: Next) -> Response {
        let is_metrics = request.uri().path() == super::metrics::METRICS;
        let place = match self.enter(clock::monotonic(), kind, reader) {
            Ok(place) => place,
            Err(wait) => return refusal(wait, is_metrics),
        };
        let mut answered = Box::pin(next.run(request));
        let answered = std::future::poll_fn(|context| place.measure(|| answered.as_mut().poll(context)));
        match tokio::time::timeout(self.patience, answered).await {
            Ok(response) => response.map(|body| Body::new(BoundedBody::new(body, place))),
            Err(_) => {
                let limit = self.patience.as_secs();
                Status::deadline_exceeded(format!("the request was not complete within {limit} s"))
                    .into_http()
            }
        }
    }

    /// A place, or how long to wait for one.
    pub fn enter(&self, now: Instant, kind: ReadKind, reader: ReadCaller) -> Result<Place, Duration> {
        let mut counts = self.counts();
        if counts.callers.len() > CALLERS {
            counts.callers.retain(|_, of| of.reads != [0; 3] || !of.ration.is_full(now));
        }
        let of_all = counts.reads[kind as usize];
        let caller = counts.callers.entry(reader.caller).or_insert_with(|| CallerCounts::new(now));
        let (most, most_of_caller) = kind.most();
        let has_room = of_all < most && caller.reads[kind as usize] < most_of_caller;
        let wait = caller.ration.wait(now);
        let is_let_in = kind == ReadKind::Watch && reader.is_launcher || has_room && wait.is_zero();
        if is_let_in && reader.peer.as_ref().is_none_or(|peer| peer.begin_read()) {
            caller.reads[kind as usize] += 1;
            counts.reads[kind as usize] += 1;
            drop(counts);
            return Ok(Place { readers: self.clone(), kind, reader });
        }
        counts.tell(now, &reader);
        if let Some(peer) = &reader.peer {
            peer.refuse(now);
        }
        Err(wait.max(READ_PAUSE))
    }

    fn counts(&self) -> MutexGuard<'_, ReadCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadCounts {
    /// Counts a refusal, and says so at most once a minute.
    fn tell(&mut self, now: Instant, reader: &ReadCaller) {
        self.refused += 1;
        if self.told.is_some_and(|told| now.duration_since(told) < NO_ROOM_PAUSE) {
            return;
        }
        let address = reader.peer.as_ref().and_then(|peer| peer.caller.address);
        let from = address.map_or_else(|| "an unknown address".to_owned(), |address| address.to_string());
        let count = std::mem::take(&mut self.refused);
        self.told = Some(now);
        tracing::warn!(
            target: "coxswain::run", from, count,
            "read calls refused since the last such line: {count}, the last one from {from}; the limit is {} \
             at once per token, {MAX_READS_OF_CONNECTION} per connection; the run is not affected",
            MAX_READS.1
        );
    }
}

impl CallerCounts {
    fn new(now: Instant) -> Self {
        Self { reads: [0; 3], ration: Ration::full(now) }
    }
}

impl Place {
    /// Does a part of the work, at the cost of the caller's ration.
    fn measure<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = clock::monotonic();
        let done = work();
        let now = clock::monotonic();
        self.spend(now, now.duration_since(began));
        done
    }

    /// A part of the work took so long; events are at no launcher's cost.
    pub fn spend(&self, now: Instant, time: Duration) {
        if !(self.kind == ReadKind::Watch && self.reader.is_launcher)
            && let Some(caller) = self.readers.counts().callers.get_mut(&self.reader.caller)
        {
            caller.ration.spend(now, time);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.readers.counts();
        counts.reads[self.kind as usize] -= 1;
        if let Some(caller) = counts.callers.get_mut(&self.reader.caller) {
            caller.reads[self.kind as usize] -= 1;
        }
        drop(counts);
        if let Some(peer) = &self.reader.peer {
            peer.end_read();
        }
    }
}

/// What is said to a reader that is over a bound: in the words of gRPC, or of HTTP.
fn refusal(wait: Duration, is_metrics: bool) -> Response {
    let seconds = wait.as_millis().div_ceil(1000);
    let why = format!("too many concurrent reads from one caller: retry in {seconds} s");
    if is_metrics {
        let headers = [(header::RETRY_AFTER, seconds.to_string())];
        return (StatusCode::TOO_MANY_REQUESTS, headers, format!("{why}\n")).into_response();
    }
    let mut status = Status::resource_exhausted(why);
    for (name, value) in [("retry-after", seconds), (PUSHBACK, wait.as_millis())] {
        let value = MetadataValue::try_from(value.to_string()).expect("digits are a value");
        status.metadata_mut().insert(name, value);
    }
    status.into_http()
}

/// The body of an answer. Its place is held until it is taken, or until the time for that is over.
struct BoundedBody {
    body: Body,
    rest: Bytes,
    /// None for streams without an end.
    deadline: Option<Pin<Box<Sleep>>>,
    place: Place,
}

impl BoundedBody {
    fn new(body: Body, place: Place) -> Self {
        let is_bounded = place.kind != ReadKind::Watch;
        let deadline = is_bounded.then(|| Box::pin(tokio::time::sleep(place.readers.patience)));
        Self { body, rest: Bytes::new(), deadline, place }
    }

    fn piece(&mut self) -> Frame<Bytes> {
        let size = self.rest.len().min(PIECE);
        Frame::data(self.rest.split_to(size))
    }
}

impl HttpBody for BoundedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Some(Err(axum::Error::new("the client did not read the answer in time"))));
        }
        if !this.rest.is_empty() {
            return Poll::Ready(Some(Ok(this.piece())));
        }
        let (place, body) = (&this.place, &mut this.body);
        match ready!(place.measure(|| Pin::new(body).poll_frame(context))) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(match frame.into_data() {
                Ok(data) => {
                    this.rest = data;
                    this.piece()
                }
                Err(trailers) => trailers,
            }))),
            other => Poll::Ready(other),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use coxswain_identity::Caller;

    use super::*;
    use crate::standing::Standings;

    fn reader(caller: u64, is_launcher: bool) -> ReadCaller {
        let from = Caller { address: None, is_private: true, granted: Vec::new() };
        ReadCaller {
            caller,
            is_launcher,
            peer: Some(Arc::new(Peer::new(from, Standings::default().enter()))),
        }
    }

    /// As many places as one gets, each on a connection of its own unless `peer` is one.
    fn all_of(readers: &Readers, kind: ReadKind, of: impl Fn() -> ReadCaller) -> Vec<Place> {
        std::iter::from_fn(|| readers.enter(clock::monotonic(), kind, of()).ok()).take(1000).collect()
    }

    #[test]
    fn a_caller_has_so_many_places_and_others_have_theirs() {
        let readers = Readers::default();
        for kind in [ReadKind::Look, ReadKind::Records, ReadKind::Watch] {
            let (most, most_of_caller) = kind.most();
            let one = all_of(&readers, kind, || reader(1, false));
            assert_eq!(one.len(), most_of_caller, "{kind:?}");
            let other = all_of(&readers, kind, || reader(2, false));
            assert_eq!(other.len(), most - most_of_caller, "{kind:?}");
            drop(one);
            assert_eq!(all_of(&readers, kind, || reader(1, false)).len(), most_of_caller, "given back");
        }
        assert_eq!(readers.counts().reads, [0; 3]);
    }

    #[test]
    fn a_connection_has_so_many_and_is_read_slowly_once_it_was_refused() {
        let (readers, one) = (Readers::default(), reader(1, false));
        assert_eq!(all_of(&readers, ReadKind::Watch, || one.clone()).len(), MAX_READS_OF_CONNECTION);
        assert!(one.peer.is_some_and(|peer| peer.was_refused(clock::monotonic())));
        assert!(
            !reader(1, false).peer.is_some_and(|peer| peer.was_refused(clock::monotonic())),
            "another one is not"
        );
    }

    #[test]
    fn launchers_follow_events_however_many_they_are() {
        let readers = Readers::default();
        let _crowd = all_of(&readers, ReadKind::Watch, || reader(1, false));
        assert_eq!(all_of(&readers, ReadKind::Watch, || reader(2, true)).len(), 1000);
    }

    #[test]
    fn a_ration_that_is_used_up_says_how_long_to_wait() {
        let readers = Readers::default();
        let Ok(place) = readers.enter(clock::monotonic(), ReadKind::Look, reader(1, false)) else {
            panic!("there is room")
        };
        let (now, much) = (clock::monotonic(), Duration::from_secs(3));
        readers.counts().callers.get_mut(&1).expect("it reads").ration.spend(now, much);
        drop(place);
        let wait = readers
            .enter(clock::monotonic(), ReadKind::Look, reader(1, false))
            .err()
            .expect("it has used too much");
        assert!(wait > Duration::from_secs(15), "{wait:?}");
        assert!(
            readers.enter(clock::monotonic(), ReadKind::Look, reader(2, false)).is_ok(),
            "others have their own"
        );
        let refused = refusal(wait, false);
        assert!(refused.headers().contains_key("retry-after"));
        assert_eq!(refusal(wait, true).status(), StatusCode::TOO_MANY_REQUESTS);
    }
}
