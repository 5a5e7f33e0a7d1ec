//! NCCL as the [`Fabric`] beside a ring.
//!
//! ```text
//! library   the C interface, loaded at run time; all `unsafe`
//! here      one generation's fabric: staging memory on the card, one stream, one transfer at a time
//! ```
//!
//! **Where buffers are.** Gradients and weights of the trainables lie in host memory (`params`), so a transfer copies what this rank
//! brings to the card, runs in place there, and copies back what it receives: for reduce-scatter and all-gather
//! of `n` bytes on `W` ranks, `n (1 + 1/W)` bytes over the bus. Everything here works on device memory, so buffers that are there
//! already will only lose the copies.
//!
//! **Order.** The stream is our own. What is copied in comes from host memory, which burn has finished writing (it was read back with
//! a synchronisation), and burn reads results only after they were copied out; no event crosses between the two.
//!
//! **Padding.** NCCL's chunks are equal. The buffer on the card is as long as equal chunks of [`chunk`]'s size need; what lies behind
//! the end is reduced and passed around with the rest, and read by nobody.

mod library;
#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DriverError};

use self::library::{Call, Communicator, Kind, State};
use coxswain_worker::collective::{
    Fabric, FabricError, FabricId, FabricSource, Movement, Offer, Place, Transfer, chunk,
};

/// Between two looks at a communicator that connects or leaves.
const PAUSE: Duration = Duration::from_micros(200);
/// How long a rank that leaves in good order waits for the others to have read what it sent.
const FAREWELL: Duration = Duration::from_secs(5);

/// The library's version, `20000 + 100 * minor + patch`, or why there is none.
pub fn version() -> Result<u32, FabricError> {
    library::load().map(library::Nccl::version)
}

/// Makes NCCL communicators on one card.
pub struct NcclFabric {
    card: usize,
    context: Option<Arc<CudaContext>>,
}

impl NcclFabric {
    /// On the card of this number among those that the process sees.
    pub fn new(card: usize) -> Self {
        Self { card, context: None }
    }

    /// The card's primary context, the one that burn uses, current on this thread.
    fn context(&mut self) -> Result<Arc<CudaContext>, FabricError> {
        let context = match &self.context {
            Some(context) => context.clone(),
            None => self.context.insert(CudaContext::new(self.card).map_err(cuda)?).clone(),
        };
        context.bind_to_thread().map_err(cuda)?;
        Ok(context)
    }
}

impl FabricSource for NcclFabric {
    fn offer(&mut self) -> Result<Offer, FabricError> {
        let version = version()?;
        let uuid = self.context()?.uuid().map_err(cuda)?;
        let bytes: Vec<u8> = uuid.bytes.iter().map(|byte| *byte as u8).collect();
        Ok(Offer { version, card: number_of(&bytes) })
    }

    fn id(&mut self) -> Result<FabricId, FabricError> {
        self.context()?;
        library::load()?.unique_id()
    }

    fn connect(
        &mut self,
        place: &Place,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Fabric>, FabricError> {
        let context = self.context()?;
        let (rank, world) = (place.rank.0 as usize, place.world);
        let began = Instant::now();
        let comm = Communicator::begin(library::load()?, &place.id, rank, world)?;
        while comm.state()? == State::InProgress {
            if !go_on() {
                return Err(FabricError("a rank left while NCCL was connecting".to_owned()));
            }
            if Instant::now() >= place.deadline {
                return Err(FabricError(format!(
                    "NCCL did not connect {world} ranks within {:.1?}; NCCL_DEBUG=INFO shows which interface it tries \
                     (NCCL_SOCKET_IFNAME chooses one)",
                    began.elapsed()
                )));
            }
            std::thread::sleep(PAUSE);
        }
        let stream = context.new_stream().map_err(cuda)?;
        Ok(Box::new(OnCard {
            context,
            stream,
            comm: Some(comm),
            buffer: None,
            stage: Stage::Idle,
            rank,
            world,
        }))
    }
}

/// One generation's fabric.
struct OnCard {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// None after an abort.
    comm: Option<Communicator>,
    buffer: Option<CudaSlice<u8>>,
    stage: Stage,
    rank: usize,
    world: usize,
}

/// How far a transfer is.
enum Stage {
    Idle,
    /// NCCL is still preparing it.
    Launching,
    /// It is on the stream, before this event.
    Running(CudaEvent),
}

impl OnCard {
    /// Room for so many bytes on the card.
    fn reserve(&mut self, bytes: usize) -> Result<CudaSlice<u8>, FabricError> {
        match self.buffer.take() {
            Some(buffer) if buffer.len() >= bytes => Ok(buffer),
            smaller => {
                drop(smaller);
                self.stream.alloc_zeros(bytes).map_err(cuda)
            }
        }
    }

    fn call(&self, transfer: &Transfer) -> Call {
        let part = transfer.length.div_ceil(self.world);
        let whole = |rank: usize| part * rank..part * (rank + 1);
        match transfer.movement {
            Movement::AllReduce(reduce) => Call::AllReduce { count: transfer.length, reduce },
            Movement::ReduceScatter(reduce) => Call::ReduceScatter { chunk: part, reduce },
            Movement::AllGather => Call::AllGather { chunk: part },
            Movement::Broadcast(root) => Call::Broadcast { count: transfer.length, root: root.0 as usize },
            Movement::Shift => Call::Shift {
                send: whole(self.rank),
                receive: whole((self.rank + self.world - 1) % self.world),
            },
        }
    }
}

/// The bytes that a rank brings into a transfer.
fn brought(transfer: &Transfer, rank: usize, world: usize) -> Range<usize> {
    let own = chunk(transfer.length, world, rank);
    let elements = match transfer.movement {
        Movement::AllReduce(_) | Movement::ReduceScatter(_) => 0..transfer.length,
        Movement::AllGather | Movement::Shift => own,
        Movement::Broadcast(root) if root.0 as usize == rank => 0..transfer.length,
        Movement::Broadcast(_) => 0..0,
    };
    elements.start * transfer.width..elements.end * transfer.width
}

/// The bytes that a rank receives from a transfer.
fn received(transfer: &Transfer, rank: usize, world: usize) -> Range<usize> {
    let elements = match transfer.movement {
        Movement::AllReduce(_) | Movement::AllGather => 0..transfer.length,
        Movement::ReduceScatter(_) => chunk(transfer.length, world, rank),
        Movement::Shift => chunk(transfer.length, world, (rank + world - 1) % world),
        Movement::Broadcast(root) if root.0 as usize == rank => 0..0,
        Movement::Broadcast(_) => 0..transfer.length,
    };
    elements.start * transfer.width..elements.end * transfer.width
}

impl Fabric for OnCard {
    fn start(&mut self, transfer: &Transfer, bytes: &[u8]) -> Result<(), FabricError> {
        self.context.bind_to_thread().map_err(cuda)?;
        let padded = transfer.length.div_ceil(self.world) * self.world * transfer.width;
        let mut buffer = self.reserve(padded)?;
        let own = brought(transfer, self.rank, self.world);
        if !own.is_empty() {
            self.stream.memcpy_htod(&bytes[own.clone()], &mut buffer.slice_mut(own)).map_err(cuda)?;
        }
        let comm = self.comm.as_ref().ok_or_else(ended)?;
        let kind = match transfer.width {
            2 => Kind::Bf16,
            4 => Kind::F32,
            _ => Kind::F64,
        };
        let state = comm.start(&self.call(transfer), kind, &mut buffer, &self.stream)?;
        self.buffer = Some(buffer);
        self.stage = match state {
            State::InProgress => Stage::Launching,
            State::Done => Stage::Running(self.stream.record_event(None).map_err(cuda)?),
        };
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, FabricError> {
        let state = self.comm.as_ref().ok_or_else(ended)?.state()?;
        match (&self.stage, state) {
            (Stage::Launching, State::Done) => {
                self.stage = Stage::Running(self.stream.record_event(None).map_err(cuda)?);
                Ok(false)
            }
            (Stage::Running(event), State::Done) => event.try_is_complete().map_err(cuda),
            (Stage::Idle | Stage::Launching | Stage::Running(_), _) => Ok(false),
        }
    }

    fn finish(&mut self, transfer: &Transfer, bytes: &mut [u8]) -> Result<(), FabricError> {
        self.stage = Stage::Idle;
        let range = received(transfer, self.rank, self.world);
        if range.is_empty() {
            return Ok(());
        }
        let buffer = self.buffer.as_ref().ok_or_else(ended)?;
        self.stream.memcpy_dtoh(&buffer.slice(range.clone()), &mut bytes[range]).map_err(cuda)?;
        self.stream.synchronize().map_err(cuda)
    }

    fn abort(&mut self) {
        self.comm = None;
    }

    fn buffer_bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, CudaSlice::len)
    }
}

impl Drop for OnCard {
    fn drop(&mut self) {
        let Some(comm) = self.comm.take() else { return };
        if !matches!(self.stage, Stage::Idle) {
            return;
        }
        let deadline = Instant::now() + FAREWELL;
        comm.leave(|| {
            std::thread::sleep(PAUSE);
            Instant::now() < deadline
        });
    }
}

fn ended() -> FabricError {
    FabricError("the communicator was ended".to_owned())
}

fn cuda(error: DriverError) -> FabricError {
    FabricError(format!("CUDA: {error}"))
}

/// A number for a card: equal for ranks of one card, and unlikely to be for others.
fn number_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(blake3::hash(bytes).as_bytes()[..4].try_into().expect("a hash has 32 bytes"))
}
