//! Readers by the hundred, before the coordinator's real bounds: so many reads at once, a ration
//! of its processor, a look for all who look; a first call of each connection, then all of them in turns, and
//! more slowly from one that was refused. Some never take their answers.
//!
//! ```text
//! connections ──▶ Readers::enter ─ a place ──▶ Looks, answered together by the real machine
//!                       └───────── refused: the connection is read slowly
//! ```
//!
//! The coordinator has one processor here. Whatever it does for a call takes time there, one call after the
//! other, and the calls of workers and launchers wait in the same line.

use std::{sync::Arc, time::Duration};

use coxswain_coordinator::{
    core::status::Status,
    reads::{Look, Looks, Peer, Place, ReadCaller, ReadKind, Readers, Standings, monotonic},
};
use coxswain_identity::Caller as Known;
use coxswain_proto::limits::{GREETING, MAX_STREAMS, READ_PIECE, READ_TIMEOUT, REFUSED_PAUSE};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::world::{Happening, World};

/// Time of the processor for a read with its answer, for a refusal, for a worker's call, for a look at the
/// machine. Each is more than a release build takes.
const READ: Duration = Duration::from_micros(300);
const REFUSAL: Duration = Duration::from_micros(30);
const CALL: Duration = Duration::from_micros(100);
const LOOK: Duration = Duration::from_millis(1);
/// Between two connections that are opened.
const OPENS: Duration = Duration::from_millis(10);
/// Until the driver looks whether somebody has come to look.
const IDLE: Duration = Duration::from_millis(10);
/// Bytes of a call that asks for nothing in particular.
const CALL_BYTES: usize = 64;
/// A call of a worker may wait so long because of those who only read.
const PROMPT: Duration = Duration::from_millis(250);
/// Tokens that the readers have among them.
const TOKENS: usize = 3;

/// All readers, and what the coordinator has for them.
pub struct Flood {
    begin: Instant,
    readers: Readers,
    looks: Looks,
    ask: mpsc::Sender<Look>,
    connections: Vec<Connection>,
    until: Duration,
    /// Until then the processor has something to do.
    busy_until: Duration,
    /// Until then others have their turn to be read.
    turns_until: Duration,
    told: FloodSummary,
}

/// What is told at its end.
#[derive(Clone, Copy, Default)]
struct FloodSummary {
    answered: u64,
    refused: u64,
    longest: Duration,
}

/// A client with as many streams as it may have.
struct Connection {
    reader: ReadCaller,
    kind: ReadKind,
    takes_answers: bool,
    has_greeted: bool,
    reads: Vec<PendingRead>,
}

/// A read that was let in.
struct PendingRead {
    _place: Place,
    answer: Option<oneshot::Receiver<Arc<Status>>>,
    since: Duration,
}

impl Connection {
    fn new(number: usize) -> Self {
        let known = Known { address: None, is_private: true, granted: Vec::new() };
        let peer = Some(Arc::new(Peer::new(known, Standings::default().enter())));
        let kinds = [ReadKind::Look, ReadKind::Records, ReadKind::Look, ReadKind::Watch];
        Self {
            reader: ReadCaller { caller: (number % TOKENS) as u64, is_launcher: false, peer },
            kind: kinds[number % kinds.len()],
            takes_answers: !number.is_multiple_of(5),
            has_greeted: false,
            reads: Vec::new(),
        }
    }

    /// Answers that have come are taken, or lie there until their time is over; the number of those taken.
    fn take_answers(&mut self, now: Duration) -> u64 {
        let (kind, takes_answers) = (self.kind, self.takes_answers);
        let before = self.reads.len();
        self.reads.retain_mut(|read| {
            let has_come = read.answer.as_mut().is_none_or(|answer| answer.try_recv().is_ok());
            let is_over = now >= read.since + READ_TIMEOUT;
            kind == ReadKind::Watch || !(has_come && takes_answers || is_over)
        });
        (before - self.reads.len()) as u64
    }
}

impl Flood {
    fn new(connections: usize, until: Duration) -> Self {
        let (ask, looks) = Looks::new();
        Self {
            begin: monotonic(),
            readers: Readers::default(),
            looks,
            ask,
            connections: (0..connections).map(Connection::new).collect(),
            until,
            busy_until: Duration::ZERO,
            turns_until: Duration::ZERO,
            told: FloodSummary::default(),
        }
    }

    /// The processor does something more; when that is done.
    fn work(&mut self, now: Duration, takes: Duration) -> Duration {
        self.busy_until = self.busy_until.max(now) + takes;
        self.busy_until
    }

    /// What a connection sends is read, a first call or a piece; after how long it is read again. An error if
    /// more were let in than the driver has room for.
    fn serve(&mut self, number: usize, now: Duration) -> Result<Duration, String> {
        let at = self.begin + now;
        let answered = self.connections[number].take_answers(now);
        self.told.answered += answered;
        let reader = self.connections[number].reader.clone();
        let is_slow = reader.peer.as_ref().is_some_and(|peer| peer.was_refused(at));
        let streams = MAX_STREAMS as usize - self.connections[number].reads.len();
        let has_greeted = std::mem::replace(&mut self.connections[number].has_greeted, true);
        let (piece, time) = READ_PIECE;
        let bytes = if has_greeted { piece } else { GREETING };
        for _ in 0..streams.min(bytes / CALL_BYTES) {
            let kind = self.connections[number].kind;
            let Ok(place) = self.readers.enter(at, kind, reader.clone()) else {
                self.told.refused += 1;
                self.work(now, REFUSAL);
                continue;
            };
            place.spend(at, READ);
            let done = self.work(now, READ);
            let answer = match kind {
                ReadKind::Look => {
                    let (reply, answer) = oneshot::channel();
                    let asked = self.ask.try_send(Look::Status(reply));
                    asked.map_err(|_| "more look than have a place in the driver's queue".to_owned())?;
                    Some(answer)
                }
                ReadKind::Records | ReadKind::Watch => None,
            };
            self.connections[number].reads.push(PendingRead { _place: place, answer, since: done });
        }
        self.turns_until = self.turns_until.max(now) + time;
        Ok(self.turns_until - now + if is_slow { REFUSED_PAUSE } else { Duration::ZERO })
    }
}

impl World {
    /// So many connections are opened by those who only read.
    pub fn flood(&mut self, connections: usize, for_time: Duration) {
        if self.flood.is_some() || !self.coordinator.lives() {
            return;
        }
        self.flood = Some(Flood::new(connections, self.now + for_time));
        for number in 0..connections {
            self.after(OPENS * number as u32, Happening::Read(number));
        }
        self.after(Duration::ZERO, Happening::LookForReaders);
    }

    /// A connection of readers has sent something.
    pub fn read(&mut self, number: usize) {
        let now = self.now;
        let Some(flood) = self.flood.as_mut().filter(|flood| number < flood.connections.len()) else {
            return;
        };
        match flood.serve(number, now) {
            Ok(again) => self.after(again, Happening::Read(number)),
            Err(problem) => self.checker.violated(now, problem),
        }
    }

    /// The driver looks for those who wait for that, until they go, or it dies.
    pub fn look_for_readers(&mut self) {
        let (now, lives) = (self.now, self.coordinator.lives());
        let Some(flood) = self.flood.as_mut() else { return };
        if now >= flood.until || !lives {
            let FloodSummary { answered, refused, longest } = flood.told;
            let waited = longest.as_secs_f64() * 1e3;
            self.flood = None;
            return self.checker.says(
                now,
                format!("readers go: {answered} answered, {refused} refused; a worker's call waited {waited:.1} ms at most"),
            );
        }
        let at = flood.begin + now;
        if self.coordinator.shows(now, |machine, time| flood.looks.answer(at, machine, time)) {
            flood.work(now, LOOK);
        }
        let again = flood.looks.due(at).map_or(IDLE, |due| due.duration_since(at).max(LOOK));
        self.after(again, Happening::LookForReaders);
    }

    /// A call of a worker or a launcher waits before it is heard; none while nobody floods the coordinator.
    pub fn wait(&mut self) -> Duration {
        let now = self.now;
        let Some(flood) = &mut self.flood else { return Duration::ZERO };
        let waits = flood.work(now, CALL) - now;
        flood.told.longest = flood.told.longest.max(waits);
        if waits > PROMPT {
            let problem =
                format!("a worker's call waits {:.3} s behind those who only read", waits.as_secs_f64());
            self.checker.violated(now, problem);
        }
        waits
    }
}
