//! Which connections make room for others. Where there is none for the next one, the oldest is ended of those
//! that have made no call yet, or of those that have only read, whichever are more: neither who says nothing
//! nor who may only look keeps a worker out, and who comes has time to say who it is.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What a connection has shown of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// No call that it may make.
    Stranger,
    /// A call that proves it may read.
    Reader,
    /// A call that proves it may do more: it makes room for nobody.
    Member,
}

/// All connections that may have to make room. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Standings(Arc<Hall>);

#[derive(Debug, Default)]
struct Hall {
    crowd: Mutex<Crowd>,
    /// One has gone.
    gone: Notify,
}

#[derive(Debug, Default)]
struct Crowd {
    next: u64,
    /// Each with its end, the oldest first.
    strangers: BTreeMap<u64, CancellationToken>,
    readers: BTreeMap<u64, CancellationToken>,
}

impl Crowd {
    /// The one that is to make room, if there is one.
    fn pop(&mut self) -> Option<CancellationToken> {
        let larger = match self.readers.len() > self.strangers.len() {
            true => &mut self.readers,
            false => &mut self.strangers,
        };
        larger.pop_first().map(|(_, end)| end)
    }
}

/// One connection; given up when it is dropped.
#[derive(Debug)]
pub struct Attendance {
    standings: Standings,
    number: u64,
    standing: Mutex<Standing>,
    /// It has become a member.
    joined: Notify,
    end: CancellationToken,
}

impl Standings {
    /// A stranger has come.
    pub fn enter(&self) -> Attendance {
        let mut crowd = self.crowd();
        let (number, end) = (crowd.next, CancellationToken::new());
        crowd.next += 1;
        crowd.strangers.insert(number, end.clone());
        let (standing, joined) = (Mutex::new(Standing::Stranger), Notify::new());
        Attendance { standings: self.clone(), number, standing, joined, end }
    }

    /// Tells the one that is to make room to end, and waits until one has gone, for `patience` at most.
    pub async fn make_room(&self, patience: Duration) {
        // Hears of those that go from here on.
        let gone = self.0.gone.notified();
        let end = self.crowd().pop();
        end.iter().for_each(CancellationToken::cancel);
        let _ = tokio::time::timeout(patience, gone).await;
    }

    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.0.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attendance {
    /// It has shown this; what it has shown before stays.
    pub fn rise(&self, shown: Standing) {
        let mut standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        if shown <= *standing {
            return;
        }
        *standing = shown;
        let mut crowd = self.standings.crowd();
        let end = self.leave(&mut crowd);
        if shown == Standing::Reader {
            crowd.readers.extend(end.map(|end| (self.number, end)));
        } else {
            self.joined.notify_waiters();
        }
    }

    /// Whether it is a member.
    pub fn is_member(&self) -> bool {
        self.standing() == Standing::Member
    }

    /// Waits until it is one.
    pub async fn joined(&self) {
        let joined = self.joined.notified();
        if !self.is_member() {
            joined.await;
        }
    }

    /// End, unless it makes room already.
    fn leave(&self, crowd: &mut Crowd) -> Option<CancellationToken> {
        crowd.strangers.remove(&self.number).or_else(|| crowd.readers.remove(&self.number))
    }

    /// Ends when the connection has to: it makes room for another one, or has shown nothing in `patience`.
    pub async fn ended(&self, patience: Duration) {
        let in_time = tokio::time::timeout(patience, self.end.cancelled()).await.is_ok();
        if !in_time && self.standing() > Standing::Stranger {
            self.end.cancelled().await;
        }
    }

    fn standing(&self) -> Standing {
        *self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.leave(&mut self.standings.crowd());
        self.standings.0.gone.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_of_the_larger_crowd_makes_room_and_who_works_never_does() {
        let standings = Standings::default();
        let all: Vec<_> = (0..7).map(|_| standings.enter()).collect();
        [0, 5].iter().for_each(|at: &usize| all[*at].rise(Standing::Member));
        [1, 2, 4, 5].iter().for_each(|at: &usize| all[*at].rise(Standing::Reader));
        // Three readers and two strangers.
        for expected in [&[1][..], &[1, 3], &[1, 2, 3], &[1, 2, 3, 6], &[1, 2, 3, 4, 6], &[1, 2, 3, 4, 6]] {
            standings.make_room(Duration::ZERO).await;
            let ended: Vec<_> = (0..7).filter(|at| all[*at].end.is_cancelled()).collect();
            assert_eq!(ended, expected);
        }
        let late = standings.enter();
        drop(all);
        late.rise(Standing::Reader);
        assert_eq!(standings.crowd().readers.len(), 1);
        drop(late);
        assert!(standings.crowd().readers.is_empty() && standings.crowd().strangers.is_empty());
    }
}
