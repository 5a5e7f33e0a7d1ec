//! The average of the weights against a plain loop over the weights of committed steps: partitioned,
//! replicated, left out, saved and read again.

use burn::backend::Flex;
use coxswain_nn::kernels::flat::OnDevice;
use proptest::prelude::*;

use super::*;
use crate::zero::{Keeps, read_average};

fn averaging(decay: f64, power: Option<f64>) -> Optimizer {
    Optimizer { ema_decay: Some(decay), ema_power: power, ..settings() }
}

/// What one rank ends with: weights and average, whole, and its replica's average.
type RankResult = (Vec<f32>, Vec<f32>, Vec<f32>, Vec<u8>);

/// Every rank takes these steps, those that are false left out.
fn ended(world: usize, settings: &Optimizer, steps: &[bool]) -> Vec<RankResult> {
    on_ring(world, |rank, comm| {
        let mut optimizer = ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), settings, Some(1));
        let mut weights = noise(layout().len(), 0);
        optimizer.begin_average(&weights);
        optimizer.begin(0, 0, &weights);
        for (step, taken) in steps.iter().enumerate() {
            let mut grads = noise(weights.len(), 1 + 10 * step + rank);
            match taken {
                true => drop(optimizer.step(&mut grads, &mut weights, &input(), comm).expect("a step")),
                false => optimizer.skip(false),
            }
        }
        let mut whole = vec![0.0; weights.len()];
        let (own, average) = optimizer.average().expect("it is kept");
        whole[own].copy_from_slice(average);
        comm.all_gather_in_place(BufMut::F32(&mut whole)).expect("all are there");
        let replica = optimizer.state(Copy::Replica, steps.len() as u64, &weights, &Vec::new());
        let mut file = Vec::new();
        optimizer.write_to(&mut file).expect("to memory");
        (weights, whole, replica.map_or(Vec::new(), |state| state.average), file)
    })
}

/// The average of the weights after each step of a run on `world` ranks, by the formula.
fn looped(world: usize, settings: &Optimizer, steps: &[bool]) -> Vec<f32> {
    let mut average = noise(layout().len(), 0);
    let mut taken = 0u32;
    for done in 1..=steps.len() {
        if !steps[done - 1] {
            continue;
        }
        let (weights, ..) = &ended(world, settings, &steps[..done])[0];
        let risen = settings.ema_power.map_or(1.0, |power| 1.0 - f64::from(1 + taken).powf(-power));
        let share = (1.0 - risen.min(settings.ema_decay.expect("it is kept"))) as f32;
        average.iter_mut().zip(weights).for_each(|(e, w)| *e += share * (w - *e));
        taken += 1;
    }
    average
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn the_average_is_that_of_a_plain_loop_over_the_weights_of_committed_steps(
        world in 1usize..4, decay in 0.0f64..1.0, power in prop::option::of(0.1f64..1.0),
        steps in prop::collection::vec(prop::bool::weighted(0.7), 1..6),
    ) {
        let settings = averaging(decay, power);
        let due = looped(world, &settings, &steps);
        let plain = Optimizer { ema_decay: None, ema_power: None, ..settings.clone() };
        let ranks = ended(world, &settings, &steps);
        for (rank, (weights, average, replica, _)) in ranks.iter().enumerate() {
            prop_assert!(*average == due, "rank {} of {}", rank, world);
            if world > 1 {
                prop_assert!(replica[..] == due[chunk(due.len(), world, (rank + world - 1) % world)]);
            }
            // It changes nothing of what is learned.
            let without = on_ring(world, |rank, comm| {
                let mut optimizer = ReplicatedOptimizer::new(&layout(), world, Rank(rank as u32), &plain, Some(1));
                let mut weights = noise(layout().len(), 0);
                optimizer.begin(0, 0, &weights);
                for step in (0..steps.len()).filter(|step| steps[*step]) {
                    let mut grads = noise(weights.len(), 1 + 10 * step + rank);
                    optimizer.step(&mut grads, &mut weights, &input(), comm).expect("a step");
                }
                weights
            });
            // Bias correction counts the steps that were taken alone.
            prop_assert!(*weights == without[rank]);
        }
    }

    #[test]
    fn it_goes_through_a_checkpoint_to_any_world_bit_for_bit(world in 1usize..4, other in 1usize..6) {
        let settings = averaging(0.9, None);
        let ranks = ended(world, &settings, &[true, false, true]);
        let due = &ranks[0].1;
        let files: Vec<&[u8]> = ranks.iter().map(|(.., file)| file.as_slice()).collect();
        prop_assert!(read_average(&files, &layout()).expect("all files") == Some(due.clone()));
        for rank in 0..other {
            let mut optimizer = ReplicatedOptimizer::new(&layout(), other, Rank(rank as u32), &settings, Some(1));
            prop_assert!(!optimizer.import(&files, &ranks[0].0).expect("the files are whole"));
            let (own, average) = optimizer.average().expect("it is kept");
            prop_assert!(average[..] == due[own]);
            if let Some(replica) = optimizer.state(Copy::Replica, 3, &ranks[0].0, &Vec::new()) {
                prop_assert!(replica.average[..] == due[chunk(due.len(), other, (rank + other - 1) % other)]);
            }
        }
    }
}

#[test]
fn a_checkpoint_without_an_average_begins_it_with_its_weights_and_one_with_it_is_read_without() {
    let without = ended_without(2);
    let files: Vec<&[u8]> = without.iter().map(|(_, file)| file.as_slice()).collect();
    assert!(read_average(&files, &layout()).expect("all files").is_none());
    let weights = &without[0].0;
    let mut begins = ReplicatedOptimizer::new(&layout(), 3, Rank(1), &averaging(0.9, None), Some(1));
    assert!(begins.import(&files, weights).expect("the moments are there"));
    let (own, average) = begins.average().expect("it is kept");
    assert!(average[..] == weights[own]);
    let replica = begins.state(Copy::Replica, 2, weights, &Vec::new()).expect("its own version");
    assert!(replica.average == replica.weights);

    let with = ended(2, &averaging(0.9, None), &[true, true]);
    let files: Vec<&[u8]> = with.iter().map(|(.., file)| file.as_slice()).collect();
    assert!(read_average(&files[..1], &layout()).is_err(), "half of it");
    let message = |files: &[&[u8]]| read_average(files, &layout()).expect_err("not one state").to_string();
    // As many elements as there should be, some of them twice and others not at all.
    let three = ended(3, &averaging(0.9, None), &[true, true]);
    let thirds: Vec<&[u8]> = three.iter().map(|(.., file)| file.as_slice()).collect();
    let told = message(&[thirds[0], thirds[0], thirds[2]]);
    assert!(told.starts_with("ema of ") && told.contains("in 2 of the checkpoint's files"), "{told}");
    let other_step = ended(2, &averaging(0.9, None), &[true]);
    let told = message(&[files[0], other_step[1].3.as_slice()]);
    assert!(told.contains("step"), "{told}");
    let mut ends = ReplicatedOptimizer::new(&layout(), 2, Rank(0), &settings(), Some(1));
    assert!(!ends.import(&files, &with[0].0).expect("moments are all that it wants"));
    assert!(ends.average().is_none());
    let mut again = Vec::new();
    ends.write_to(&mut again).expect("to memory");
    assert!(again == without[0].1, "nothing is left of it");
}

/// Weights and file of each rank after two steps of a run that keeps no average.
fn ended_without(world: usize) -> Vec<(Vec<f32>, Vec<u8>)> {
    let ranks = trained(world, 2);
    ranks.into_iter().map(|(optimizer, weights)| (weights, optimizer.export())).collect()
}

#[test]
fn it_takes_four_bytes_an_element_of_each_part_that_is_kept() {
    let bytes = |settings: &Optimizer| {
        on_ring(2, |rank, comm| {
            ReplicatedOptimizer::new(&layout(), 2, Rank(rank as u32), settings, Some(1)).bytes(comm)
        })
    };
    let whole = layout().len() as u64;
    for (settings, each) in [(settings(), 8), (averaging(0.9, None), 12)] {
        let ranks = bytes(&settings);
        assert_eq!(ranks.iter().map(|of| of.state.0).sum::<u64>(), each * whole);
        assert_eq!(ranks.iter().map(|of| of.redundancy.0).sum::<u64>(), (each + 4) * whole);
        assert_eq!(ranks[0].state_unpartitioned.0, each * whole);
    }
}

#[test]
fn an_average_is_lent_to_the_weights_and_comes_back_wherever_they_are() {
    fn hold<F: Flat>(place: &F::Place, offloaded: bool) {
        let keeps = Keeps { replica: None, offloaded };
        let partition = Partition::new(Cuts::equal(layout().len(), 3), Rank(1));
        let own = partition.own();
        let mut optimizer =
            ReplicatedOptimizer::<F>::at(place, &layout(), partition, &averaging(0.9, None), keeps);
        let (values, average) = (noise(layout().len(), 0), noise(layout().len(), 1));
        optimizer.begin_average(&average);
        let mut weights = F::of(place, values.clone());
        let all = |flat: &F| flat.read(0..flat.len()).into_owned();
        assert!(optimizer.exchange_average(&mut weights));
        let mut due = values.clone();
        due[own.clone()].copy_from_slice(&average[own.clone()]);
        assert!(all(&weights) == due);
        optimizer.exchange_average(&mut weights);
        assert!(all(&weights) == values);
        assert!(all(optimizer.average().expect("it is kept").1) == average[own]);
    }
    hold::<Vec<f32>>(&(), false);
    for offloaded in [false, true] {
        hold::<OnDevice<Flex>>(&Default::default(), offloaded);
    }
    let mut without = ReplicatedOptimizer::new(&layout(), 1, Rank(0), &settings(), None);
    assert!(!without.exchange_average(&mut noise(layout().len(), 0)));
}
