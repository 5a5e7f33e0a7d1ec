//! A rule of blocks (`adamw8bit`): partitioned, replicated, saved and handed over, it gives the bits of
//! itself unpartitioned. Rank 0 brings the whole gradient and nothing is clipped, so that sums and factors
//! are the same at any world size.

use coxswain_proto::run_spec::OptimizerName;
use proptest::prelude::*;

use super::*;
use crate::zero::ShardState;

fn settings() -> Optimizer {
    Optimizer {
        name: OptimizerName::Adamw8bit,
        clip_norm: PerGroup::All(0.0),
        ema_decay: Some(0.9),
        ..super::settings()
    }
}

/// Blocks that are short at the end of a parameter, and parameters without blocks.
fn layout() -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (name, shape, group, decay) in [
        ("lora.a", &[5, 7][..], Group::LORA, true),
        ("lora.b", &[61, 70], Group::LORA, true),
        ("expert.bias", &[300], Group("expert"), false),
        ("expert.weight", &[9, 1024], Group("expert"), true),
        ("sensor.weight", &[4095], Group("sensor"), true),
    ] {
        layout.add(name.into(), shape, group, decay, Init::Zeros);
    }
    layout
}

fn new(world: usize, rank: usize) -> ReplicatedOptimizer {
    ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), &settings(), Some(1))
}

/// Takes steps; the number of the first one decides the gradients.
fn step_on(
    optimizer: &mut ReplicatedOptimizer,
    comm: &mut dyn Collective,
    weights: &mut Vec<f32>,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let whole = noise(weights.len(), 1 + step);
        let mut grads = if comm.rank().0 == 0 { whole } else { vec![0.0; weights.len()] };
        let resting = (step == 2).then_some(Group::LORA);
        optimizer.step(&mut grads, weights, &StepInput { resting, ..input() }, comm).expect("a step");
    }
}

fn begun(world: usize, rank: usize) -> (ReplicatedOptimizer, Vec<f32>) {
    let (mut optimizer, weights) = (new(world, rank), noise(layout().len(), 0));
    optimizer.begin_average(&weights);
    optimizer.begin(0, 0, &weights);
    (optimizer, weights)
}

fn file(optimizer: &ReplicatedOptimizer) -> Vec<u8> {
    let mut bytes = Vec::new();
    optimizer.write_to(&mut bytes).expect("to memory");
    bytes
}

/// What a rank has at the end: weights, its file, its replica of another rank's shard, its own.
type RankState = (Vec<f32>, Vec<u8>, Option<ShardState>, ShardState);

/// Every rank's after so many steps without a change of world.
fn undisturbed(world: usize, steps: usize) -> Vec<RankState> {
    on_ring(world, |rank, comm| {
        let (mut optimizer, mut weights) = begun(world, rank);
        step_on(&mut optimizer, comm, &mut weights, 0..steps);
        let state = |copy| optimizer.state(copy, steps as u64, &weights, &Vec::new());
        let (own, replica) = (state(Copy::Own).expect("the newest version"), state(Copy::Replica));
        (weights, file(&optimizer), replica, own)
    })
}

#[test]
fn a_partition_at_blocks_changes_no_bit_and_a_replica_has_its_owners() {
    let alone = undisturbed(1, 5);
    for world in 2..=5 {
        let ranks = undisturbed(world, 5);
        for (rank, (weights, _, replica, _)) in ranks.iter().enumerate() {
            assert!(*weights == alone[0].0, "rank {rank} of {world}");
            let owner = &ranks[(rank + world - 1) % world].3;
            assert!(replica.as_ref() == Some(owner), "rank {rank} of {world}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn a_checkpoint_goes_to_another_world_and_trains_on_with_the_same_bits(world in 1usize..5, other in 1usize..5) {
        let due = undisturbed(other, 5);
        let saved = undisturbed(world, 3);
        let files: Vec<&[u8]> = saved.iter().map(|rank| rank.1.as_slice()).collect();
        let went_on = on_ring(other, |rank, comm| {
            let (mut optimizer, mut weights) = (new(other, rank), saved[0].0.clone());
            assert!(!optimizer.import(&files, &weights).expect("the files are whole"), "the average is there");
            step_on(&mut optimizer, comm, &mut weights, 3..5);
            (weights, file(&optimizer))
        });
        for ((weights, file), due) in went_on.iter().zip(&due) {
            prop_assert!(*weights == due.0 && *file == due.1);
        }
    }

    #[test]
    fn living_ranks_hand_their_parts_to_another_world_with_the_same_bits(world in 1usize..5, other in 1usize..5) {
        let due = undisturbed(other, 5);
        let held = undisturbed(world, 3);
        let went_on = on_ring(other, |rank, comm| {
            let (mut optimizer, mut weights) = (new(other, rank), held[0].0.clone());
            for (part, (.., state)) in held.iter().enumerate() {
                // Rank 0 has every part, the others have room for it.
                let range = optimizer.part_in(world, part);
                let mut parcel = if rank == 0 { state.clone() } else { optimizer.empty_state(&range) };
                assert_eq!(parcel.bytes(), state.bytes());
                parcel.broadcast(Rank(0), comm).expect("all are there");
                assert!(parcel == *state, "every bit arrives");
                optimizer.adopt(&range, &parcel);
            }
            optimizer.begin(3, 0, &weights);
            step_on(&mut optimizer, comm, &mut weights, 3..5);
            (weights, file(&optimizer))
        });
        for ((weights, file), due) in went_on.iter().zip(&due) {
            prop_assert!(*weights == due.0 && *file == due.1);
        }
    }
}

#[test]
fn a_state_of_another_rule_is_refused_with_the_name_of_the_tensor() {
    let eight_bits = undisturbed(1, 1).remove(0).1;
    let floats = Optimizer { name: OptimizerName::Adamw, ..settings() };
    let mut other = ReplicatedOptimizer::new(&layout(), 1, Rank(0), &floats, None);
    let error = other.import(&[&eight_bits[..]], &noise(layout().len(), 0)).expect_err("another rule's");
    let text = error.to_string();
    assert!(text.contains("exp_avg") && text.contains("8bit") && text.contains("no such state"), "{text}");
    let error =
        new(1, 0).import(&[&file(&other)[..]], &noise(layout().len(), 0)).expect_err("another rule's");
    assert!(error.to_string().contains("exp_avg.expert.weight[0..]"), "{error}");
}
