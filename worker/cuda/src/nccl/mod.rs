//! NCCL as the [`Transport`] beside a ring.
//!
//! ```text
//! library   NCCL's C interface, loaded at run time
//! region    a tensor of burn's as memory that NCCL works on
//! limit     a time for calls that may hang, after which the process ends
//! here      one generation's transport: one stream, one transfer at a time, staging memory for what is not
//!           on the GPU
//! ```
//!
//! **Where buffers are.** Gradients, weights and what gradients travel in are tensors on the GPU
//! (`kernels::flat`), and transfers run in place on them. What lies in host memory (parts of a state that
//! moves in recovery, say) is staged: what this rank brings is copied to the GPU, and what it receives is
//! copied back.
//!
//! **Order.** The stream is our own, since cubecl lends none of its own. A transfer waits on the GPU for what
//! burn was told before it (`order`); the host waits for the end of the transfer, by an event, and what burn
//! is told then comes after.
//!
//! **Padding.** NCCL's chunks are equal. Tensors of the flat parameter buffer, and the staging memory, are
//! longer than their elements by what equal chunks of [`chunk`]'s size need; what lies there is reduced and
//! passed around with the rest, and never read.
//!
//! **The end.** A communicator that is ended in the middle of a transfer on a tensor ends its kernels; the
//! stream is then waited for, so that the memory is burn's alone again when [`Transport::abort`] returns.

mod library;
mod limit;
mod region;
#[cfg(test)]
mod tests;

use std::{ops::Range, sync::Arc, time::Duration};

use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DriverError};

use self::{
    library::{Call, Communicator, Kind, Memory, State},
    limit::{ABORT_LIMIT, within},
    region::Region,
};
use crate::{clock, order};
use coxswain_nn::kernels::flat::DeviceBuffer;
use coxswain_worker::collective::{
    Offer, Place, Transfer, TransferBuffer, TransferKind, Transport, TransportError, TransportId,
    TransportSource, chunk,
};

/// Between two looks at a communicator that connects or leaves.
const PAUSE: Duration = Duration::from_micros(200);
/// How long a rank that leaves in good order waits for the others to have read what it sent.
const FAREWELL: Duration = Duration::from_secs(5);

/// The library's version, `20000 + 100 * minor + patch`, or why there is none.
pub fn version() -> Result<u32, TransportError> {
    library::load().map(library::Nccl::version)
}

/// Makes NCCL communicators on one GPU.
pub struct NcclTransport {
    gpu: usize,
    context: Option<Arc<CudaContext>>,
}

impl NcclTransport {
    /// On the GPU of this number among those that the process sees.
    pub fn new(gpu: usize) -> Self {
        Self { gpu, context: None }
    }

    /// The GPU's primary context, the one that burn uses, current on this thread.
    fn context(&mut self) -> Result<Arc<CudaContext>, TransportError> {
        let context = match &self.context {
            Some(context) => context.clone(),
            None => self.context.insert(CudaContext::new(self.gpu).map_err(cuda)?).clone(),
        };
        context.bind_to_thread().map_err(cuda)?;
        Ok(context)
    }
}

impl TransportSource for NcclTransport {
    fn offer(&mut self) -> Result<Offer, TransportError> {
        let version = version()?;
        let uuid = self.context()?.uuid().map_err(cuda)?;
        let bytes: Vec<u8> = uuid.bytes.iter().map(|byte| *byte as u8).collect();
        Ok(Offer { version, gpu: number_of(&bytes) })
    }

    fn id(&mut self) -> Result<TransportId, TransportError> {
        self.context()?;
        library::load()?.unique_id()
    }

    fn connect(
        &mut self,
        place: &Place,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Transport>, TransportError> {
        let context = self.context()?;
        let (rank, world) = (place.rank.0 as usize, place.world);
        let began = clock::now();
        let comm = Communicator::begin(library::load()?, &place.id, rank, world)?;
        while comm.state()? == State::InProgress {
            if !go_on() {
                return Err(TransportError("a rank left while NCCL was connecting".to_owned()));
            }
            if clock::now() >= place.deadline {
                return Err(TransportError(format!(
                    "NCCL did not connect {world} ranks within {:.1?}; NCCL_DEBUG=INFO shows which interface it tries \
                     (NCCL_SOCKET_IFNAME chooses one)",
                    began.elapsed()
                )));
            }
            std::thread::sleep(PAUSE);
        }
        let stream = context.new_stream().map_err(cuda)?;
        Ok(Box::new(OnGpu {
            context,
            stream,
            comm: Some(comm),
            buffer: None,
            region: None,
            stage: Stage::Idle,
            rank,
            world,
        }))
    }
}

/// One generation's transport.
struct OnGpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// None after an abort.
    comm: Option<Communicator>,
    /// Staging memory.
    buffer: Option<CudaSlice<u8>>,
    /// The tensor that the transfer in flight works on.
    region: Option<Region>,
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

impl OnGpu {
    /// Staging memory of so many bytes.
    fn reserve(&mut self, bytes: usize) -> Result<CudaSlice<u8>, TransportError> {
        match self.buffer.take() {
            Some(buffer) if buffer.len() >= bytes => Ok(buffer),
            smaller => {
                drop(smaller);
                self.stream.alloc_zeros(bytes).map_err(cuda)
            }
        }
    }

    /// Copies what this rank brings to the GPU.
    fn bring(&mut self, transfer: &Transfer, bytes: &[u8], needed: usize) -> Result<(), TransportError> {
        let mut buffer = self.reserve(needed)?;
        let own = brought(transfer, self.rank, self.world);
        if !own.is_empty() {
            self.stream.memcpy_htod(&bytes[own.clone()], &mut buffer.slice_mut(own)).map_err(cuda)?;
        }
        self.buffer = Some(buffer);
        Ok(())
    }

    fn call(&self, transfer: &Transfer) -> Call {
        let part = transfer.length.div_ceil(self.world);
        let whole = |rank: usize| part * rank..part * (rank + 1);
        match transfer.kind {
            TransferKind::AllReduce(reduce) => Call::AllReduce { count: transfer.length, reduce },
            TransferKind::ReduceScatter(reduce) => Call::ReduceScatter { chunk: part, reduce },
            TransferKind::AllGather => Call::AllGather { chunk: part },
            TransferKind::Broadcast(root) => {
                Call::Broadcast { count: transfer.length, root: root.0 as usize }
            }
            TransferKind::Shift(distance) => {
                let [to, from] =
                    [self.rank + distance, self.rank + self.world - distance].map(|rank| rank % self.world);
                Call::Shift { send: whole(self.rank), to, receive: whole(from), from }
            }
        }
    }
}

/// Bytes of a transfer's equal chunks.
fn padded(transfer: &Transfer, world: usize) -> usize {
    transfer.length.div_ceil(world) * world * transfer.width
}

/// The bytes that a rank brings into a transfer.
fn brought(transfer: &Transfer, rank: usize, world: usize) -> Range<usize> {
    let own = chunk(transfer.length, world, rank);
    let elements = match transfer.kind {
        TransferKind::AllReduce(_) | TransferKind::ReduceScatter(_) => 0..transfer.length,
        TransferKind::AllGather | TransferKind::Shift(_) => own,
        TransferKind::Broadcast(root) if root.0 as usize == rank => 0..transfer.length,
        TransferKind::Broadcast(_) => 0..0,
    };
    elements.start * transfer.width..elements.end * transfer.width
}

/// The bytes that a rank receives from a transfer.
fn received(transfer: &Transfer, rank: usize, world: usize) -> Range<usize> {
    let elements = match transfer.kind {
        TransferKind::AllReduce(_) | TransferKind::AllGather => 0..transfer.length,
        TransferKind::ReduceScatter(_) => chunk(transfer.length, world, rank),
        TransferKind::Shift(distance) => chunk(transfer.length, world, (rank + world - distance) % world),
        TransferKind::Broadcast(root) if root.0 as usize == rank => 0..0,
        TransferKind::Broadcast(_) => 0..transfer.length,
    };
    elements.start * transfer.width..elements.end * transfer.width
}

impl Transport for OnGpu {
    fn reaches(&self, transfer: &Transfer, buffer: &dyn DeviceBuffer) -> bool {
        Region::reaches(buffer, padded(transfer, self.world))
    }

    fn start(&mut self, transfer: &Transfer, buffer: &mut TransferBuffer<'_>) -> Result<(), TransportError> {
        self.context.bind_to_thread().map_err(cuda)?;
        let needed = padded(transfer, self.world);
        match buffer {
            TransferBuffer::Host(bytes) => self.bring(transfer, bytes, needed)?,
            TransferBuffer::Device(buffer) => {
                let region = Region::of(*buffer, needed)?;
                if !order::after_everything(&self.context, &self.stream).map_err(cuda)? {
                    region.settle()?;
                }
                self.region = Some(region);
            }
        }
        let call = self.call(transfer);
        let comm = self.comm.as_ref().ok_or_else(ended)?;
        let memory = match (&self.region, &mut self.buffer) {
            (Some(region), _) => Memory::Tensor(region),
            (None, Some(buffer)) => Memory::Staging(buffer),
            (None, None) => return Err(ended()),
        };
        let kind = match transfer.width {
            2 => Kind::Bf16,
            4 => Kind::F32,
            _ => Kind::F64,
        };
        self.stage = match comm.start(&call, kind, memory, &self.stream)? {
            State::InProgress => Stage::Launching,
            State::Done => Stage::Running(self.stream.record_event(None).map_err(cuda)?),
        };
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, TransportError> {
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

    fn finish(&mut self, transfer: &Transfer, buffer: &mut TransferBuffer<'_>) -> Result<(), TransportError> {
        self.stage = Stage::Idle;
        self.region = None;
        let range = received(transfer, self.rank, self.world);
        let TransferBuffer::Host(bytes) = buffer else { return Ok(()) };
        if range.is_empty() {
            return Ok(());
        }
        let buffer = self.buffer.as_ref().ok_or_else(ended)?;
        self.stream.memcpy_dtoh(&buffer.slice(range.clone()), &mut bytes[range]).map_err(cuda)?;
        self.stream.synchronize().map_err(cuda)
    }

    fn abort(&mut self) {
        self.comm = None;
        if self.region.is_some() {
            // Nothing can be done about what the ended transfer leaves to say.
            let _ = within(ABORT_LIMIT, "the GPU sync after ncclCommAbort", || self.stream.synchronize());
        }
        self.region = None;
    }

    fn buffer_bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, CudaSlice::len)
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        if !matches!(self.stage, Stage::Idle) {
            self.abort();
        }
        let Some(comm) = self.comm.take() else { return };
        let deadline = clock::now() + FAREWELL;
        comm.leave(|| {
            std::thread::sleep(PAUSE);
            clock::now() < deadline
        });
    }
}

fn ended() -> TransportError {
    TransportError("the NCCL communicator was aborted".to_owned())
}

fn cuda(error: DriverError) -> TransportError {
    TransportError(format!("CUDA: {error}"))
}

/// A number for a GPU: equal for ranks of one GPU, and unlikely to be for others.
fn number_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(blake3::hash(bytes).as_bytes()[..4].try_into().expect("a hash has 32 bytes"))
}
