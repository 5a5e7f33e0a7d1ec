//! What needs no card: which bytes travel. What needs one says so and passes: one rank
//! on each card of this machine. Several ranks on one card need a process each (`docs/gpu.md`).

use coxswain_proto::{
    ids::{Generation, Rank},
    run_spec::Collectives,
};
use coxswain_worker::{
    collective::{BufMut, Collective, Membership, Reduce, Ring, RingAbort, RingListener, join},
    device::Accelerator,
};

use super::*;
use crate::Nvidia;

fn transfer(movement: Movement) -> Transfer {
    Transfer { movement, length: 10, width: 4 }
}

#[test]
fn a_rank_copies_only_what_it_brings_and_only_what_it_receives() {
    // Ten elements on four ranks: chunks of 3, 3, 3, 1.
    for (movement, rank, bytes_in, bytes_out) in [
        (Movement::AllReduce(Reduce::Sum), 1, 0..40, 0..40),
        (Movement::ReduceScatter(Reduce::Sum), 3, 0..40, 36..40),
        (Movement::AllGather, 3, 36..40, 0..40),
        (Movement::Shift, 0, 0..12, 36..40),
        (Movement::Broadcast(Rank(2)), 2, 0..40, 0..0),
        (Movement::Broadcast(Rank(2)), 0, 0..0, 0..40),
    ] {
        let transfer = transfer(movement);
        assert_eq!(brought(&transfer, rank, 4), bytes_in, "{movement:?} brings");
        assert_eq!(received(&transfer, rank, 4), bytes_out, "{movement:?} receives");
    }
}

#[test]
fn without_the_library_there_is_a_sentence() {
    if let Err(missing) = version() {
        assert!(missing.to_string().contains("NCCL") && missing.to_string().contains("install"), "{missing}");
    }
}

/// Whether this machine has a card and NCCL; says so if not.
fn usable() -> bool {
    let found = Nvidia.probe().map_err(|missing| missing.to_string());
    let found = found.and_then(|_| version().map_err(|missing| missing.to_string()));
    if let Err(missing) = &found {
        eprintln!("skipped: {missing}");
    }
    found.is_ok()
}

/// Every rank's communicator over NCCL, on cards `rank % cards`.
fn on_cards<R: Send>(world: usize, body: impl Fn(&mut dyn Collective) -> R + Sync) -> Vec<R> {
    let cards = Nvidia.probe().map_or(1, |cards| cards.count);
    let listeners: Vec<_> =
        (0..world).map(|_| RingListener::bind("127.0.0.1:0").expect("loopback has free ports")).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_owned()).collect();
    std::thread::scope(|scope| {
        let (body, addresses) = (&body, &addresses);
        let ranks = listeners.iter().enumerate().map(|(rank, listener)| {
            scope.spawn(move || {
                let mut source = NcclFabric::new(rank % cards);
                let deadline = Instant::now() + Duration::from_secs(60);
                let membership = Membership::among("test", Generation(1), Rank(rank as u32), addresses);
                let ring = Ring::connect(listener, &membership, deadline, &RingAbort::new());
                let comm = join(ring.expect("a ring forms"), Some(&mut source), Collectives::Nccl, deadline);
                body(comm.expect("NCCL connects").as_mut())
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn every_movement_gives_its_values(world: usize) {
    const LENGTH: usize = 100_003;
    let value = |rank: usize, at: usize| ((rank * 31 + at * 7) % 1009) as f32 - 500.0;
    let outcomes = on_cards(world, |comm| {
        let rank = comm.rank().0 as usize;
        let own: Vec<f32> = (0..LENGTH).map(|at| value(rank, at)).collect();
        // Whole numbers far below 2^24: exact in any order.
        let sum: Vec<f32> = (0..LENGTH).map(|at| (0..world).map(|rank| value(rank, at)).sum()).collect();
        let mut buffer = own.clone();
        comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum).expect("all_reduce");
        assert!(buffer == sum, "all_reduce");
        let mut buffer = own.clone();
        comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum).expect("reduce_scatter");
        let part = chunk(LENGTH, world, rank);
        assert!(buffer[part.clone()] == sum[part], "reduce_scatter");
        comm.all_gather_in_place(BufMut::F32(&mut buffer)).expect("all_gather");
        assert!(buffer == sum, "all_gather");
        let mut buffer = own.clone();
        comm.shift_in_place(BufMut::F32(&mut buffer)).expect("shift");
        let previous = (rank + world - 1) % world;
        assert!(chunk(LENGTH, world, previous).all(|at| buffer[at] == value(previous, at)), "shift");
        let mut buffer: Vec<f64> = own.iter().map(|x| f64::from(*x)).collect();
        comm.broadcast(BufMut::F64(&mut buffer), Rank(world as u32 - 1)).expect("broadcast");
        assert!((0..LENGTH).all(|at| buffer[at] == f64::from(value(world - 1, at))), "broadcast");
        comm.buffer_bytes()
    });
    assert!(outcomes.iter().all(|bytes| *bytes > 4 * LENGTH));
}

#[test]
fn nccl_gives_every_collectives_values_on_one_rank_a_card() {
    if usable() {
        let cards = Nvidia.probe().map_or(1, |cards| cards.count);
        (1..=cards).for_each(every_movement_gives_its_values);
    }
}
