//! A transport that is a second ring on a thread of its own: what the two do together, and what happens when
//! either fails. The collectives' values are tested by `collective::conformance`.

use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};

use super::*;
use crate::collective::loopback;
use coxswain_nn::kernels::flat::HostCopy;

type Job = (Transfer, Vec<u8>);

/// Carries by another ring, asynchronously.
struct OtherRing {
    /// Whether it works on a device's buffers itself.
    reaches: bool,
    jobs: Sender<Job>,
    done: Receiver<Result<Vec<u8>, CollectiveError>>,
    abort: Arc<dyn AbortHandle>,
    result: Vec<u8>,
}

impl OtherRing {
    fn new(mut ring: Ring) -> Self {
        // Ranks need not agree.
        let reaches = ring.rank().0.is_multiple_of(2);
        let (jobs, todo) = mpsc::channel::<Job>();
        let (results, done) = mpsc::channel();
        let abort = ring.abort_handle();
        std::thread::spawn(move || {
            while let Ok((transfer, bytes)) = todo.recv() {
                let moved = match transfer.width {
                    2 => run(&mut ring, &transfer, &bytes, |values| BufMut::Bf16(values)),
                    4 => run(&mut ring, &transfer, &bytes, |values| BufMut::F32(values)),
                    _ => run(&mut ring, &transfer, &bytes, |values| BufMut::F64(values)),
                };
                if results.send(moved).is_err() {
                    return;
                }
            }
        });
        Self { reaches, jobs, done, abort, result: Vec::new() }
    }
}

fn run<T: Element>(
    ring: &mut Ring,
    transfer: &Transfer,
    bytes: &[u8],
    as_buffer: impl for<'a> Fn(&'a mut [T]) -> BufMut<'a>,
) -> Result<Vec<u8>, CollectiveError> {
    let mut values: Vec<T> = bytemuck::pod_collect_to_vec(bytes);
    let buffer = as_buffer(&mut values);
    match transfer.kind {
        TransferKind::AllReduce(reduce) => ring.all_reduce(buffer, reduce),
        TransferKind::ReduceScatter(reduce) => ring.reduce_scatter_in_place(buffer, reduce),
        TransferKind::AllGather => ring.all_gather_in_place(buffer),
        TransferKind::Shift(distance) => ring.shift_in_place(buffer, distance),
        TransferKind::Broadcast(root) => ring.broadcast(buffer, root),
    }?;
    Ok(bytemuck::cast_slice(&values).to_vec())
}

/// The bytes of a buffer, wherever it is; `change` says whether it has changed them.
fn with_bytes(buffer: &mut TransferBuffer<'_>, mut change: impl FnMut(&mut [u8]) -> bool) {
    match buffer {
        TransferBuffer::Host(bytes) => drop(change(bytes)),
        TransferBuffer::Device(buffer) => buffer.through_host(&mut |copy| match copy {
            HostCopy::Bf16(values) => change(bytemuck::cast_slice_mut(values)),
            HostCopy::F32(values) => change(bytemuck::cast_slice_mut(values)),
        }),
    }
}

impl Transport for OtherRing {
    fn reaches(&self, _: &Transfer, _: &dyn DeviceBuffer) -> bool {
        self.reaches
    }

    fn start(&mut self, transfer: &Transfer, buffer: &mut TransferBuffer<'_>) -> Result<(), TransportError> {
        let mut brought = Vec::new();
        with_bytes(buffer, |bytes| {
            brought = bytes.to_vec();
            false
        });
        self.jobs.send((*transfer, brought)).map_err(|_| TransportError("the thread is gone".into()))
    }

    fn poll(&mut self) -> Result<bool, TransportError> {
        match self.done.try_recv() {
            Ok(Ok(bytes)) => {
                self.result = bytes;
                Ok(true)
            }
            Ok(Err(error)) => Err(TransportError(error.to_string())),
            Err(TryRecvError::Empty) => Ok(false),
            Err(TryRecvError::Disconnected) => Err(TransportError("the thread is gone".into())),
        }
    }

    fn finish(
        &mut self,
        _transfer: &Transfer,
        buffer: &mut TransferBuffer<'_>,
    ) -> Result<(), TransportError> {
        with_bytes(buffer, |bytes| {
            bytes.copy_from_slice(&self.result);
            true
        });
        Ok(())
    }

    fn abort(&mut self) {
        self.abort.abort("the transport was ended");
    }

    fn buffer_bytes(&self) -> usize {
        self.result.capacity()
    }
}

/// Recipes for ranks whose buffers above 64 bytes go another way.
pub(in crate::collective) fn over_another_ring(
    world: usize,
) -> Vec<impl FnOnce() -> HybridCollective + Send> {
    let pairs = loopback(world).into_iter().zip(loopback(world));
    let beside = |(control, data): (_, _)| {
        move || {
            let ring = connected(control);
            HybridCollective { ring, transport: Box::new(OtherRing::new(connected(data))), small: 64 }
        }
    };
    pairs.map(beside).collect()
}

/// Recipes for ranks whose buffers above 64 bytes go nowhere, in the best of order.
pub(in crate::collective) fn beside_nothing(world: usize) -> Vec<impl FnOnce() -> HybridCollective + Send> {
    let beside = |control| {
        move || HybridCollective {
            ring: connected(control),
            transport: Box::new(ScriptedTransport::Idle),
            small: 64,
        }
    };
    loopback(world).into_iter().map(beside).collect()
}

fn connected(connect: impl FnOnce() -> Ring) -> Ring {
    connect()
}

/// A transport that moves nothing.
enum ScriptedTransport {
    /// Says that it has.
    Idle,
    /// Never ends.
    Stuck,
    /// Fails at once.
    Fails(&'static str),
}

impl Transport for ScriptedTransport {
    fn start(&mut self, _: &Transfer, _: &mut TransferBuffer<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, TransportError> {
        match self {
            Self::Idle => Ok(true),
            Self::Stuck => Ok(false),
            Self::Fails(words) => Err(TransportError((*words).into())),
        }
    }

    fn finish(&mut self, _: &Transfer, _: &mut TransferBuffer<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    fn abort(&mut self) {}

    fn buffer_bytes(&self) -> usize {
        0
    }
}

/// Runs every rank of a loopback ring on its own thread.
fn on_all<R: Send>(world: usize, body: impl Fn(Ring) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> =
            loopback(world).into_iter().map(|connect| scope.spawn(move || body(connect()))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn large(comm: &mut dyn Collective) -> Result<(), CollectiveError> {
    comm.all_reduce(BufMut::F32(&mut vec![1.0; 1 << 16]), Reduce::Sum)
}

#[test]
fn a_transport_that_fails_ends_the_communicator_with_what_it_reported() {
    for outcome in on_all(3, |ring| {
        let transport = Box::new(ScriptedTransport::Fails("unhandled system error"));
        let mut comm = HybridCollective { ring, transport, small: SMALL };
        (large(&mut comm), comm.barrier())
    }) {
        let error = outcome.0.expect_err("the transport fails").to_string();
        assert!(error.contains("unhandled system error") && error.contains("all_reduce"), "{error}");
        assert!(outcome.1.is_err(), "what has failed stays failed");
    }
}

#[test]
fn a_transfer_that_stands_still_ends_with_an_abort() {
    for outcome in on_all(2, |ring| {
        let handle = ring.abort_handle();
        let progress = ring.progress();
        let mut comm = HybridCollective { ring, transport: Box::new(ScriptedTransport::Stuck), small: SMALL };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while progress.entered.load(std::sync::atomic::Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
                handle.abort("told to");
            });
            large(&mut comm)
        })
    }) {
        let error = outcome.expect_err("nobody finishes");
        let ended = matches!(error, CollectiveError::Aborted { .. } | CollectiveError::PeerLost { .. });
        assert!(ended, "{error}");
    }
}

#[test]
fn a_rank_that_dies_in_a_transfer_is_noticed_without_a_coordinator() {
    let outcomes = on_all(3, |ring| {
        let rank = ring.rank().0;
        let mut comm = HybridCollective { ring, transport: Box::new(ScriptedTransport::Stuck), small: SMALL };
        if rank == 0 {
            // It has announced the collective and is gone before it ends.
            let call =
                Call { operation: Operation::AllReduce, reduce: Some(Reduce::Sum), root: 0, length: 1 << 16 };
            comm.ring.announce::<f32>(&call).expect("all are here");
            return None;
        }
        Some(large(&mut comm))
    });
    for outcome in outcomes.into_iter().flatten() {
        let error = outcome.expect_err("rank 0 is gone");
        assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
    }
}

/// Offers what it is told to, and connects to a transport that fails when it is used.
struct Source {
    offer: Result<Offer, TransportError>,
    connects: bool,
}

impl TransportSource for Source {
    fn offer(&mut self) -> Result<Offer, TransportError> {
        self.offer.clone()
    }

    fn id(&mut self) -> Result<TransportId, TransportError> {
        Ok(std::array::from_fn(|i| i as u8))
    }

    fn connect(
        &mut self,
        place: &Place,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Transport>, TransportError> {
        assert!(place.id.iter().enumerate().all(|(i, byte)| *byte == i as u8), "the id arrives whole");
        assert!(go_on(), "nobody has left");
        match self.connects {
            true => Ok(Box::new(ScriptedTransport::Fails("scripted"))),
            false => Err(TransportError("invalid usage".into())),
        }
    }
}

/// What all ranks end up with: true is a transport. `source` makes each rank's.
fn joined(
    wanted: Collectives,
    source: impl Fn(u32) -> Option<Source> + Sync,
) -> Vec<Result<bool, CollectiveError>> {
    on_all(3, |ring| {
        let mut source = source(ring.rank().0);
        let source = source.as_mut().map(|source| source as &mut (dyn TransportSource + 'static));
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut comm = join(ring, wanted, Brings { computes: Computes::OnGpu, source, deadline })?;
        comm.barrier()?;
        match large(comm.as_mut()) {
            Ok(()) => Ok(false),
            Err(CollectiveError::Transport { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    })
}

fn offer(version: u32, gpu: u32) -> Result<Offer, TransportError> {
    Ok(Offer { version, gpu })
}

#[test]
fn a_transport_is_used_only_if_all_ranks_can() {
    let all = |rank| Some(Source { offer: offer(22_800, rank), connects: true });
    assert!(joined(Collectives::Auto, all).into_iter().all(|used| used.expect("joined")));
    assert!(joined(Collectives::Ring, all).into_iter().all(|used| !used.expect("joined")));
    let one_without = |rank| (rank != 1).then(|| Source { offer: offer(22_800, rank), connects: true });
    assert!(joined(Collectives::Auto, one_without).into_iter().all(|used| !used.expect("joined")));
    let one_fails = |rank| Some(Source { offer: offer(22_800, rank), connects: rank != 2 });
    assert!(joined(Collectives::Auto, one_fails).into_iter().all(|used| !used.expect("joined")));
}

#[test]
fn what_was_asked_for_and_cannot_be_is_refused_with_the_ranks_and_the_reason() {
    type Choice = fn(u32) -> Option<Source>;
    let cases: [(Choice, &str); 4] = [
        (|_| None, "no GPU with NCCL on ranks 0, 1, 2"),
        (|rank| (rank != 1).then(|| Source { offer: offer(1, rank), connects: true }), "on rank 1"),
        (
            |rank| Some(Source { offer: offer(1 + rank, rank), connects: true }),
            "different versions of NCCL: [1, 2, 3]",
        ),
        (|rank| Some(Source { offer: offer(1, rank / 2), connects: rank == 2 }), "ranks 0 and 1 share a GPU"),
    ];
    for (source, expected) in cases {
        for outcome in joined(Collectives::Nccl, source) {
            let error = outcome.expect_err("refused on every rank").to_string();
            assert!(error.contains(expected) && error.contains("launch.collectives"), "{error}");
        }
    }
}

#[test]
fn a_world_that_mixes_devices_by_mistake_is_refused_on_every_rank() {
    for wanted in [Collectives::Auto, Collectives::Ring] {
        let outcomes = on_all(3, |ring| {
            let stranded = ring.rank().0 == 1;
            let computes = if stranded { Computes::OnCpuForWantOfGpu } else { Computes::OnGpu };
            let deadline = Instant::now() + Duration::from_secs(30);
            join(ring, wanted, Brings { computes, source: None, deadline }).map(drop)
        });
        for outcome in outcomes {
            let error = outcome.expect_err("refused").to_string();
            assert!(error.contains("rank 1 found no GPU") && error.contains("ranks 0, 2 would"), "{error}");
        }
    }
}

#[test]
fn small_all_gathers_are_seen_ahead_and_large_ones_are_not() {
    std::thread::scope(|scope| {
        for connect in over_another_ring(2) {
            scope.spawn(move || {
                let comm = connect();
                assert!(comm.ahead(64 / size_of::<f64>()).is_some() && comm.ahead(1000).is_none());
            });
        }
    });
}
