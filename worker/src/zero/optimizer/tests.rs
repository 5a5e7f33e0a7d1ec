//! The partitioned optimizer against itself without partition; against torch (`torch`), and against itself
//! resumed (`saved`); the average of its weights against a plain loop (`average`).

mod average;
mod blocks;
mod device;
mod saved;
mod torch;

use coxswain_proto::run_spec::{PerGroup, ReduceDtype};
use half::bf16;

use super::*;
use crate::{
    collective::{Cuts, Ring, Solo, chunk, loopback},
    zero::{Copy, ReplicatedOptimizer},
};
use coxswain_nn::params::Init;

/// A few tensors of odd sizes, so that shard borders cut them.
fn layout() -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (name, shape, group, decay) in [
        ("lora.a", &[5, 7][..], Group::LORA, true),
        ("lora.b", &[9, 5], Group::LORA, true),
        ("expert.weight", &[16, 11], Group("expert"), true),
        ("expert.bias", &[16], Group("expert"), false),
        ("sensor.weight", &[3, 5], Group("sensor"), true),
    ] {
        layout.add(name.into(), shape, group, decay, Init::Zeros);
    }
    layout
}

fn settings() -> Optimizer {
    Optimizer { weight_decay: PerGroup::All(0.1), clip_norm: PerGroup::All(0.5), ..Optimizer::default() }
}

fn input() -> StepInput {
    StepInput {
        scale: 0.25,
        rates: Rates::from([("lora", 1e-3), ("expert", 1e-2), ("sensor", 3e-3)]),
        resting: None,
    }
}

/// Values that look random and are the same everywhere.
fn noise(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|i| (((i * 7919 + salt * 104_729) % 2017) as f32 / 1008.5 - 1.0) * 0.7).collect()
}

/// Runs `body` on every rank of a ring of `world`; results by rank.
fn on_ring<R: Send>(world: usize, body: impl Fn(usize, &mut Ring) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let start = |(rank, connect): (usize, _)| scope.spawn(move || body(rank, &mut connect_with(connect)));
        let threads: Vec<_> = loopback(world).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

fn connect_with(connect: impl FnOnce() -> Ring) -> Ring {
    connect()
}

/// Takes `steps` steps with gradients that differ by rank; returns the weights.
fn run(
    optimizer: &mut ShardedOptimizer,
    comm: &mut dyn Collective,
    weights: &mut Vec<f32>,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let mut grads = noise(weights.len(), 1 + 10 * step + comm.rank().0 as usize);
        optimizer.step(&mut grads, weights, &input(), comm).expect("a step");
    }
}

/// Optimizers and weights of all ranks after `steps` steps from zero moments.
fn trained(world: usize, steps: usize) -> Vec<(ShardedOptimizer, Vec<f32>)> {
    on_ring(world, |rank, comm| {
        let mut optimizer = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
        let mut weights = noise(layout().len(), 0);
        run(&mut optimizer, comm, &mut weights, 0..steps);
        (optimizer, weights)
    })
}

fn moments(ranks: &[ShardedOptimizer]) -> (Vec<f32>, Vec<f32>) {
    let join = |number: usize| ranks.iter().flat_map(|o| floats(&o.state[number]).clone()).collect();
    (join(0), join(1))
}

fn floats<F: Flat>(values: &StateValues<F>) -> &F {
    match values {
        StateValues::Float32(values) => values,
        StateValues::Uint8(_) => panic!("AdamW's moments are float32"),
    }
}

/// Gradients are summed here in the ring's own order, so the only difference left is the order in which f64
/// partial sums of squares meet: it is below the last bit of the f32 factor that gradients are multiplied
/// with.
#[test]
fn partitioned_steps_give_the_bits_of_unpartitioned_ones() {
    let len = layout().len();
    for world in 2..=4 {
        let partitioned = trained(world, 5);
        let mut optimizer = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings());
        let mut weights = noise(len, 0);
        for step in 0..5 {
            let all: Vec<_> = (0..world).map(|rank| noise(len, 1 + 10 * step + rank)).collect();
            let mut grads = vec![0.0; len];
            for owner in 0..world {
                for at in chunk(len, world, owner) {
                    let order = (1..=world).map(|hop| all[(owner + hop) % world][at]);
                    grads[at] = order.reduce(|sum, next| sum + next).expect("a world has a rank");
                }
            }
            optimizer.step(&mut grads, &mut weights, &input(), &mut Solo::default()).expect("a step");
        }
        for (_, theirs) in &partitioned {
            assert!(*theirs == weights, "a world of {world}");
        }
        let ranks: Vec<_> = partitioned.into_iter().map(|(optimizer, _)| optimizer).collect();
        assert!(moments(&ranks) == moments(&[optimizer]));
    }
}

/// Partitioned steps with sums that are rounded wherever the ring rounds them: the same bits on all ranks,
/// owner and replica.
#[test]
fn gradients_that_travel_as_bfloat16_are_rounded_on_the_way_and_nowhere_else() {
    let len = layout().len();
    let settings = Optimizer { reduce_dtype: ReduceDtype::Bfloat16, ..settings() };
    for (world, distance) in (2..=4).flat_map(|world| (1..world).map(move |by| (world, by))) {
        let partitioned = on_ring(world, |rank, comm| {
            let (rank_of, replica) = (Rank(rank as u32), Some(distance as u32));
            let mut optimizer = ReplicatedOptimizer::new(&layout(), world, rank_of, &settings, replica);
            let mut weights = noise(len, 0);
            optimizer.begin(0, 0, &weights);
            for step in 0..3 {
                let mut grads = noise(len, 1 + 10 * step + rank);
                optimizer.step(&mut grads, &mut weights, &input(), comm).expect("a step");
            }
            let replica =
                optimizer.state(Copy::Replica, 3, &weights, &Vec::new()).expect("the newest version");
            let held = optimizer.bytes(comm).comm_buffers.0 - comm.buffer_bytes() as u64;
            assert_eq!(held, 2 * len as u64);
            (replica.weights, weights)
        });
        let mut alone = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings);
        let mut weights = noise(len, 0);
        for step in 0..3 {
            let all: Vec<_> = (0..world).map(|rank| noise(len, 1 + 10 * step + rank)).collect();
            let mut grads = vec![0.0; len];
            for owner in 0..world {
                for at in chunk(len, world, owner) {
                    let order = (1..=world).map(|hop| bf16::from_f32(all[(owner + hop) % world][at]));
                    let sum = order.reduce(|sum, next| bf16::from_f32(sum.to_f32() + next.to_f32()));
                    grads[at] = sum.expect("a world has a rank").to_f32();
                }
            }
            // A world of one rounds nothing.
            alone.step(&mut grads, &mut weights, &input(), &mut Solo::default()).expect("a step");
        }
        for (rank, (replica, theirs)) in partitioned.iter().enumerate() {
            assert!(*theirs == weights, "rank {rank} of {world}");
            let before = chunk(len, world, (rank + world - distance) % world);
            assert!(
                replica[..] == weights[before],
                "what rank {rank} of {world} keeps of the rank {distance} before"
            );
        }
    }
}

/// Weights of the adapter, whole, and both of its moments as far as they are this rank's.
fn lora_bits(optimizer: &ShardedOptimizer, weights: &[f32]) -> (Vec<u32>, Vec<u32>) {
    let lora = |range: &std::ops::Range<usize>| {
        layout().params()[..2].iter().any(|p| p.range().contains(&range.start))
    };
    let own = optimizer.partition.own();
    let segments = optimizer.segments.iter().filter(|segment| lora(&segment.range));
    let moments = segments.flat_map(|s| {
        let at = s.range.start - own.start..s.range.end - own.start;
        [&floats(&optimizer.state[0])[at.clone()], &floats(&optimizer.state[1])[at]].concat()
    });
    let adapter = weights[..layout().params()[2].offset].iter();
    (adapter.map(|w| w.to_bits()).collect(), moments.map(f32::to_bits).collect())
}

#[test]
fn what_rests_keeps_its_bits_on_owner_and_replica_and_a_bad_gradient_of_it_harms_nobody() {
    for world in 1..=4 {
        on_ring(world, |rank, comm| {
            let mut optimizer = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
            let mut replicated =
                ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), &settings(), Some(1));
            let mut weights = noise(layout().len(), 0);
            let mut again = weights.clone();
            replicated.begin(0, 0, &again);
            let mut before = lora_bits(&optimizer, &weights);
            for step in 0..6 {
                let resting = (step % 3 > 0).then_some(Group::LORA);
                let mut grads = noise(weights.len(), 1 + 10 * step + rank);
                if resting.is_some() {
                    grads[3] = f32::NAN;
                }
                let input = StepInput { resting, ..input() };
                let norm =
                    optimizer.step(&mut grads.clone(), &mut weights, &input, comm).expect("a step").grad_norm;
                let after = lora_bits(&optimizer, &weights);
                assert_eq!(after == before, resting.is_some(), "step {step} in a world of {world}");
                before = after;
                let twin = replicated.step(&mut grads, &mut again, &input, comm).expect("a step").grad_norm;
                assert_eq!(norm.to_bits(), twin.to_bits());
                assert!(again == weights, "step {step} with a replica");
            }
            let previous = Rank(((rank + world - 1) % world) as u32);
            let own = replicated.state(Copy::Own, 6, &again, &Vec::new()).expect("the newest version");
            assert!(own.state == optimizer.state);
            if world > 1 {
                let replica =
                    replicated.state(Copy::Replica, 6, &again, &Vec::new()).expect("the newest version");
                assert!(replica.weights[..] == again[chunk(again.len(), world, previous.0 as usize)]);
            }
        });
    }
}

#[test]
fn norms_of_groups_make_up_the_norm_of_all_and_leave_its_bits_as_they_are() {
    let len = layout().len();
    for (world, resting) in (1..=4).flat_map(|world| [(world, None), (world, Some(Group::LORA))]) {
        let input = StepInput { resting, ..input() };
        let outcomes = on_ring(world, |rank, comm| {
            let mut optimizer = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
            let (mut grads, mut weights) = (noise(len, 1 + rank), noise(len, 0));
            // The norm without groups: one number a rank.
            let mut reduced = grads.clone();
            let own = optimizer.partition().clone();
            optimizer.exchange.reduce_scatter(&mut reduced, &own, comm).expect("a sum");
            let mut alone = [optimizer.squares(&reduced, resting)];
            comm.all_reduce(BufMut::F64(&mut alone), Reduce::Sum).expect("a sum");
            let outcome = optimizer.step(&mut grads, &mut weights, &input, comm).expect("a step");
            assert_eq!(outcome.grad_norm.to_bits(), (alone[0].sqrt() * input.scale).to_bits());
            (outcome.grad_norm, outcome.group_norms)
        });
        let sum_of = |at: usize| (0..world).map(|rank| f64::from(noise(len, 1 + rank)[at])).sum::<f64>();
        let norm_of = |group: Group| {
            let params =
                layout().params().iter().filter(|param| param.group == group).cloned().collect::<Vec<_>>();
            params.iter().flat_map(|param| param.range()).map(|at| sum_of(at).powi(2)).sum::<f64>().sqrt()
        };
        let moving =
            [Group::LORA, Group("expert"), Group("sensor")].into_iter().filter(|of| resting != Some(*of));
        for (all, groups) in &outcomes {
            assert_eq!((all, groups), (&outcomes[0].0, &outcomes[0].1), "all ranks know the same");
            assert!(groups.iter().map(|of| of.group).eq(moving.clone()));
            let together = groups.iter().map(|of| of.norm.powi(2)).sum::<f64>().sqrt();
            assert!((together / all - 1.0).abs() < 1e-12, "{together} for {all}");
            for of in groups {
                let expected = norm_of(of.group) * input.scale;
                assert!((of.norm / expected - 1.0).abs() < 1e-6, "{} for {expected}", of.norm);
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_stops_all_ranks_before_anything_changes() {
    for bad in [f32::NAN, f32::INFINITY] {
        let names = on_ring(2, |rank, comm| {
            let mut optimizer = ShardedOptimizer::new(&layout(), 2, Rank(rank as u32), &settings());
            let before = noise(layout().len(), 0);
            let (mut weights, mut grads) = (before.clone(), noise(layout().len(), 5));
            if rank == 1 {
                // In rank 0's shard, brought by rank 1.
                grads[40] = bad;
            }
            let error = optimizer.step(&mut grads, &mut weights, &input(), comm).expect_err("not finite");
            assert!(
                weights == before
                    && optimizer.steps() == 0
                    && floats(&optimizer.state[0]).iter().all(|m| *m == 0.0)
            );
            match error {
                StepError::NonFinite { parameter, .. } => parameter,
                other => panic!("{other}"),
            }
        });
        assert_eq!(names, [Some("lora.b".to_owned()), None]);
    }
}

#[test]
fn buffers_and_communicators_of_another_size_are_refused() {
    let mut optimizer = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings());
    let (mut right, mut wrong) = (noise(layout().len(), 0), noise(3, 0));
    let comm = &mut Solo::default();
    assert!(optimizer.step(&mut wrong, &mut right.clone(), &input(), comm).is_err());
    assert!(optimizer.step(&mut right, &mut wrong, &input(), comm).is_err());
    let mut other = ShardedOptimizer::new(&layout(), 2, Rank(0), &settings());
    let error = other.step(&mut right.clone(), &mut right, &input(), comm).expect_err("a world of one");
    assert!(error.to_string().contains("expected 2, found 1"), "{error}");
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut layout = TrainableLayout::default();
    layout.add("w".into(), &[300, 1000], Group("expert"), true, Init::Zeros);
    layout.add("b".into(), &[1001], Group("expert"), false, Init::Zeros);
    let in_pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool starts");
        let mut optimizer = ShardedOptimizer::new(&layout, 1, Rank(0), &settings());
        let mut weights = noise(layout.len(), 0);
        pool.install(|| run(&mut optimizer, &mut Solo::default(), &mut weights, 0..2));
        weights
    };
    assert!(in_pool(1) == in_pool(3));
}

#[test]
fn the_bytes_are_those_of_the_formula() {
    let bytes = on_ring(2, |rank, comm| {
        ShardedOptimizer::new(&layout(), 2, Rank(rank as u32), &settings()).bytes(comm)
    });
    let whole = layout().len() as u64;
    assert_eq!(bytes[0].state.0 + bytes[1].state.0, 8 * whole);
    for bytes in bytes {
        assert_eq!((bytes.weights.0, bytes.grads.0), (4 * whole, 4 * whole));
        assert_eq!(bytes.state_unpartitioned.0, 8 * whole);
        assert_eq!(bytes.comm_buffers.0, 128 << 10);
    }
}
