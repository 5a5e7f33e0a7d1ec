//! A ring and a transport as one communicator.
//!
//! ```text
//! ring     votes, barriers and everything small; the header of every large collective; who is there and who
//!          has left
//! transport  the data of large collectives
//! ```
//!
//! A large collective begins with its header on the ring, without data: ranks that are in different
//! collectives are told, as on the ring alone, instead of waiting for each other for ever. While the
//! transport moves data the ring is watched: an abort or a neighbour that is gone ends the transport at once,
//! so no rank needs a timeout, or the coordinator, to notice that another one died.
//!
//! **How it is formed** ([`join`]). The ring of the generation exists first, with its handshake and its
//! fences. Over it all ranks learn what each could bring; if that is the same everywhere, rank 0 makes an id
//! and broadcasts it, all connect, and tell each other whether it worked. Only then is the transport used;
//! otherwise the ring carries everything, and one line says why.
//!
//! Which way a buffer takes depends on its size and its parts alone, so all ranks agree: a transport's parts
//! are equal, and buffers that are cut otherwise take the ring. Reductions of a transport add in an order of
//! its own, always the same one as long as it chooses the same algorithm.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_proto::{ids::Rank, run_spec::Collectives};
use half::bf16;

use super::{
    AbortHandle, Buf, BufMut, Collective, CollectiveError, Computes, Cuts, GatherPeek, Offer, Place,
    Progress, Reduce, Ring, Transfer, TransferBuffer, TransferKind, Transport, TransportError, TransportId,
    TransportSource, check_distance, check_root, chunk,
    mixture::{self, named},
    ring::{Call, Element, Entry, Operation},
    through_host,
};
use crate::clock;
use coxswain_nn::kernels::flat::{DeviceBuffer, DeviceElement};

/// Buffers of at most this many bytes stay on the ring: a vote takes less time there than its way to a GPU
/// and back.
const SMALL: usize = 64 << 10;
/// A neighbour that has left may have finished the same collective first. Ours is given this long to finish
/// as well.
const LINGER: Duration = Duration::from_secs(2);
/// Between two looks at a transfer in flight.
const PAUSE: Duration = Duration::from_micros(50);

/// A rank's place in a ring and a transport.
pub struct HybridCollective {
    ring: Ring,
    transport: Box<dyn Transport>,
    small: usize,
}

/// What a rank brings to the others of a ring that has formed.
pub struct Brings<'a> {
    /// What it computes on.
    pub computes: Computes,
    /// Makes its end of a transport.
    pub source: Option<&'a mut (dyn TransportSource + 'static)>,
    /// Until when all must have connected.
    pub deadline: Instant,
}

/// What the ranks of `ring` communicate over: a transport beside it if `wanted` and possible on all ranks,
/// else the ring itself.
///
/// Refuses, on all ranks alike, a world that mixes CPUs and GPUs by mistake.
pub fn join(
    mut ring: Ring,
    wanted: Collectives,
    brings: Brings<'_>,
) -> Result<Box<dyn Collective>, CollectiveError> {
    let mut source = brings.source.filter(|_| wanted != Collectives::Ring);
    let own =
        source.as_mut().and_then(|source| source.offer().inspect_err(|why| tracing::warn!("{why}")).ok());
    let (computes, offers): (Vec<_>, Vec<_>) = exchange(&mut ring, brings.computes, own)?.into_iter().unzip();
    mixture::refuse(&computes)?;
    if wanted == Collectives::Ring {
        return Ok(Box::new(ring));
    }
    // On a machine without GPUs there is nothing to explain.
    let expected = source.is_some();
    let transport = match source {
        Some(source) => connect(&mut ring, source, &offers, brings.deadline)?,
        None => Err(missing(&offers)),
    };
    match transport {
        Ok(transport) => Ok(Box::new(HybridCollective { ring, transport, small: SMALL })),
        Err(why) if wanted == Collectives::Nccl => Err(CollectiveError::NoTransport(why)),
        Err(why) => {
            if expected {
                tracing::warn!("gradients and weights go over TCP: {why}");
            }
            Ok(Box::new(ring))
        }
    }
}

/// A transport, or why there is none; the same on all ranks.
fn connect(
    ring: &mut Ring,
    source: &mut (dyn TransportSource + 'static),
    offers: &[Option<Offer>],
    deadline: Instant,
) -> Result<Result<Box<dyn Transport>, String>, CollectiveError> {
    let Some(first) = offers[0].filter(|first| agree(offers, *first)) else {
        return Ok(Err(missing(offers)));
    };
    let (rank, world) = (ring.rank(), ring.world());
    let mut parcel = [0.0f64; 1 + size_of::<TransportId>()];
    if rank.0 == 0 {
        match source.id() {
            Ok(id) => {
                parcel[0] = 1.0;
                parcel[1..].iter_mut().zip(id).for_each(|(slot, byte)| *slot = f64::from(byte));
            }
            Err(why) => tracing::warn!("{why}"),
        }
    }
    ring.broadcast(BufMut::F64(&mut parcel), Rank(0))?;
    if parcel[0] == 0.0 {
        return Ok(Err("rank 0 cannot create an NCCL id (its own log says why)".to_owned()));
    }
    let place = Place { rank, world, id: std::array::from_fn(|i| parcel[i + 1] as u8), deadline };
    let transport = source.connect(&place, &mut || ring.aborted().is_none() && ring.departed().is_none());
    if let Err(why) = &transport {
        tracing::warn!("{why}");
    }
    let mut joined = vec![0.0; world];
    joined[rank.0 as usize] = if transport.is_ok() { 1.0 } else { 0.0 };
    ring.all_gather_in_place(BufMut::F64(&mut joined))?;
    match transport {
        Ok(transport) if joined.iter().all(|ok| *ok == 1.0) => {
            tracing::info!(version = first.version, "gradients and weights go over NCCL");
            Ok(Ok(transport))
        }
        unused => {
            // The ranks that it would wait for are not there.
            unused.into_iter().for_each(|mut transport| transport.abort());
            let absent: Vec<_> = (0..world).filter(|rank| joined[*rank] == 0.0).collect();
            Ok(Err(format!("NCCL did not connect on {}{}", named(&absent), sharing(offers))))
        }
    }
}

/// What everybody computes on and offers, by rank.
fn exchange(
    ring: &mut Ring,
    computes: Computes,
    own: Option<Offer>,
) -> Result<Vec<(Computes, Option<Offer>)>, CollectiveError> {
    const WIDTH: usize = 4;
    let mut all = vec![0.0; WIDTH * ring.world()];
    let at = WIDTH * ring.rank().0 as usize;
    all[at] = computes.code();
    if let Some(Offer { version, gpu }) = own {
        all[at + 1..at + WIDTH].copy_from_slice(&[1.0, f64::from(version), f64::from(gpu)]);
    }
    ring.all_gather_in_place(BufMut::F64(&mut all))?;
    let told = |of: &[f64]| {
        let offer = (of[1] == 1.0).then(|| Offer { version: of[2] as u32, gpu: of[3] as u32 });
        (Computes::of_code(of[0]), offer)
    };
    Ok(all.chunks_exact(WIDTH).map(told).collect())
}

fn agree(offers: &[Option<Offer>], first: Offer) -> bool {
    offers.iter().all(|offer| offer.is_some_and(|offer| offer.version == first.version))
}

/// Why these offers make no transport.
fn missing(offers: &[Option<Offer>]) -> String {
    let without: Vec<_> = (0..offers.len()).filter(|rank| offers[*rank].is_none()).collect();
    if !without.is_empty() {
        return format!("no GPU with NCCL on {}", named(&without));
    }
    let mut versions: Vec<_> = offers.iter().flatten().map(|offer| offer.version).collect();
    versions.sort_unstable();
    versions.dedup();
    format!("ranks have different versions of NCCL: {versions:?}")
}

/// Ranks of one GPU, as a half-sentence: NCCL refuses them unless it takes them for different hosts.
fn sharing(offers: &[Option<Offer>]) -> String {
    let shares = |a: usize| {
        (0..a).find(|b| offers[a].is_some() && offers[*b].map(|o| o.gpu) == offers[a].map(|o| o.gpu))
    };
    match (0..offers.len()).find_map(|a| shares(a).map(|b| (b, a))) {
        Some((b, a)) => {
            format!(" (ranks {b} and {a} share a GPU, which NCCL refuses: start one worker per GPU)")
        }
        None => String::new(),
    }
}

impl HybridCollective {
    /// Moves one large buffer in host memory.
    fn carry<T: Element>(&mut self, buffer: &mut [T], kind: TransferKind) -> Result<(), CollectiveError> {
        let transfer = Transfer { kind, length: buffer.len(), width: size_of::<T>() };
        self.transfer::<T>(&transfer, &mut TransferBuffer::Host(bytemuck::cast_slice_mut(buffer)))
    }

    /// Moves one large buffer in a device's memory: there, if the transport can.
    fn carry_on_device(
        &mut self,
        buffer: &mut dyn DeviceBuffer,
        kind: TransferKind,
    ) -> Result<(), CollectiveError> {
        let element = buffer.element();
        let transfer = Transfer { kind, length: buffer.len(), width: element.bytes() };
        if !self.transport.reaches(&transfer, buffer) {
            return through_host(buffer, |copy| match copy {
                BufMut::Bf16(values) => self.carry(values, kind),
                BufMut::F32(values) => self.carry(values, kind),
                BufMut::F64(values) => self.carry(values, kind),
                BufMut::Device(_) => unreachable!("a copy in host memory is in host memory"),
            });
        }
        match element {
            DeviceElement::Bf16 => self.transfer::<bf16>(&transfer, &mut TransferBuffer::Device(buffer)),
            DeviceElement::F32 => self.transfer::<f32>(&transfer, &mut TransferBuffer::Device(buffer)),
        }
    }

    /// One large collective of `T`, from its header on the ring to its end.
    fn transfer<T: Element>(
        &mut self,
        transfer: &Transfer,
        buffer: &mut TransferBuffer<'_>,
    ) -> Result<(), CollectiveError> {
        let Transfer { kind, length, .. } = *transfer;
        let (operation, reduce, root) = match kind {
            TransferKind::AllReduce(reduce) => (Operation::AllReduce, Some(reduce), 0),
            TransferKind::ReduceScatter(reduce) => (Operation::ReduceScatter, Some(reduce), 0),
            TransferKind::AllGather => (Operation::AllGather, None, 0),
            TransferKind::Shift(distance) => (Operation::Shift, None, distance as u32),
            TransferKind::Broadcast(root) => (Operation::Broadcast, None, root.0),
        };
        let entered = self.ring.announce::<T>(&Call { operation, reduce, root, length })?;
        self.transport.start(transfer, buffer).map_err(|error| self.broken(&entered, operation, &error))?;
        self.wait(&entered, operation)?;
        self.transport.finish(transfer, buffer).map_err(|error| self.broken(&entered, operation, &error))?;
        self.ring.leave(&entered);
        Ok(())
    }

    /// Waits for the transfer in flight, with an eye on the ring.
    fn wait(&mut self, entered: &Entry, operation: Operation) -> Result<(), CollectiveError> {
        let (sequence, name) = (entered.sequence(), operation.name());
        let mut departed: Option<(Rank, Instant)> = None;
        loop {
            match self.transport.poll() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(self.broken(entered, operation, &error)),
            }
            if let Some(reason) = self.ring.aborted() {
                self.transport.abort();
                return Err(CollectiveError::Aborted { sequence, operation: name, reason });
            }
            match departed {
                None => departed = self.ring.departed().map(|peer| (peer, clock::now())),
                Some((peer, since)) if since.elapsed() > LINGER => {
                    self.transport.abort();
                    self.ring.give_up(format!("rank {peer} is gone"));
                    let source = std::io::Error::new(
                        std::io::ErrorKind::ConnectionReset,
                        "its control connection is closed, and the transfer does not end",
                    );
                    return Err(CollectiveError::PeerLost { peer, sequence, operation: name, source });
                }
                Some(_) => {}
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Leaves the communicator for good.
    fn broken(&mut self, entered: &Entry, operation: Operation, error: &TransportError) -> CollectiveError {
        self.transport.abort();
        self.ring.give_up(format!("the transport has failed before: {error}"));
        CollectiveError::Transport {
            sequence: entered.sequence(),
            operation: operation.name(),
            detail: error.to_string(),
        }
    }

    /// Whether a buffer of so many bytes stays on the ring.
    fn stays(&self, bytes: usize) -> bool {
        bytes <= self.small
    }
}

/// Moves a large buffer as `$kind` says, a small one, and one of unequal parts, by `$small` on the ring.
macro_rules! either_way {
    ($self:ident, $cuts:ident, $buffer:ident, $kind:expr, $small:expr) => {
        match $cuts.are_equal() {
            true => either_way!($self, $buffer, $kind, $small),
            false => $small(&mut $self.ring, $buffer),
        }
    };
    ($self:ident, $buffer:ident, $kind:expr, $small:expr) => {
        match $buffer {
            BufMut::Bf16(values) if !$self.stays(size_of_val(values)) => $self.carry(values, $kind),
            BufMut::F32(values) if !$self.stays(size_of_val(values)) => $self.carry(values, $kind),
            BufMut::F64(values) if !$self.stays(size_of_val(values)) => $self.carry(values, $kind),
            BufMut::Device(buffer) if !$self.stays(Buf::Device(buffer).bytes()) => {
                $self.carry_on_device(buffer, $kind)
            }
            $buffer => $small(&mut $self.ring, $buffer),
        }
    };
}

impl Collective for HybridCollective {
    fn rank(&self) -> Rank {
        self.ring.rank()
    }

    fn world(&self) -> usize {
        self.ring.world()
    }

    fn all_reduce(&mut self, buffer: BufMut<'_>, reduce: Reduce) -> Result<(), CollectiveError> {
        let small = |ring: &mut Ring, buffer: BufMut<'_>| ring.all_reduce(buffer, reduce);
        either_way!(self, buffer, TransferKind::AllReduce(reduce), small)
    }

    fn all_gather(&mut self, shard: Buf<'_>, mut output: BufMut<'_>) -> Result<(), CollectiveError> {
        if shard.len().checked_mul(self.world()) != Some(output.len()) {
            return self.ring.all_gather(shard, output);
        }
        output.put("all_gather", chunk(output.len(), self.world(), self.rank().0 as usize), shard)?;
        self.all_gather_in_place(output)
    }

    fn reduce_scatter_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        let small = |ring: &mut Ring, buffer: BufMut<'_>| ring.reduce_scatter_parts(buffer, cuts, reduce);
        either_way!(self, cuts, buffer, TransferKind::ReduceScatter(reduce), small)
    }

    fn all_gather_parts(&mut self, buffer: BufMut<'_>, cuts: &Cuts) -> Result<(), CollectiveError> {
        let small = |ring: &mut Ring, buffer: BufMut<'_>| ring.all_gather_parts(buffer, cuts);
        either_way!(self, cuts, buffer, TransferKind::AllGather, small)
    }

    fn shift_parts(
        &mut self,
        buffer: BufMut<'_>,
        cuts: &Cuts,
        distance: usize,
    ) -> Result<(), CollectiveError> {
        check_distance(distance, self.world())?;
        let small = |ring: &mut Ring, buffer: BufMut<'_>| ring.shift_parts(buffer, cuts, distance);
        either_way!(self, cuts, buffer, TransferKind::Shift(distance), small)
    }

    fn broadcast(&mut self, buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError> {
        check_root("broadcast", root, self.world())?;
        let small = |ring: &mut Ring, buffer: BufMut<'_>| ring.broadcast(buffer, root);
        either_way!(self, buffer, TransferKind::Broadcast(root), small)
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.ring.barrier()
    }

    fn ahead(&self, length: usize) -> Option<GatherPeek> {
        // A large one sends its header alone over the ring.
        self.stays(length * size_of::<f64>()).then(|| self.ring.ahead(length)).flatten()
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.ring.abort_handle()
    }

    fn progress(&self) -> Arc<Progress> {
        self.ring.progress()
    }

    fn buffer_bytes(&self) -> usize {
        self.ring.buffer_bytes() + self.transport.buffer_bytes()
    }
}

impl Drop for HybridCollective {
    /// A rank that was told to leave does not wait for others to let it go.
    fn drop(&mut self) {
        if self.ring.aborted().is_some() {
            self.transport.abort();
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::{beside_nothing, over_another_ring};
