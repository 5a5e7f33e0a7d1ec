//! The optimizer with its buffers in a device's memory against itself with buffers in the host's, on rings:
//! the device is Flex.

use burn::backend::{Flex, flex::FlexDevice};
use proptest::prelude::*;

use super::*;
use crate::zero::{Keeps, ShardState};
use coxswain_nn::kernels::flat::OnDevice;

type Device = OnDevice<Flex>;

/// What one rank ends with: norms, weights, its own part and its replica.
type RankResult = (Vec<f64>, Vec<f32>, ShardState, Option<ShardState>);

/// How a run goes.
#[derive(Clone, Debug)]
struct Case {
    world: usize,
    settings: Optimizer,
    /// Whether moments and replica are in host memory between steps.
    offloaded: bool,
    /// In every step, who rests.
    resting: Vec<Option<Group>>,
}

fn ended<F: Flat>(place: &F::Place, case: &Case, comm: &mut dyn Collective) -> RankResult {
    let (layout, rank) = (layout(), comm.rank());
    // As far along the ring as may be.
    let keeps = Keeps { replica: Some(case.world.max(2) as u32 - 1), offloaded: case.offloaded };
    let partition = Partition::new(Cuts::equal(layout.len(), case.world), rank);
    let mut optimizer = ReplicatedOptimizer::<F>::at(place, &layout, partition, &case.settings, keeps);
    let start = noise(layout.len(), 0);
    optimizer.begin_average(&start);
    optimizer.begin(0, 0, &start);
    let mut weights = F::of(place, start);
    let mut norms = Vec::new();
    for (step, resting) in case.resting.iter().enumerate() {
        let mut grads = F::of(place, noise(layout.len(), 1 + 10 * step + rank.0 as usize));
        let input = StepInput { resting: *resting, ..input() };
        norms.push(optimizer.step(&mut grads, &mut weights, &input, comm).expect("a step").grad_norm);
    }
    let (weights, grads) = (weights.read(0..layout.len()).into_owned(), F::zeros(place, 0));
    let steps = case.resting.len() as u64;
    let state = |copy| optimizer.state(copy, steps, &weights, &grads);
    let (own, replica) = (state(Copy::Own).expect("the newest version"), state(Copy::Replica));
    (norms, weights.clone(), own, replica)
}

/// What a buffer's values are sums of, at the largest: each term is rounded, so a sum that ends near zero is
/// as far off as its terms were large. Weights go five steps at the highest rate; a gradient is at most 0.7
/// on each of three ranks, times the scale of 0.25, and enters the moments with a tenth and, squared, with a
/// thousandth.
const WEIGHTS: f32 = 0.1;
const FIRST: f32 = 0.05;
const SECOND: f32 = 3e-4;

#[track_caller]
fn assert_close(host: &[f32], device: &[f32], terms: f32, what: &str) {
    assert_eq!(host.len(), device.len(), "{what}");
    for (a, b) in host.iter().zip(device) {
        assert!((a - b).abs() <= 1e-6 * a.abs().max(terms), "{what}: {a} on the host, {b} on the device");
    }
}

#[track_caller]
fn assert_parts_close(host: &ShardState, device: &ShardState) {
    assert_close(&host.weights, &device.weights, WEIGHTS, "weights");
    assert_close(
        floats::<Vec<f32>>(&host.state[0]),
        floats::<Vec<f32>>(&device.state[0]),
        FIRST,
        "first moments",
    );
    assert_close(
        floats::<Vec<f32>>(&host.state[1]),
        floats::<Vec<f32>>(&device.state[1]),
        SECOND,
        "second moments",
    );
    assert_close(&host.average, &device.average, WEIGHTS, "average");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn steps_on_a_device_are_steps_on_the_host(
        world in 1usize..4, clip in prop::sample::select(vec![0.0, 0.5, 100.0]), decay in 0.0f64..0.3,
        halves in any::<bool>(), resting in prop::collection::vec(0usize..4, 1..5),
    ) {
        let reduce_dtype = if halves { ReduceDtype::Bfloat16 } else { ReduceDtype::Float32 };
        let settings = Optimizer { weight_decay: PerGroup::All(decay), clip_norm: PerGroup::All(clip), reduce_dtype, ema_decay: Some(0.7), ..settings() };
        let groups = [None, Some(Group::LORA), Some(Group("expert")), None];
        let case = Case { world, settings, offloaded: false, resting: resting.into_iter().map(|group| groups[group]).collect() };
        let pairs = on_ring(world, |_, comm| (ended::<Vec<f32>>(&(), &case, comm), ended::<Device>(&FlexDevice, &case, comm)));
        for (host, device) in &pairs {
            assert!(host.0.iter().zip(&device.0).all(|(a, b)| (a - b).abs() <= 1e-6 * a), "{:?} {:?}", host.0, device.0);
            assert_close(&host.1, &device.1, WEIGHTS, "all weights");
            assert_parts_close(&host.2, &device.2);
            prop_assert_eq!(host.3.is_some(), world > 1);
            if let (Some(host), Some(device)) = (&host.3, &device.3) {
                assert_parts_close(host, device);
            }
        }
        // On one device all ranks have the same bits, and a replica has its owner's.
        for (rank, (_, device)) in pairs.iter().enumerate() {
            prop_assert!(device.1 == pairs[0].1.1);
            prop_assert!(device.3.as_ref().is_none_or(|replica| *replica == pairs[(rank + 1) % world].1.2));
        }
    }
}

#[test]
fn moments_that_are_offloaded_give_the_bits_of_those_that_stay() {
    let resting = vec![None, Some(Group::LORA), None, Some(Group("expert")), None];
    for world in 1..=3 {
        let settings = Optimizer { ema_decay: Some(0.7), ..settings() };
        let case =
            |offloaded| Case { world, settings: settings.clone(), offloaded, resting: resting.clone() };
        let pairs = on_ring(world, |_, comm| {
            [false, true].map(|offloaded| ended::<Device>(&FlexDevice, &case(offloaded), comm))
        });
        assert!(pairs.iter().all(|[stays, offloaded]| stays == offloaded), "a world of {world}");
    }
}

#[test]
fn a_checkpoint_goes_from_the_host_to_a_device_and_back_bit_for_bit() {
    let files: Vec<_> = trained(2, 3).into_iter().map(|(optimizer, _)| optimizer.export()).collect();
    let views: Vec<&[u8]> = files.iter().map(Vec::as_slice).collect();
    let read = |rank| {
        let (layout, partition) = (layout(), Partition::new(Cuts::equal(layout().len(), 2), Rank(rank)));
        let mut optimizer =
            ShardedOptimizer::<Device>::at(&FlexDevice, &layout, partition, &settings(), false);
        optimizer.import(&views).expect("the files are whole");
        optimizer.export()
    };
    assert!(files == [read(0), read(1)]);
}

#[test]
fn a_state_that_is_prepared_on_a_device_is_given_without_taking_the_step() {
    // The barrier fails because rank 1 leaves before it: what rank 0 has prepared is there, and so is what
    // was before.
    let seen = on_ring(2, |rank, comm| {
        let place = FlexDevice;
        let mut optimizer = ReplicatedOptimizer::<Device>::at(
            &place,
            &layout(),
            Partition::new(Cuts::equal(layout().len(), 2), Rank(rank as u32)),
            &settings(),
            Keeps { replica: Some(1), offloaded: false },
        );
        let start = noise(layout().len(), 0);
        optimizer.begin(0, 0, &start);
        let mut weights = Device::of(&place, start.clone());
        let mut grads = Device::of(&place, noise(layout().len(), 1 + rank));
        if rank == 1 {
            let mut sums = noise(layout().len(), 1 + rank);
            comm.reduce_scatter_in_place(BufMut::F32(&mut sums), Reduce::Sum).expect("both are here");
            let own = chunk(sums.len(), 2, 1);
            // The whole's and each group's.
            let mut squares = vec![0.0; 1 + layout().groups().len()];
            squares[0] = sums[own].iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
            comm.all_reduce(BufMut::F64(&mut squares), Reduce::Sum).expect("both are here");
            comm.shift_in_place(BufMut::F32(&mut sums), 1).expect("both are here");
            return None;
        }
        optimizer.step(&mut grads, &mut weights, &input(), comm).expect_err("the other one has left");
        let versions = optimizer.versions().0;
        let state = |version| optimizer.state(Copy::Own, version, &start, &grads);
        let before = state(0).expect("nothing was taken");
        assert!(
            before.weights[..] == start[chunk(start.len(), 2, 0)]
                && floats::<Vec<f32>>(&before.state[0]).iter().all(|m| *m == 0.0)
        );
        Some((versions, state(1).expect("prepared")))
    });
    let (versions, prepared) = seen[0].clone().expect("rank 0 has seen it");
    assert!(versions.older && versions.newest == 1);
    let reference = &trained(2, 1)[0];
    assert_close(&reference.1[chunk(layout().len(), 2, 0)], &prepared.weights, WEIGHTS, "weights");
    assert_close(
        floats::<Vec<f32>>(&reference.0.state[0]),
        floats::<Vec<f32>>(&prepared.state[0]),
        FIRST,
        "first moments",
    );
}
