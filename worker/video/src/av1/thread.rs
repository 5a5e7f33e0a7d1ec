//! A decoder on a thread of its own, which is given up if it panics.
//!
//! ```text
//! caller ── Order: a unit, and the picture shown last ──▶ thread: every call of rav1d
//!    ▲                                                       │
//!    └── Reply: the picture, or why there is none ◀──────────┤
//!    └── Reply: what a panic says ◀───── the panic hook ◀────┘ and the thread stops for ever
//! ```
//!
//! The caller waits where it wants a picture, and else hands over the next unit: a thread that is woken for
//! each small frame costs a seventh of its time. Replies come in the orders' order.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{Builder, JoinHandle},
};

use super::dav1d::{Dav1d, Dav1dError, OwnedPicture};
use super::panics;
use crate::error::{Fault, picture};
use crate::limits::MAX_GIVEN_UP;

/// Units that the thread may be behind.
const AHEAD: usize = 8;
/// Bytes of the largest unit that is not waited for, and of the memory that is kept for the next one.
const SMALL_BYTES: usize = 1 << 20;

/// What the thread is to do.
pub(super) struct Order {
    /// The picture of an earlier reply, which nobody looks at any more.
    pub back: Option<OwnedPicture>,
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
    Decoded(Option<OwnedPicture>, Vec<u8>),
    Failed(Fault),
    /// The thread has stopped, and the decoder with it.
    Panicked(String),
}

/// An open decoder.
pub(super) struct DecoderThread {
    /// None once the thread is to end.
    orders: Option<SyncSender<Order>>,
    replies: Receiver<Reply>,
    /// Orders whose replies were not taken yet.
    under_way: usize,
    /// Memory of orders that came back.
    spare: Vec<Vec<u8>>,
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
        // Neither side waits for room: no more orders are under way than there is.
        let ((orders, taken), (given, replies)) = (sync_channel(AHEAD), sync_channel(AHEAD));
        let started = Builder::new().name("av1".into()).spawn(move || {
            let last_words = given.clone();
            panics::give_up_on_panic(move |words| drop(last_words.send(Reply::Panicked(words))));
            serve(pixels, &taken, &given);
        });
        let thread = started.map_err(|error| Fault::Io(format!("cannot start a decoder thread: {error}")))?;
        let (orders, thread) = (Some(orders), Some(thread));
        let mut decoder = Self { orders, replies, under_way: 0, spare: Vec::new(), thread };
        decoder.reply().map(|_| decoder)
    }

    /// Memory for the next unit, empty.
    pub fn memory(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    /// Has one unit decoded; waits for its picture if that is wanted. A unit that nobody waited for says with
    /// a later one what was wrong with it.
    pub fn decode(&mut self, order: Order) -> Result<Option<OwnedPicture>, Fault> {
        let waits = order.show || order.unit.len() > SMALL_BYTES;
        if let Some(orders) = &self.orders {
            // A thread that has ended says so in the place of its reply.
            drop(orders.send(order));
        }
        self.under_way += 1;
        let mut shown = None;
        while self.under_way == AHEAD || (waits && self.under_way > 0) {
            let Reply::Decoded(picture, mut unit) = self.reply()? else { return Err(gone()) };
            self.under_way -= 1;
            shown = picture;
            unit.clear();
            unit.shrink_to(SMALL_BYTES);
            self.spare.push(unit);
        }
        Ok(shown)
    }

    fn reply(&mut self) -> Result<Reply, Fault> {
        match self.replies.recv() {
            Ok(Reply::Failed(fault)) => Err(fault),
            Ok(Reply::Panicked(words)) => {
                self.thread = None;
                Err(picture(format!("the decoder panicked on it: {words}")))
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
    picture("the decoder thread has ended")
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
fn decode(decoder: &mut Dav1d, unit: &[u8]) -> Result<OwnedPicture, Fault> {
    send(decoder, unit)?;
    match decoder.picture() {
        Err(Dav1dError::Again) => Err(picture("a sample without a shown frame")),
        decoded => decoded.map_err(fault),
    }
}

/// What stands behind a unit's picture is taken in when the next one comes.
fn send(decoder: &mut Dav1d, unit: &[u8]) -> Result<(), Fault> {
    match decoder.send(unit) {
        Err(Dav1dError::Again) => match decoder.picture() {
            Ok(_) => Err(picture("two shown frames in one sample")),
            Err(Dav1dError::Again) => decoder.send_pending().map_err(fault),
            Err(refused) => Err(fault(refused)),
        },
        sent => sent.map_err(fault),
    }
}

fn fault(refused: Dav1dError) -> Fault {
    picture(format!("dav1d: {refused}"))
}
