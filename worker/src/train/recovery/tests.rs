//! A rank, or all ranks of a node, die at every point of a step, on a real ring; what the others hold is put
//! together and compared with a run in which no rank died, bit by bit.

use std::ops::Range;

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    run_spec::{Optimizer, PerGroup},
};

use super::{Holding, choose};
use crate::{
    collective::{BufMut, Collective, Reduce, Ring, chunk, loopback},
    zero::{Rates, ReplicatedOptimizer, ShardState, ShardedOptimizer, StepInput},
};
use coxswain_nn::{
    params::{Group, Init, TrainableLayout},
    rules::StateValues,
};

/// Steps that everyone finishes.
const BEFORE: u64 = 3;

fn layout() -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    layout.add("lora.a".into(), &[5, 7], Group::LORA, true, Init::Zeros);
    layout.add("expert.weight".into(), &[11, 4], Group("expert"), true, Init::Zeros);
    layout.add("expert.bias".into(), &[4], Group("expert"), false, Init::Zeros);
    layout
}

fn settings() -> Optimizer {
    Optimizer {
        weight_decay: PerGroup::All(0.1),
        clip_norm: PerGroup::All(0.5),
        ema_decay: Some(0.75),
        ..Optimizer::default()
    }
}

fn input() -> StepInput {
    StepInput {
        scale: 0.25,
        rates: Rates::from([("lora", 1e-3), ("expert", 1e-2), ("sensor", 3e-3)]),
        resting: None,
    }
}

fn noise(len: usize, salt: u64) -> Vec<f32> {
    (0..len as u64).map(|i| ((i * 7919 + salt * 104_729) % 2017) as f32 / 1008.5 - 1.0).collect()
}

fn gradients(rank: usize, step: u64) -> Vec<f32> {
    noise(layout().len(), 1 + 10 * step + rank as u64)
}

fn on_ring<R: Send>(world: usize, body: impl Fn(usize, Ring) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = loopback(world)
            .into_iter()
            .enumerate()
            .map(|(rank, connect)| scope.spawn(move || body(rank, connect())))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// Weights, moments and average, full length, after each number of steps of a run without losses.
fn undisturbed(world: usize, steps: u64) -> Vec<ShardState> {
    let ranks = on_ring(world, |rank, mut ring| {
        let mut optimizer = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
        let mut weights = noise(layout().len(), 0);
        optimizer.begin_average(&weights);
        let mut states = vec![(weights.clone(), optimizer.export())];
        for step in 0..steps {
            optimizer.step(&mut gradients(rank, step), &mut weights, &input(), &mut ring).expect("a step");
            states.push((weights.clone(), optimizer.export()));
        }
        states
    });
    let version = |version: usize| {
        let files: Vec<&[u8]> = ranks.iter().map(|states| states[version].1.as_slice()).collect();
        let weights = ranks[0][version].0.clone();
        let mut whole = ReplicatedOptimizer::new(&layout(), 1, Rank(0), &settings(), None);
        whole.import(&files, &weights).expect("what was exported");
        whole.state(crate::zero::Copy::Own, version as u64, &weights, &Vec::new()).expect("its own version")
    };
    (0..=steps as usize).map(version).collect()
}

/// What a rank has when the step that somebody died in is over for it; none for the dead.
type Survivor = Option<(ReplicatedOptimizer, Vec<f32>, Vec<f32>)>;

/// Everyone takes [`BEFORE`] steps; in the next one those of `lost` die after so many of its five
/// collectives. Replicas are `distance` along the ring.
fn lose(world: usize, distance: usize, lost: &[usize], collectives: usize) -> Vec<Survivor> {
    on_ring(world, |rank, mut ring| {
        let (own, replica) = (Rank(rank as u32), Some(distance as u32));
        let mut optimizer = ReplicatedOptimizer::new(&layout(), world, own, &settings(), replica);
        let mut weights = noise(layout().len(), 0);
        optimizer.begin_average(&weights);
        optimizer.begin(0, 0, &weights);
        for step in 0..BEFORE {
            optimizer.step(&mut gradients(rank, step), &mut weights, &input(), &mut ring).expect("a step");
        }
        let mut grads = gradients(rank, BEFORE);
        let dies = lost.contains(&rank);
        if !dies || collectives == 5 {
            // Whether it succeeds depends on which rank died, and when.
            let _ = optimizer.step(&mut grads, &mut weights, &input(), &mut ring);
            return (!dies).then_some((optimizer, weights, grads));
        }
        // The whole's and each group's.
        let mut squares = vec![0.0; 1 + layout().groups().len()];
        for collective in 0..collectives {
            let done = match collective {
                0 => ring.reduce_scatter_in_place(BufMut::F32(&mut grads), Reduce::Sum),
                1 => {
                    let own = chunk(grads.len(), world, rank);
                    squares[0] = grads[own].iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
                    ring.all_reduce(BufMut::F64(&mut squares), Reduce::Sum)
                }
                2 => ring.shift_in_place(BufMut::F32(&mut grads), distance),
                _ => ring.barrier(),
            };
            done.expect("the others are alive");
        }
        None
    })
}

/// Some of AdamW's values, one for each element.
fn cut_out(values: &StateValues<Vec<f32>>, range: &Range<usize>) -> StateValues<Vec<f32>> {
    let mut part = StateValues::Float32(vec![0.0; range.len()]);
    part.copy_from(0..range.len(), values, range.start);
    part
}

fn holding(rank: usize, world: usize, optimizer: &ReplicatedOptimizer) -> Holding {
    let ((own, replica), (skipped, left_out)) = (optimizer.versions(), optimizer.skipped());
    let (world, rank) = (world as u32, Rank(rank as u32));
    let (loss_scale, distance) = (optimizer.loss_scales(), optimizer.distance());
    Holding { generation: Generation(1), world, rank, own, replica, distance, skipped, left_out, loss_scale }
}

#[test]
fn after_any_rank_dies_anywhere_in_a_step_the_others_hold_the_undisturbed_state() {
    let one = (2..=4).map(|world| (world, 1, (0..world).map(|rank| vec![rank]).collect::<Vec<_>>()));
    // Nodes of two ranks; the last case has ranks that begin in the middle of a node.
    let nodes = [
        (4, 2, vec![vec![0, 1], vec![2, 3]]),
        (6, 2, vec![vec![0, 1], vec![2, 3], vec![4, 5]]),
        (6, 3, vec![vec![0, 1, 2], vec![5, 0, 1]]),
    ];
    for (world, distance, losses) in one.chain(nodes) {
        let reference = undisturbed(world, BEFORE + 1);
        for lost in &losses {
            for collectives in 0..=5 {
                let left = lose(world, distance, lost, collectives);
                let holdings: Vec<_> = (0..world)
                    .filter_map(|rank| {
                        let (optimizer, ..) = left[rank].as_ref()?;
                        Some((Rank(rank as u32), holding(rank, world, optimizer)))
                    })
                    .collect();
                let what = format!("of {world} ranks {lost:?} died after {collectives} collectives");
                let choice =
                    choose(&holdings, Step(0)).unwrap_or_else(|| panic!("{what}: nothing to go on with"));
                let finished = holdings.iter().any(|(_, held)| held.own.newest > BEFORE) && collectives == 5;
                assert!(choice.version == BEFORE + 1 || (choice.version == BEFORE && !finished), "{what}");
                let reference = &reference[choice.version as usize];
                for (part, source) in choice.sources.iter().enumerate() {
                    let (optimizer, weights, grads) =
                        left[source.from.0 as usize].as_ref().expect("only survivors give");
                    let range = chunk(layout().len(), world, part);
                    let state =
                        optimizer.state(source.copy, choice.version, weights, grads).expect("as it said");
                    let whole = |of: &[f32]| of[range.clone()].to_vec();
                    let due = ShardState {
                        weights: whole(&reference.weights),
                        state: reference.state.iter().map(|values| cut_out(values, &range)).collect(),
                        average: whole(&reference.average),
                    };
                    assert!(state == due, "{what}: part {part} from {source:?}");
                }
            }
        }
    }
}

#[test]
fn a_state_put_together_at_another_world_size_trains_on_as_if_nothing_had_happened() {
    let reference = undisturbed(3, BEFORE);
    let whole = &reference[BEFORE as usize];
    let train_on = |world: usize| {
        let ranks = on_ring(world, |rank, mut ring| {
            let replica = Some((world as u32 / 2).max(1));
            let mut optimizer =
                ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), &settings(), replica);
            for part in 0..3 {
                let range = chunk(layout().len(), 3, part);
                let cut = |of: &[f32]| of[range.clone()].to_vec();
                let state = ShardState {
                    weights: cut(&whole.weights),
                    state: whole.state.iter().map(|values| cut_out(values, &range)).collect(),
                    average: cut(&whole.average),
                };
                optimizer.adopt(&range, &state);
            }
            let mut weights = whole.weights.clone();
            optimizer.begin(BEFORE, 0, &weights);
            // The same global gradient at any world size: rank 0 brings it.
            let mut grads = gradients(0, BEFORE);
            if rank > 0 {
                grads.fill(0.0);
            }
            let (own, average) = optimizer.average().expect("it is kept");
            assert!(average[..] == whole.average[own]);
            optimizer.step(&mut grads, &mut weights, &input(), &mut ring).expect("a step");
            weights
        });
        assert!(ranks.iter().all(|weights| *weights == ranks[0]));
        ranks[0].clone()
    };
    let close =
        |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * a.abs().max(1e-3));
    let (one, two, four) = (train_on(1), train_on(2), train_on(4));
    assert!(
        close(&one, &two) && close(&one, &four),
        "the norm is summed in another order; nothing else differs"
    );
}
