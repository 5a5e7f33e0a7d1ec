//! Lines as the driver has them: the ends into which it says what workers and launchers are told.
//!
//! A worker has a line of its own, or one on its launcher's stream, which it shares with the other workers
//! of its node. What several of them are told alike, one after the other, goes down the stream once.
//!
//! A full line belongs to a client that does not read: it is closed, and will be replayed when opened again.
//! A stream that is full is broken off with all of its lines.

use std::{collections::HashMap, sync::Arc};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::core::{action::Directive, event::StreamId, roster::Respawn};

/// One thing that goes down a launcher's stream.
#[derive(Debug)]
pub enum Notice {
    /// What the workers of these lines are told; nothing if the lines are closed.
    Lines(Vec<u64>, Option<Directive>),
    /// What the launcher itself is told.
    Order(Respawn),
}

/// A launcher's stream, down which its workers' lines go, too.
#[derive(Debug)]
pub struct NodePipe {
    told: mpsc::Sender<Notice>,
    broken: CancellationToken,
}

impl NodePipe {
    /// The stream whose other end receives what is told; `broken` is cancelled where it does not read.
    pub fn new(told: mpsc::Sender<Notice>, broken: CancellationToken) -> Self {
        Self { told, broken }
    }

    fn say(&self, told: Notice) {
        if self.told.try_send(told).is_err() {
            self.broken.cancel();
        }
    }
}

/// A worker's line.
pub enum WorkerLine {
    /// Own.
    Own(mpsc::Sender<Directive>),
    /// On its launcher's stream, where it has this number.
    On(Arc<NodePipe>, u64),
}

/// A launcher's line.
pub enum NodeLine {
    /// It speaks for itself alone.
    Own(mpsc::Sender<Respawn>),
    /// It speaks for its workers, too.
    Shared(Arc<NodePipe>),
}

/// All that are open.
#[derive(Default)]
pub struct Lines {
    workers: HashMap<StreamId, WorkerLine>,
    nodes: HashMap<StreamId, NodeLine>,
    /// What is being said down a shared stream, for as long as the same goes to more of its lines.
    saying: Option<Saying>,
}

struct Saying {
    to: Arc<NodePipe>,
    lines: Vec<u64>,
    directive: Directive,
}

impl Lines {
    /// A worker's line is open.
    pub fn of_worker(&mut self, stream: StreamId, line: WorkerLine) {
        self.workers.insert(stream, line);
    }

    /// A launcher's line is.
    pub fn of_node(&mut self, stream: StreamId, line: NodeLine) {
        self.nodes.insert(stream, line);
    }

    /// Tells a worker. What is not told at once is with the next [`Lines::flush`].
    pub fn tell(&mut self, stream: StreamId, directive: Directive) {
        match self.workers.get(&stream) {
            None => {}
            Some(WorkerLine::Own(line)) => {
                let told = line.try_send(directive);
                if told.is_err() {
                    self.workers.remove(&stream);
                }
            }
            Some(WorkerLine::On(to, number)) => {
                if let Some(saying) = &mut self.saying
                    && Arc::ptr_eq(&saying.to, to)
                    && saying.directive == directive
                {
                    return saying.lines.push(*number);
                }
                let saying = Saying { to: to.clone(), lines: vec![*number], directive };
                if let Some(before) = self.saying.replace(saying) {
                    before.to.say(Notice::Lines(before.lines, Some(before.directive)));
                }
            }
        }
    }

    /// Tells a launcher.
    pub fn tell_node(&mut self, stream: StreamId, respawn: Respawn) {
        match self.nodes.get(&stream) {
            None => {}
            Some(NodeLine::Own(line)) => {
                let told = line.try_send(respawn);
                if told.is_err() {
                    self.nodes.remove(&stream);
                }
            }
            Some(NodeLine::Shared(to)) => to.say(Notice::Order(respawn)),
        }
    }

    /// All that was to be told is.
    pub fn flush(&mut self) {
        if let Some(Saying { to, lines, directive }) = self.saying.take() {
            to.say(Notice::Lines(lines, Some(directive)));
        }
    }

    /// Ends a line, which its owner hears.
    pub fn close(&mut self, stream: StreamId) {
        self.flush();
        if let Some(WorkerLine::On(to, number)) = self.workers.remove(&stream) {
            to.say(Notice::Lines(vec![number], None));
        }
        self.nodes.remove(&stream);
    }

    /// A line that its owner has closed, or never got.
    pub fn forget(&mut self, stream: StreamId) {
        self.workers.remove(&stream);
        self.nodes.remove(&stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_workers_of_a_node_are_told_alike_goes_down_once() {
        let stream = |queue| {
            let (told, heard) = mpsc::channel(queue);
            let broken = CancellationToken::new();
            (Arc::new(NodePipe::new(told, broken.clone())), heard, broken)
        };
        let ((first, mut heard, _), (second, mut other, broken)) = (stream(8), stream(1));
        let mut lines = Lines::default();
        for number in 0..3 {
            lines.of_worker(StreamId(number), WorkerLine::On(first.clone(), number));
        }
        lines.of_worker(StreamId(9), WorkerLine::On(second, 1));
        for stream in [0, 1, 2, 9] {
            lines.tell(StreamId(stream), Directive::Pause);
        }
        lines.tell(StreamId(0), Directive::Checkpoint(1));
        lines.close(StreamId(1));
        lines.tell(StreamId(1), Directive::Resume);
        lines.tell(StreamId(9), Directive::Resume);
        lines.flush();
        let mut of_first = || heard.try_recv().ok();
        assert!(matches!(of_first(), Some(Notice::Lines(to, Some(Directive::Pause))) if to == [0, 1, 2]));
        assert!(matches!(of_first(), Some(Notice::Lines(to, Some(Directive::Checkpoint(1)))) if to == [0]));
        assert!(matches!(of_first(), Some(Notice::Lines(to, None)) if to == [1]));
        assert!(of_first().is_none());
        assert!(matches!(other.try_recv(), Ok(Notice::Lines(to, Some(Directive::Pause))) if to == [1]));
        assert!(broken.is_cancelled(), "it did not read, and a worker of it would have missed something");
    }
}
