//! The engine of the ring: one stream out to the next rank, one stream in from the previous one, moved at the
//! same time by one thread that never blocks on either.
//!
//! Every collective is a [`Plan`]: two lists of spans of one buffer. What a rank sends in round `i + 1` is
//! what it received in round `i`, so one number says how far the outgoing stream may go:
//!
//! ```text
//! bytes that may be sent = head (what depends on nothing) + bytes received and reduced so far
//! ```
//!
//! The rule pipelines a collective at the grain of a read: a piece travels on as soon as it has been
//! reduced, while it is still in the cache. Reduced spans arrive in a scratch buffer that fits the L2 cache;
//! stored spans arrive in place.
//!
//! Nothing here has a timeout: a slow neighbour is waited for. Sockets that were shut down by an abort end
//! every wait at once.

use std::io;

use super::{
    element::{Element, combine},
    lane::{Inbound, Outbound, sleep},
    plan::{Action, Plan},
    wire::{HEADER, Header},
};
use crate::collective::Reduce;
use coxswain_nn::pulse;

/// Bytes given to one read or write. Small enough that what one call brings is still in the L2 cache (1 to 2
/// MiB a core, shared by the ranks of a core) when it is added and sent on, large enough that the system call
/// itself does not count. Measured on loopback, 2 and 4 ranks: 64 to 512 KiB differ by less than 10 %, 128
/// KiB is best.
pub(crate) const PIECE: usize = coxswain_task::memory::RECEIVE_BYTES as usize;
/// Less than this is not sent while there is still something to read: it would cost a system call per few
/// packets.
const WORTH_SENDING: usize = 16 << 10;
/// The start of the payload travels in one write with the header up to this size, so that a small message is
/// one packet.
const EAGER: usize = 8 << 10;

/// Which side failed, and how.
#[derive(Debug)]
pub(super) enum PumpError {
    Next(io::Error),
    Previous(io::Error),
    /// The previous rank is in this other collective; `None` if it does not speak our language.
    OtherCollective(Option<Header>),
}

/// Both neighbours, and the buffer that reductions go through, 8-byte aligned.
pub(super) struct Pump<'a> {
    pub next: &'a mut Outbound,
    pub previous: &'a mut Inbound,
    pub scratch: &'a mut [u64],
}

impl Pump<'_> {
    /// Runs `plan` to its end.
    pub(super) fn run<T: Element>(
        &mut self,
        header: &Header,
        reduce: Reduce,
        plan: &mut Plan<'_, T>,
    ) -> Result<(), PumpError> {
        let mut outgoing = OutgoingStream::new(header, plan);
        let mut incoming = IncomingStream::new(header, reduce, plan);
        loop {
            let limit = plan.head * size_of::<T>() + incoming.done;
            let mut moved = outgoing.advance(self.next, plan, limit, WORTH_SENDING)?;
            moved |= incoming.advance(self.previous, plan, self.scratch)?;
            if outgoing.finished() && incoming.finished() {
                return Ok(());
            }
            if moved {
                pulse::beat();
                continue;
            }
            let limit = plan.head * size_of::<T>() + incoming.done;
            if !outgoing.advance(self.next, plan, limit, 1)? {
                self.wait(outgoing.ready(limit) > 0, !incoming.finished())?;
            }
        }
    }

    /// Blocks until a neighbour can be written to or read from.
    fn wait(&mut self, sending: bool, receiving: bool) -> Result<(), PumpError> {
        let next = sending.then_some(&mut *self.next);
        let previous = receiving.then_some(&mut *self.previous);
        sleep(next, previous).map_err(PumpError::Previous)
    }
}

/// The outgoing stream: a prefix (header and perhaps the first bytes), then spans.
struct OutgoingStream {
    prefix: Vec<u8>,
    prefix_sent: usize,
    /// Payload bytes sent, and in all.
    sent: usize,
    total: usize,
    span: usize,
    /// Bytes of the current span that have gone.
    offset: usize,
}

impl OutgoingStream {
    fn new<T: Element>(header: &Header, plan: &Plan<'_, T>) -> Self {
        let mut this = Self { prefix: Vec::new(), prefix_sent: 0, sent: 0, total: 0, span: 0, offset: 0 };
        let Some(spans) = &plan.send else { return this };
        this.total = spans.iter().map(|span| span.len() * size_of::<T>()).sum();
        this.prefix.extend_from_slice(&header.encode());
        if let Some(first) = spans.first() {
            let bytes: &[u8] = bytemuck::cast_slice(&plan.buffer[first.clone()]);
            this.offset = bytes.len().min(EAGER).min(plan.head * size_of::<T>());
            this.prefix.extend_from_slice(&bytes[..this.offset]);
            this.sent = this.offset;
        }
        this
    }

    fn finished(&self) -> bool {
        self.prefix_sent == self.prefix.len() && self.sent == self.total
    }

    /// Bytes that could go out now.
    fn ready(&self, limit: usize) -> usize {
        self.prefix.len() - self.prefix_sent + limit.min(self.total) - self.sent
    }

    /// Sends up to one piece, if at least `worth` bytes (or all that is left) may go. False if nothing went.
    fn advance<T: Element>(
        &mut self,
        next: &mut Outbound,
        plan: &Plan<'_, T>,
        limit: usize,
        worth: usize,
    ) -> Result<bool, PumpError> {
        if self.prefix_sent < self.prefix.len() {
            let count = next.write(&self.prefix[self.prefix_sent..]).map_err(PumpError::Next)?;
            self.prefix_sent += count;
            return Ok(count > 0);
        }
        let limit = limit.min(self.total);
        let ready = limit - self.sent;
        if ready == 0 || (ready < worth && limit < self.total) {
            return Ok(false);
        }
        let spans = plan.send.as_deref().unwrap_or_default();
        while spans[self.span].len() * size_of::<T>() == self.offset {
            self.span += 1;
            self.offset = 0;
        }
        let bytes: &[u8] = bytemuck::cast_slice(&plan.buffer[spans[self.span].clone()]);
        let end = bytes.len().min(self.offset + ready.min(PIECE));
        let count = next.write(&bytes[self.offset..end]).map_err(PumpError::Next)?;
        self.offset += count;
        self.sent += count;
        Ok(count > 0)
    }
}

/// The incoming stream: a header, then spans.
struct IncomingStream {
    expected: Header,
    reduce: Reduce,
    greeted: bool,
    /// Bytes at the start of the scratch buffer that are not consumed yet.
    pending: usize,
    /// Payload bytes consumed, and in all.
    done: usize,
    total: usize,
    span: usize,
    /// Bytes of the current span that are consumed.
    offset: usize,
}

impl IncomingStream {
    fn new<T: Element>(header: &Header, reduce: Reduce, plan: &Plan<'_, T>) -> Self {
        let spans = plan.receive.as_deref().unwrap_or_default();
        Self {
            expected: *header,
            reduce,
            greeted: plan.receive.is_none(),
            pending: 0,
            done: 0,
            total: spans.iter().map(|(span, _)| span.len() * size_of::<T>()).sum(),
            span: 0,
            offset: 0,
        }
    }

    fn finished(&self) -> bool {
        self.greeted && self.done == self.total
    }

    /// Reads up to one piece. False if nothing was there.
    fn advance<T: Element>(
        &mut self,
        previous: &mut Inbound,
        plan: &mut Plan<'_, T>,
        scratch: &mut [u64],
    ) -> Result<bool, PumpError> {
        if self.finished() {
            return Ok(false);
        }
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        if !self.greeted {
            let end = scratch.len().min(HEADER + self.total);
            let count = previous.read(&mut scratch[self.pending..end]).map_err(PumpError::Previous)?;
            self.pending += count;
            if self.pending >= HEADER {
                self.check_header(scratch)?;
                self.consume(plan, scratch, HEADER);
            }
            return Ok(count > 0);
        }
        let spans = plan.receive.as_deref().unwrap_or_default();
        while spans[self.span].0.len() * size_of::<T>() == self.offset {
            self.span += 1;
            self.offset = 0;
        }
        let (span, action) = spans[self.span].clone();
        if action == Action::Store {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut plan.buffer[span]);
            let end = bytes.len().min(self.offset + PIECE);
            let count = previous.read(&mut bytes[self.offset..end]).map_err(PumpError::Previous)?;
            self.offset += count;
            self.done += count;
            return Ok(count > 0);
        }
        let left = span.len() * size_of::<T>() - self.offset;
        let end = scratch.len().min(left);
        let count = previous.read(&mut scratch[self.pending..end]).map_err(PumpError::Previous)?;
        self.pending += count;
        self.consume(plan, scratch, 0);
        Ok(count > 0)
    }

    fn check_header(&mut self, scratch: &[u8]) -> Result<(), PumpError> {
        let bytes = std::array::from_fn(|i| scratch[i]);
        match Header::decode(&bytes) {
            Some(header) if header == self.expected => self.greeted = true,
            other => return Err(PumpError::OtherCollective(other)),
        }
        Ok(())
    }

    /// Consumes `scratch[from..pending]`; what is less than an element moves to the front.
    fn consume<T: Element>(&mut self, plan: &mut Plan<'_, T>, scratch: &mut [u8], mut from: usize) {
        let spans = plan.receive.as_deref().unwrap_or_default();
        while from < self.pending {
            let (span, action) = spans[self.span].clone();
            let take = (self.pending - from).min(span.len() * size_of::<T>() - self.offset);
            if take == 0 {
                self.span += 1;
                self.offset = 0;
                continue;
            }
            let whole = take / size_of::<T>() * size_of::<T>();
            if action == Action::Store {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut plan.buffer[span]);
                bytes[self.offset..][..take].copy_from_slice(&scratch[from..from + take]);
                (self.offset, self.done, from) = (self.offset + take, self.done + take, from + take);
                continue;
            }
            if whole == 0 {
                break;
            }
            // Aligned: the scratch buffer is, headers are 32 bytes, and reductions consume whole elements.
            let other: &[T] = bytemuck::cast_slice(&scratch[from..from + whole]);
            let begin = self.offset / size_of::<T>();
            combine(self.reduce, &mut plan.buffer[span][begin..begin + other.len()], other);
            (self.offset, self.done, from) = (self.offset + whole, self.done + whole, from + whole);
        }
        scratch.copy_within(from..self.pending, 0);
        self.pending -= from;
    }
}
