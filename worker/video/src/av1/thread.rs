//! A decoder on a thread of its own, which is given up if it panics.
//!
//! ```text
//! caller ── Order: a unit, and the picture shown last ──▶ thread: every call of rav1d
//!    ▲                                                       │
//!    └── Reply: the picture, or why there is none ◀──────────┤
//!    └── Reply: what a panic says ◀───── the panic hook ◀────┘ and the thread stops for ever
//! ```
//!
//! One of the two works at a time: the caller waits for the reply to each order.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{Builder, JoinHandle},
};

use super::dav1d::{Dav1d, Held, Refused};
use super::panics;
use crate::error::{Fault, picture};
use crate::limits::MAX_GIVEN_UP;

/// What the thread is to do.
pub(super) struct Order {
    /// The picture of an earlier reply, which nobody looks at any more.
    pub back: Option<Held>,
    /// Whether to forget what came before.
    pub restart: bool,
    /// The OBUs of one shown frame.
    pub unit: Vec<u8>,
    /// Whether anybody wants the picture.
    pub show: bool,
}

/// What came of it.
enum Reply {
    Opened,
    /// The picture if it is wanted, and the order's memory.
    Decoded(Option<Held>, Vec<u8>),
    Failed(Fault),
    /// The thread has stopped, and the decoder with it.
    Panicked(String),
}

/// An open decoder.
pub(super) struct DecoderThread {
    /// None once the thread is to end.
    orders: Option<SyncSender<Order>>,
    replies: Receiver<Reply>,
    /// None once it was given up.
    thread: Option<JoinHandle<()>>,
}

impl DecoderThread {
    /// For frames of at most `pixels`.
    pub fn open(pixels: u32) -> Result<Self, Fault> {
        let times = panics::given_up();
        if times >= MAX_GIVEN_UP {
            return Err(Fault::GivenUp { times });
        }
        panics::set_hook();
        // At most one order and one reply are under way.
        let ((orders, taken), (given, replies)) = (sync_channel(1), sync_channel(1));
        let started = Builder::new().name("av1".into()).spawn(move || {
            let last_words = given.clone();
            panics::give_up_on_panic(move |words| drop(last_words.send(Reply::Panicked(words))));
            serve(pixels, &taken, &given);
        });
        let thread = started.map_err(|error| {
            Fault::Io(format!("the thread that is to decode it cannot be started: {error}"))
        })?;
        let mut decoder = Self { orders: Some(orders), replies, thread: Some(thread) };
        decoder.reply().map(|_| decoder)
    }

    /// Decodes one unit: the picture if it is wanted, and the order's memory to be used again.
    pub fn decode(&mut self, order: Order) -> Result<(Option<Held>, Vec<u8>), Fault> {
        if let Some(orders) = &self.orders {
            // A thread that has ended says so in the place of its reply.
            drop(orders.send(order));
        }
        match self.reply()? {
            Reply::Decoded(picture, unit) => Ok((picture, unit)),
            _ => Err(gone()),
        }
    }

    fn reply(&mut self) -> Result<Reply, Fault> {
        match self.replies.recv() {
            Ok(Reply::Failed(fault)) => Err(fault),
            Ok(Reply::Panicked(words)) => {
                self.thread = None;
                Err(picture(format!("the decoder gave up on it (it panicked: {words})")))
            }
            Ok(reply) => Ok(reply),
            Err(_) => Err(gone()),
        }
    }
}

impl Drop for DecoderThread {
    fn drop(&mut self) {
        self.orders = None;
        let Some(thread) = self.thread.take() else { return };
        // It closes the decoder and ends, or panics over that and never does.
        let ends = self.replies.iter().all(|reply| !matches!(reply, Reply::Panicked(_)));
        if ends {
            drop(thread.join());
        }
    }
}

fn gone() -> Fault {
    picture("its decoder is gone")
}

/// The thread's work, until nobody is left who orders.
fn serve(pixels: u32, orders: &Receiver<Order>, replies: &SyncSender<Reply>) {
    let mut decoder = match Dav1d::open(pixels) {
        Ok(decoder) => decoder,
        Err(refused) => return drop(replies.send(Reply::Failed(fault(refused)))),
    };
    let mut reply = Reply::Opened;
    while replies.send(reply).is_ok()
        && let Ok(Order { back, restart, unit, show }) = orders.recv()
    {
        drop(back);
        if restart {
            decoder.flush();
        }
        reply = match decode(&mut decoder, &unit) {
            Ok(picture) => Reply::Decoded(show.then_some(picture), unit),
            Err(fault) => Reply::Failed(fault),
        };
    }
}

/// The picture of a unit. One that nobody wants is taken out as well: the next unit is not taken in before.
fn decode(decoder: &mut Dav1d, unit: &[u8]) -> Result<Held, Fault> {
    send(decoder, unit)?;
    match decoder.picture() {
        Err(Refused::Again) => Err(picture("a sample without a shown frame")),
        decoded => decoded.map_err(fault),
    }
}

/// What stands behind a unit's picture is taken in when the next one comes.
fn send(decoder: &mut Dav1d, unit: &[u8]) -> Result<(), Fault> {
    match decoder.send(unit) {
        Err(Refused::Again) => match decoder.picture() {
            Ok(_) => Err(picture("two shown frames in one sample")),
            Err(Refused::Again) => decoder.send_pending().map_err(fault),
            Err(refused) => Err(fault(refused)),
        },
        sent => sent.map_err(fault),
    }
}

fn fault(refused: Refused) -> Fault {
    picture(format!("dav1d: {refused}"))
}
