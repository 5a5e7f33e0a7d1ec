//! What is shown, on a thread of its own: a caller that has something to show never waits for a screen that
//! does not take it.
//!
//! A terminal that was stopped with Ctrl-S, a pager that is not scrolled, a container's log driver that
//! hangs: each makes `write(2)` wait, and the thread that writes there stands still, with all that depends on
//! it. So pieces go through a bounded queue. What finds it full is dropped and counted, and the count is
//! shown when there is room again; files keep everything. Only a process that ends waits:
//! [`ConsoleWriter::flush`] gives the screen a moment to take what is left.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread,
    time::Duration,
};

use coxswain_proto::{
    limits::{CONSOLE_PATIENCE, CONSOLE_QUEUE},
    v1::WatchEvent,
};

use super::console_mode::Mode;
use crate::clock;

/// Something to show.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// A line, to be folded to the screen's width.
    Line(String),
    /// Text as it is, with its line ends.
    Text(String),
    /// From here on a run is shown like this.
    Mode(Mode),
    /// Something happened in the run.
    Watched(Box<WatchEvent>),
    /// Nothing more will.
    Finish,
}

/// Where pieces are shown; may wait for as long as it likes.
pub trait Screen: Send + 'static {
    /// Shows one piece.
    fn show(&mut self, piece: Piece);

    /// How long it may go without being told that nothing has come.
    fn period(&self) -> Duration {
        Duration::MAX
    }

    /// Nothing has come for so long.
    fn tick(&mut self) {}
}

enum Entry {
    Piece(Piece),
    /// All that came before has been shown.
    Mark(SyncSender<()>),
}

/// The near end of the queue.
#[derive(Debug)]
pub struct ConsoleWriter {
    queue: SyncSender<Entry>,
    dropped: Arc<AtomicU64>,
}

impl ConsoleWriter {
    /// Starts the screen's thread, which ends with the process, or when the writer is gone and everything is
    /// shown.
    pub fn new(screen: impl Screen) -> Self {
        Self::with_room(screen, CONSOLE_QUEUE)
    }

    fn with_room(screen: impl Screen, room: usize) -> Self {
        let (queue, entries) = mpsc::sync_channel(room);
        let dropped = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&dropped);
        // Without a thread nothing can be shown, and everything else goes on.
        let _ = thread::Builder::new().name("console".into()).spawn(move || show(screen, &entries, &count));
        Self { queue, dropped }
    }

    /// Shows a piece some time; never waits.
    pub fn put(&self, piece: Piece) {
        // An event that was not shown is overtaken by what comes next.
        let matters = !matches!(piece, Piece::Watched(_));
        if self.queue.try_send(Entry::Piece(piece)).is_err() && matters {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until everything is shown; false if the screen does not take it in time.
    pub fn flush(&self) -> bool {
        self.flush_within(CONSOLE_PATIENCE)
    }

    fn flush_within(&self, patience: Duration) -> bool {
        let give_up = clock::now() + patience;
        let (mark, shown) = mpsc::sync_channel(1);
        let mut entry = Entry::Mark(mark);
        while let Err(refused) = self.queue.try_send(entry) {
            match refused {
                TrySendError::Full(again) if clock::now() < give_up => entry = again,
                TrySendError::Full(_) | TrySendError::Disconnected(_) => return false,
            }
            thread::sleep(Duration::from_millis(5));
        }
        shown.recv_timeout(give_up.saturating_duration_since(clock::now())).is_ok()
    }
}

impl Drop for ConsoleWriter {
    fn drop(&mut self) {
        self.flush();
    }
}

fn show(mut screen: impl Screen, entries: &Receiver<Entry>, dropped: &AtomicU64) {
    loop {
        match entries.recv_timeout(screen.period()) {
            Ok(Entry::Piece(piece)) => screen.show(piece),
            // The caller may have given up.
            Ok(Entry::Mark(mark)) => drop(mark.send(())),
            Err(RecvTimeoutError::Timeout) => screen.tick(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let missing = dropped.swap(0, Ordering::Relaxed);
        if missing > 0 {
            let what = if missing == 1 { "1 line was" } else { &format!("{missing} lines were") };
            screen.show(Piece::Line(format!(
                "{what} not shown here, because the terminal did not keep up; the logs have them"
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Keeps what it was shown, and takes a piece only while the test holds the other end of `let_on` open
    /// for it.
    struct Slow {
        shown: Arc<Mutex<Vec<Piece>>>,
        let_on: Receiver<()>,
    }

    impl Screen for Slow {
        fn show(&mut self, piece: Piece) {
            let _ = self.let_on.recv();
            self.shown.lock().unwrap().push(piece);
        }
    }

    fn slow(room: usize) -> (ConsoleWriter, Arc<Mutex<Vec<Piece>>>, mpsc::Sender<()>) {
        let (go, let_on) = mpsc::channel();
        let shown = Arc::new(Mutex::new(Vec::new()));
        (ConsoleWriter::with_room(Slow { shown: Arc::clone(&shown), let_on }, room), shown, go)
    }

    #[test]
    fn nobody_waits_for_a_screen_that_takes_nothing_and_what_is_missing_is_counted() {
        let (writer, shown, go) = slow(2);
        for number in 0..100 {
            writer.put(Piece::Line(number.to_string()));
            writer.put(Piece::Watched(Box::default()));
        }
        assert!(!writer.flush_within(Duration::from_millis(10)), "it is full");
        // It takes everything from here on.
        drop(go);
        assert!(writer.flush_within(Duration::from_secs(60)));
        let shown = shown.lock().unwrap();
        let lines = shown.iter().filter(|piece| matches!(piece, Piece::Line(_))).count();
        let count = shown.iter().find_map(|piece| match piece {
            Piece::Line(text) => text.split_once(" lines were not shown")?.0.parse::<usize>().ok(),
            _ => None,
        });
        assert_eq!(count.map(|missing| missing + lines - 1), Some(100), "{shown:?}");
    }

    #[test]
    fn a_screen_that_takes_its_time_gets_everything_in_order() {
        let (writer, shown, go) = slow(8);
        for number in 0..5 {
            writer.put(Piece::Text(number.to_string()));
        }
        drop(go);
        drop(writer);
        let texts: Vec<_> = (0..5).map(|number| Piece::Text(number.to_string())).collect();
        assert_eq!(*shown.lock().unwrap(), texts);
    }
}
