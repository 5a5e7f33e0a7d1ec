//! A rule of whole matrices from outside the engine, on rings of several ranks: each matrix belongs to one
//! rank and its replica to another, and partitioned, saved and read again at another world size it gives the
//! bits of itself on one rank.
//!
//! Rank 0 brings the whole gradient and nothing is clipped, so that sums are the same at any world size.

mod rule;

use std::{
    sync::{Arc, Barrier, Mutex},
    time::{Duration, Instant},
};

use coxswain_nn::params::{Group, Init, TrainableLayout};
use coxswain_proto::{
    ids::{Generation, Rank},
    run_spec::{Optimizer, PerGroup},
};
use coxswain_worker::{
    collective::{Collective, Membership, Ring, RingAbort, RingListener},
    zero::{Copy, Rates, ReplicatedOptimizer, RunRule, StepInput},
};
use rule::Orthogonal;

const GROUP: Group = Group("network");

fn layout() -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (name, shape) in
        [("in.weight", &[6, 9][..]), ("in.bias", &[6]), ("middle.weight", &[8, 6]), ("out.weight", &[3, 8])]
    {
        layout.add(name.into(), shape, GROUP, shape.len() > 1, Init::Zeros);
    }
    layout
}

fn run_rule() -> RunRule<Vec<f32>> {
    let settings = Optimizer { clip_norm: PerGroup::All(0.0), ema_decay: Some(0.9), ..Optimizer::default() };
    RunRule { settings, rule: Arc::new(Orthogonal { momentum: 0.9 }) }
}

fn optimizer(world: usize, rank: usize) -> ReplicatedOptimizer {
    ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), run_rule(), Some(1))
}

/// Values that look random and are the same everywhere.
fn noise(salt: usize) -> Vec<f32> {
    (0..layout().len()).map(|i| ((i * 7919 + salt * 104_729) % 2017) as f32 / 1008.5 - 1.0).collect()
}

/// Runs `body` on every rank of a ring; results by rank.
fn on_ring<R: Send>(world: usize, body: impl Fn(usize, &mut Ring) -> R + Sync) -> Vec<R> {
    let (addresses, all) = (Mutex::new(vec![String::new(); world]), Barrier::new(world));
    let be_a_rank = |rank: usize| {
        let listener = RingListener::bind("127.0.0.1:0").expect("a free port");
        addresses.lock().expect("no rank panics")[rank] = listener.address().to_string();
        all.wait();
        let peers = addresses.lock().expect("no rank panics").clone();
        let membership = Membership::among("matrices", Generation(1), Rank(rank as u32), &peers);
        let deadline = Instant::now() + Duration::from_secs(30);
        let ring = Ring::connect(&listener, &membership, deadline, &RingAbort::new());
        body(rank, &mut ring.expect("all ranks are there"))
    };
    std::thread::scope(|scope| {
        let be_a_rank = &be_a_rank;
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || be_a_rank(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

fn take_steps(
    optimizer: &mut ReplicatedOptimizer,
    comm: &mut dyn Collective,
    weights: &mut Vec<f32>,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let mut grads = if comm.rank().0 == 0 { noise(1 + step) } else { vec![0.0; weights.len()] };
        let input = StepInput { scale: 0.5, rates: Rates::from([(GROUP.0, 1e-2)]), resting: None };
        optimizer.step(&mut grads, weights, &input, comm).expect("a step");
    }
}

/// Weights and file of each rank after some steps.
fn trained(world: usize, steps: usize) -> Vec<(Vec<f32>, Vec<u8>)> {
    on_ring(world, |rank, ring| {
        let (mut optimizer, mut weights) = (optimizer(world, rank), noise(0));
        optimizer.begin_average(&weights);
        optimizer.begin(0, 0, &weights);
        take_steps(&mut optimizer, ring, &mut weights, 0..steps);
        if let Some(replica) = optimizer.state(Copy::Replica, steps as u64, &weights, &Vec::new()) {
            let part = optimizer.part_in(world, (rank + world - 1) % world);
            assert!(replica.weights[..] == weights[part], "rank {rank} of {world} has its owner's weights");
        }
        let mut file = Vec::new();
        optimizer.write_to(&mut file).expect("to memory");
        (weights, file)
    })
}

#[test]
fn every_matrix_belongs_to_one_rank_whole() {
    for world in 1..=6 {
        let cuts = optimizer(world, 0).cuts_in(world);
        for param in layout().params() {
            let owners = (0..world).filter(|rank| {
                let part = cuts.part(*rank);
                part.start <= param.offset && param.range().end <= part.end
            });
            assert_eq!(owners.count(), 1, "{} in a world of {world}", param.name);
        }
    }
}

#[test]
fn any_number_of_ranks_learns_the_same_bits_also_after_a_change_of_world() {
    let alone = trained(1, 5);
    for world in 2..=4 {
        assert!(trained(world, 5).iter().all(|(weights, _)| *weights == alone[0].0), "{world} ranks");
        let saved = trained(world, 3);
        let files: Vec<&[u8]> = saved.iter().map(|(_, file)| file.as_slice()).collect();
        let other = 1 + world % 4;
        let resumed = on_ring(other, |rank, ring| {
            let (mut optimizer, mut weights) = (optimizer(other, rank), saved[0].0.clone());
            optimizer.import(&files, &weights).expect("the files are whole");
            take_steps(&mut optimizer, ring, &mut weights, 3..5);
            weights
        });
        assert!(resumed.iter().all(|weights| *weights == alone[0].0), "{world} ranks, then {other}");
    }
}

#[test]
fn the_update_of_a_matrix_is_orthogonal() {
    let before = noise(0);
    let weights = trained(1, 1).remove(0).0;
    let layout = layout();
    let param = &layout.params()[2];
    let decay = 1.0 - 1e-2 * 1e-8;
    let step: Vec<f32> = param
        .range()
        .map(|at| ((f64::from(before[at]) * decay - f64::from(weights[at])) / 1e-2) as f32)
        .collect();
    let [rows, columns] = param.shape[..] else { panic!("it is a matrix") };
    // Five iterations bring singular values to 0.7 to 1.2: the columns are nearly of that length.
    for column in 0..columns {
        let length = (0..rows).map(|row| step[row * columns + column].powi(2)).sum::<f32>().sqrt();
        assert!((0.6..1.3).contains(&length), "column {column} has length {length}");
    }
}
