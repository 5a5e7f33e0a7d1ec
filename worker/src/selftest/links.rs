//! Every collective between ranks of this machine, each a thread: over the ring on loopback, and on GPUs over
//! NCCL as well.

use std::time::Duration;

use coxswain_proto::{
    ids::{Generation, Rank},
    run_spec::Collectives,
};

use super::Finding;
use crate::{
    clock,
    collective::{
        self, Brings, BufMut, Collective, CollectiveError, Computes, Membership, Reduce, Ring, RingAbort,
        RingListener, TransportSource, chunk,
    },
    device::{Accelerator, Device},
};

/// Elements of a timed buffer: 16 MiB.
const LENGTH: usize = 4 << 20;
/// Timed rounds; one more goes first.
const ROUNDS: usize = 3;
/// How long ranks look for each other.
const PATIENCE: Duration = Duration::from_secs(60);

type Operation = fn(&mut dyn Collective, &mut [f32]) -> Result<(), CollectiveError>;

/// Verified by their values, then timed.
const OPERATIONS: [(&str, Operation); 5] = [
    ("all_reduce", |comm, buffer| comm.all_reduce(BufMut::F32(buffer), Reduce::Sum)),
    ("reduce_scatter", |comm, buffer| comm.reduce_scatter_in_place(BufMut::F32(buffer), Reduce::Sum)),
    ("all_gather", |comm, buffer| comm.all_gather_in_place(BufMut::F32(buffer))),
    ("shift", |comm, buffer| comm.shift_in_place(BufMut::F32(buffer), 1)),
    ("broadcast", |comm, buffer| comm.broadcast(BufMut::F32(buffer), Rank(0))),
];

/// Verifies and times all collectives that ranks on `device` would use.
pub(super) fn links(device: Device, accelerator: &dyn Accelerator) -> Vec<Finding> {
    let mut found = over("ring", 2, |_| None);
    if let Device::Cuda(_) = device {
        let gpus = accelerator.probe().map_or(1, |gpus| gpus.count);
        found.extend(over("NCCL", gpus, |rank| Some(accelerator.on_gpu().transport(rank % gpus))));
    }
    found
}

/// The findings of one world; `source` makes a rank's transport.
fn over(
    name: &str,
    world: usize,
    source: impl Fn(usize) -> Option<Box<dyn TransportSource>> + Sync,
) -> Vec<Finding> {
    let listeners: Result<Vec<_>, _> = (0..world).map(|_| RingListener::bind("127.0.0.1:0")).collect();
    let listeners = match listeners {
        Ok(listeners) => listeners,
        Err(error) => return vec![Finding::checked("collectives", name, Err(error.to_string()))],
    };
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.address().to_owned()).collect();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let (addresses, source) = (&addresses, &source);
        let ranks = listeners.iter().enumerate().map(|(rank, listener)| {
            scope.spawn(move || {
                let membership = Membership::among("selftest", Generation(1), Rank(rank as u32), addresses);
                let deadline = clock::now() + PATIENCE;
                let ring = Ring::connect(listener, &membership, deadline, &RingAbort::new())?;
                let mut source = source(rank);
                let wanted = if source.is_some() { Collectives::Nccl } else { Collectives::Ring };
                let source = source.as_mut().map(|source| source.as_mut());
                let brings = Brings { computes: Computes::default(), source, deadline };
                let mut comm = collective::join(ring, wanted, brings)?;
                OPERATIONS
                    .iter()
                    .map(|(name, run)| measured(comm.as_mut(), name, *run))
                    .collect::<Result<Vec<_>, _>>()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank returns its failures")).collect()
    });
    let mut slowest = vec![(Duration::ZERO, true); OPERATIONS.len()];
    for outcome in outcomes {
        match outcome {
            Err(error) => return vec![Finding::checked("collectives", name, Err(error.to_string()))],
            Ok(times) => slowest.iter_mut().zip(times).for_each(|(all, one)| {
                *all = (all.0.max(one.0), all.1 && one.1);
            }),
        }
    }
    let lines = OPERATIONS.iter().zip(slowest).map(|((operation, _), (took, right))| {
        let what = format!("{operation}, {name}, {world} rank{}", if world == 1 { "" } else { "s" });
        let ms = took.as_secs_f64() * 1e3;
        let rate = 4.0 * LENGTH as f64 / 1e9 / took.as_secs_f64().max(1e-9);
        let told = format!("{ms:.1} ms for {} MiB ({rate:.2} GB/s)", (4 * LENGTH) >> 20);
        let outcome = if right { Ok(told) } else { Err("a rank received wrong values".to_owned()) };
        Finding::checked("collectives", what, outcome)
    });
    lines.collect()
}

/// The best time of an operation on this rank, and whether its values were right.
fn measured(
    comm: &mut dyn Collective,
    name: &str,
    run: Operation,
) -> Result<(Duration, bool), CollectiveError> {
    let (rank, world) = (comm.rank().0 as usize, comm.world());
    let mut buffer = vec![0.0f32; LENGTH];
    let (mut best, mut right) = (Duration::MAX, true);
    for round in 0..=ROUNDS {
        buffer.iter_mut().enumerate().for_each(|(at, value)| *value = value_of(rank, at));
        comm.barrier()?;
        let begin = clock::now();
        run(comm, &mut buffer)?;
        let took = begin.elapsed();
        if round > 0 {
            best = best.min(took);
        }
        right &= is_right(name, &buffer, rank, world);
    }
    Ok((best, right))
}

/// Whole numbers below 2^10: sums of any world that fits a machine are exact in any order.
fn value_of(rank: usize, at: usize) -> f32 {
    ((rank * 31 + at * 7) % 1009) as f32
}

fn is_right(operation: &str, buffer: &[f32], rank: usize, world: usize) -> bool {
    let sum = |at: usize| (0..world).map(|rank| value_of(rank, at)).sum::<f32>();
    let owner = |at: usize| at / buffer.len().div_ceil(world);
    let mut all = 0..buffer.len();
    match operation {
        "all_reduce" => all.all(|at| buffer[at] == sum(at)),
        "reduce_scatter" => chunk(buffer.len(), world, rank).all(|at| buffer[at] == sum(at)),
        "all_gather" => all.all(|at| buffer[at] == value_of(owner(at), at)),
        "shift" => {
            let previous = (rank + world - 1) % world;
            chunk(buffer.len(), world, previous).all(|at| buffer[at] == value_of(previous, at))
        }
        _ => all.all(|at| buffer[at] == value_of(0, at)),
    }
}
