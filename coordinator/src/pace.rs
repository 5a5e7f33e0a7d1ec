//! How fast a connection is read. Who asks without a pause waits, instead of costing the run the time to say
//! no, or to find out that it asks for nothing at all:
//!
//! | a connection | is read |
//! |---|---|
//! | on which a call was let in that does more than look | as it comes |
//! | any other one, up to `GREETING` | as it comes |
//! | any other one, from there on | a piece at a time, in turns with all others |
//! | on which a read was refused a moment ago | so, with a pause after each piece |

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use coxswain_identity::Caller;
use coxswain_proto::limits::{
    GREETING, MAX_READS_OF_CONNECTION, READ_PIECE, REFUSAL_REMEMBERED, REFUSED_PAUSE,
};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use crate::{clock, standing::Attendance};

/// Until which a connection is not read.
pub type Pause = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The turns of all connections that may only look, or may nothing: one at a time, first come first served.
/// Clones share them.
#[derive(Clone, Debug)]
pub struct ReaderQueue(Arc<Semaphore>);

impl Default for ReaderQueue {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl ReaderQueue {
    /// The turn of a connection that has said so much. One that goes meanwhile waits no more.
    async fn wait(&self, bytes: usize) {
        let (piece, time) = READ_PIECE;
        let _place = self.0.acquire().await;
        sleep(time.mul_f64(bytes as f64 / piece as f64)).await;
    }
}

/// What is known of a connection, shared by its calls.
#[derive(Debug)]
pub struct Peer {
    /// Who has called.
    pub caller: Caller,
    /// Place among all connections.
    pub attendance: Attendance,
    /// Bytes that it has said while it was not trusted.
    received: AtomicUsize,
    reads: AtomicUsize,
    refused: Mutex<Option<Instant>>,
}

impl Peer {
    /// A peer on a connection that was just accepted.
    pub fn new(caller: Caller, attendance: Attendance) -> Self {
        let (received, reads) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { caller, attendance, received, reads, refused: Mutex::new(None) }
    }

    /// Whether it is read as it comes.
    pub fn is_trusted(&self, now: Instant) -> bool {
        self.attendance.is_member() && !self.was_refused(now)
    }

    /// What to wait for when so many bytes of it have been read, before there may be more.
    pub fn pause_after(self: &Arc<Self>, bytes: usize, queue: &ReaderQueue) -> Option<Pause> {
        let received = self.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let was_refused = self.was_refused(clock::monotonic());
        if received <= GREETING && !was_refused {
            return None;
        }
        let (ours, queue) = (self.clone(), queue.clone());
        Some(Box::pin(async move {
            tokio::select! {
                () = ours.attendance.joined() => {}
                () = queue.wait(bytes) => {}
            }
            if was_refused {
                sleep(REFUSED_PAUSE).await;
            }
        }))
    }

    /// One more read, unless there are as many as may be.
    pub fn begin_read(&self) -> bool {
        let more = |reads| (reads < MAX_READS_OF_CONNECTION).then_some(reads + 1);
        self.reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// One less.
    pub fn end_read(&self) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// A read was refused.
    pub fn refuse(&self, now: Instant) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// Whether one was refused a moment ago.
    pub fn was_refused(&self, now: Instant) -> bool {
        let refused = *self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.is_some_and(|at| now.duration_since(at) < REFUSAL_REMEMBERED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standing::{Standing, Standings};

    fn peer() -> Arc<Peer> {
        let caller = Caller { address: None, is_private: true, granted: Vec::new() };
        Arc::new(Peer::new(caller, Standings::default().enter()))
    }

    #[tokio::test]
    async fn all_who_may_only_look_are_read_in_turns_however_many_they_are() {
        const PEERS: usize = 8;
        let (piece, time) = READ_PIECE;
        let (queue, began) = (ReaderQueue::default(), Instant::now());
        let peers: Vec<_> = (0..PEERS).map(|_| peer()).collect();
        for peer in &peers {
            assert!(peer.pause_after(GREETING, &queue).is_none(), "a first call is heard at once");
        }
        let wait = |peer: &Arc<Peer>| tokio::spawn(peer.pause_after(piece, &queue).expect("a turn"));
        for wait in peers.iter().map(wait).collect::<Vec<_>>() {
            wait.await.expect("it ends");
        }
        assert!(began.elapsed() >= time * PEERS as u32, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn who_shows_that_it_may_do_more_waits_for_no_turn() {
        let (queue, reader, worker) = (ReaderQueue::default(), peer(), peer());
        // Minutes of them.
        let crowd = tokio::spawn(peer().pause_after(1 << 21, &queue).expect("a turn"));
        tokio::task::yield_now().await;
        let pause = worker.pause_after(GREETING + 1, &queue).expect("it has shown nothing yet");
        let pause = tokio::spawn(pause);
        tokio::task::yield_now().await;
        worker.attendance.rise(Standing::Member);
        tokio::time::timeout(std::time::Duration::from_secs(60), pause)
            .await
            .expect("it does not wait")
            .expect("it ends");
        crowd.abort();
        reader.attendance.rise(Standing::Reader);
        let now = Instant::now();
        assert!(worker.is_trusted(now) && !reader.is_trusted(now));
        worker.refuse(now);
        assert!(!worker.is_trusted(now), "its reads were refused");
    }
}
