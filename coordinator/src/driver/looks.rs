//! Callers that only look at the run. They wait apart from calls that change it, share a look with all others
//! that wait, and are looked for at most once in [`LOOK_PAUSE`], and the less often the longer a look takes:
//! however many there are, what they cost the driver is bounded. Each sees what was true after it asked.

use std::{sync::Arc, time::Duration};

use coxswain_proto::limits::{LOOK_PAUSE, MAX_READS, MAX_WATCHERS, READ_SHARE};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::core::{machine::Machine, memory::RankMemory, status::Status, time::Timestamp};

/// What somebody wants to see.
pub enum Look {
    /// The run at this moment.
    Status(oneshot::Sender<Arc<Status>>),
    /// What ranks have reported of their memory.
    Memory(oneshot::Sender<Arc<Vec<RankMemory>>>),
}

/// The driver's end.
pub struct Looks {
    asked: mpsc::Receiver<Look>,
    waiting: Vec<Look>,
    /// Not before then.
    next: Option<Instant>,
}

impl Looks {
    /// As many as the services let in.
    const QUEUE: usize = MAX_READS.0 + MAX_WATCHERS.0;

    /// Both ends.
    pub fn new() -> (mpsc::Sender<Look>, Self) {
        let (ask, asked) = mpsc::channel(Self::QUEUE);
        (ask, Self { asked, waiting: Vec::new(), next: None })
    }

    /// Waits for somebody who wants to look; for ever when nobody can any more.
    pub async fn come(&mut self) {
        match self.asked.recv().await {
            Some(look) => self.waiting.push(look),
            None => std::future::pending().await,
        }
    }

    /// When to look for those who wait; not at all if nobody does.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| self.next.unwrap_or(now))
    }

    /// Answers those who wait, if it is time.
    pub fn answer(&mut self, now: Instant, machine: &mut Machine, at: Timestamp) {
        self.waiting.extend(std::iter::from_fn(|| self.asked.try_recv().ok()).take(Self::QUEUE));
        if self.due(now).is_none_or(|due| due > now) {
            return;
        }
        self.next = Some(now + LOOK_PAUSE);
        let (mut status, mut memory) = (None, None);
        for look in self.waiting.drain(..) {
            // Callers that have gone do not want their answers.
            match look {
                Look::Status(answer) if answer.is_closed() => {}
                Look::Status(answer) => {
                    let status = status.get_or_insert_with(|| Arc::new(machine.status(at)));
                    drop(answer.send(status.clone()));
                }
                Look::Memory(answer) => {
                    drop(answer.send(memory.get_or_insert_with(|| machine.memory()).clone()));
                }
            }
        }
    }

    /// A look that began then took so long: of the time until the next one it is a small part.
    pub fn rest(&mut self, began: Instant, took: Duration) {
        self.next = self.next.map(|next| next.max(began + took * READ_SHARE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{clock, core::tests::config};

    #[tokio::test]
    async fn between_two_looks_there_is_a_pause_and_the_first_is_at_once() {
        let (ask, mut looks) = Looks::new();
        let (mut machine, began) = (Machine::new(Timestamp::default(), config(1)), clock::monotonic());
        let mut answer_at = |now: Duration, look: Option<Look>| {
            look.into_iter().for_each(|look| ask.try_send(look).expect("there is room"));
            looks.answer(began + now, &mut machine, Timestamp::at(now));
            looks.due(began + now).map(|due| due - began)
        };
        let (first, second) = (oneshot::channel(), oneshot::channel());
        let (later, almost) = (Duration::from_millis(1), LOOK_PAUSE - Duration::from_millis(1));
        assert_eq!(answer_at(Duration::ZERO, Some(Look::Status(first.0))), None, "nobody waits any more");
        assert!(first.1.await.is_ok());
        assert_eq!(answer_at(later, Some(Look::Memory(second.0))), Some(LOOK_PAUSE));
        assert_eq!(answer_at(almost, None), Some(LOOK_PAUSE), "it waits");
        assert_eq!(answer_at(LOOK_PAUSE, None), None);
        assert!(second.1.await.is_ok());
    }

    #[tokio::test]
    async fn the_longer_a_look_takes_the_later_is_the_next() {
        let (ask, mut looks) = Looks::new();
        let (mut machine, began) = (Machine::new(Timestamp::default(), config(1)), clock::monotonic());
        let mut due_after = |took: Duration| {
            looks.next = None;
            ask.try_send(Look::Status(oneshot::channel().0)).expect("there is room");
            looks.answer(began, &mut machine, Timestamp::default());
            looks.rest(began, took);
            looks.next.map(|next| next - began)
        };
        assert_eq!(due_after(Duration::from_millis(1)), Some(LOOK_PAUSE));
        let long = Duration::from_millis(30);
        assert_eq!(due_after(long), Some(long * READ_SHARE));
    }
}
