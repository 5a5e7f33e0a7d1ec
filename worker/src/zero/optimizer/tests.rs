//! The partitioned optimizer against torch, against itself without partition, and against itself resumed.

use std::path::Path;

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;

use super::*;
use crate::{
    collective::{Ring, Solo, chunk, loopback},
    params::Init,
    zero::{Copy, MirroredAdamW, StateError},
};

/// A few tensors of odd sizes, so that shard borders cut them.
fn layout() -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (name, shape, group, decay) in [
        ("lora.a", &[5, 7][..], Group::Lora, true),
        ("lora.b", &[9, 5], Group::Lora, true),
        ("expert.weight", &[16, 11], Group::Expert, true),
        ("expert.bias", &[16], Group::Expert, false),
        ("sensor.weight", &[3, 5], Group::Sensor, true),
    ] {
        layout.add(name.into(), shape, group, decay, Init::Zeros);
    }
    layout
}

fn settings() -> Optimizer {
    Optimizer { weight_decay: 0.1, clip_norm: 0.5, ..Optimizer::default() }
}

fn input() -> StepInput {
    StepInput { scale: 0.25, rates: LearningRates { lora: 1e-3, expert: 1e-2, sensor: 3e-3 }, resting: None }
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
    optimizer: &mut ShardedAdamW,
    comm: &mut dyn Collective,
    weights: &mut [f32],
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let mut grads = noise(weights.len(), 1 + 10 * step + comm.rank().0 as usize);
        optimizer.step(&mut grads, weights, &input(), comm).expect("a step");
    }
}

/// Optimizers and weights of all ranks after `steps` steps from zero moments.
fn trained(world: usize, steps: usize) -> Vec<(ShardedAdamW, Vec<f32>)> {
    on_ring(world, |rank, comm| {
        let mut optimizer = ShardedAdamW::new(&layout(), world, Rank(rank as u32), &settings());
        let mut weights = noise(layout().len(), 0);
        run(&mut optimizer, comm, &mut weights, 0..steps);
        (optimizer, weights)
    })
}

fn moments(ranks: &[ShardedAdamW]) -> (Vec<f32>, Vec<f32>) {
    let join = |of: fn(&ShardedAdamW) -> &Vec<f32>| ranks.iter().flat_map(|o| of(o).clone()).collect();
    (join(|o| &o.exp_avg), join(|o| &o.exp_avg_sq))
}

fn files(ranks: &[ShardedAdamW]) -> Vec<Vec<u8>> {
    ranks.iter().map(ShardedAdamW::export).collect()
}

fn views(files: &[Vec<u8>]) -> Vec<&[u8]> {
    files.iter().map(Vec::as_slice).collect()
}

/// What `world` ranks hold after reading `files`.
fn resharded(files: &[Vec<u8>], world: usize) -> Vec<ShardedAdamW> {
    (0..world)
        .map(|rank| {
            let mut optimizer = ShardedAdamW::new(&layout(), world, Rank(rank as u32), &settings());
            optimizer.import(&views(files)).expect("the files are whole");
            optimizer
        })
        .collect()
}

struct Golden {
    meta: Value,
    bytes: Vec<u8>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures/zero").join(name);
        let bytes = std::fs::read(path).expect("the fixture is in the repository");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let metadata = header.metadata().as_ref().expect("it has metadata");
        Self { meta: serde_json::from_str(&metadata["fixture"]).expect("JSON"), bytes }
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let tensor = file.tensor(name).expect("the fixture has it");
        tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    fn number(&self, name: &str) -> f64 {
        self.meta[name].as_f64().expect("a number")
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        self.meta[name].as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
    }

    fn layout(&self) -> TrainableLayout {
        let mut layout = TrainableLayout::default();
        for param in self.meta["params"].as_array().expect("a list") {
            let shape: Vec<usize> = param[1]
                .as_array()
                .expect("a shape")
                .iter()
                .map(|v| v.as_u64().expect("a size") as usize)
                .collect();
            let group = match param[2].as_str().expect("a group") {
                "lora" => Group::Lora,
                "expert" => Group::Expert,
                _ => Group::Sensor,
            };
            let name = param[0].as_str().expect("a name").to_owned();
            layout.add(name, &shape, group, param[3].as_bool().expect("a flag"), Init::Zeros);
        }
        layout
    }

    fn settings(&self) -> Optimizer {
        let betas = self.numbers("betas");
        Optimizer {
            betas: [betas[0], betas[1]],
            eps: self.number("eps"),
            weight_decay: self.number("weight_decay"),
            clip_norm: self.number("clip_norm"),
            ..Optimizer::default()
        }
    }

    fn input(&self, step: usize) -> StepInput {
        let multiplier = self.numbers("multipliers")[step];
        let peak = |group: &str| self.meta["peak"][group].as_f64().expect("a rate") * multiplier;
        let rates = LearningRates { lora: peak("lora"), expert: peak("expert"), sensor: peak("sensor") };
        let rests = |steps: &Vec<Value>| steps.contains(&step.into());
        let resting = self.meta["resting"].as_array().is_some_and(rests).then_some(Group::Lora);
        StepInput { scale: self.number("scale"), rates, resting }
    }
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut ours.iter().zip(theirs).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut theirs.iter().map(|b| f64::from(*b)))
}

#[test]
fn it_repeats_torch_with_groups_decay_and_clipping_at_every_world_size() {
    repeats_torch(&Golden::read("adamw.safetensors"));
}

/// In the steps where the group rests its gradients are handed over all the same: they must not count.
#[test]
fn a_group_that_rests_is_as_without_gradient_in_torch() {
    let golden = Golden::read("resting.safetensors");
    assert!(golden.input(2).resting == Some(Group::Lora) && golden.input(1).resting.is_none());
    repeats_torch(&golden);
}

fn repeats_torch(golden: &Golden) {
    let layout = golden.layout();
    for world in 1..=3 {
        let ranks = on_ring(world, |rank, comm| {
            let mut optimizer = ShardedAdamW::new(&layout, world, Rank(rank as u32), &golden.settings());
            let mut weights = golden.tensor("initial");
            for (step, norm) in golden.numbers("norms").into_iter().enumerate() {
                // Each rank brings its share of the gradient; a power of two would hide the order of additions.
                let share = [0.5, 0.3, 0.2][rank] / [0.5f32, 0.8, 1.0][world - 1];
                let mut grads: Vec<_> =
                    golden.tensor(&format!("grads.{step}")).iter().map(|g| g * share).collect();
                let outcome =
                    optimizer.step(&mut grads, &mut weights, &golden.input(step), comm).expect("a step");
                assert!((outcome.grad_norm / norm - 1.0).abs() < 1e-6, "{} for {norm}", outcome.grad_norm);
                assert_eq!(outcome.clipped, norm > golden.number("clip_norm"));
                let error = relative_error(&weights, &golden.tensor(&format!("weights.{step}")));
                assert!(error < 1e-6, "step {step} in a world of {world}: {error:e}");
            }
            optimizer
        });
        let (exp_avg, exp_avg_sq) = moments(&ranks);
        assert!(relative_error(&exp_avg, &golden.tensor("exp_avg")) < 1e-6);
        assert!(relative_error(&exp_avg_sq, &golden.tensor("exp_avg_sq")) < 1e-6);
    }
}

/// Gradients are summed here in the ring's own order, so the only difference left is the order in which f64 partial sums of
/// squares meet: it is below the last bit of the f32 factor that gradients are multiplied with.
#[test]
fn partitioned_steps_give_the_bits_of_unpartitioned_ones() {
    let len = layout().len();
    for world in 2..=4 {
        let partitioned = trained(world, 5);
        let mut optimizer = ShardedAdamW::new(&layout(), 1, Rank(0), &settings());
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

/// Weights of the adapter, whole, and both of its moments as far as they are this rank's.
fn lora_bits(optimizer: &ShardedAdamW, weights: &[f32]) -> (Vec<u32>, Vec<u32>) {
    let lora = |range: &std::ops::Range<usize>| {
        layout().params()[..2].iter().any(|p| p.range().contains(&range.start))
    };
    let own = optimizer.partition.own();
    let segments = optimizer.segments.iter().filter(|segment| lora(&segment.range));
    let moments = segments.flat_map(|s| {
        let at = s.range.start - own.start..s.range.end - own.start;
        [&optimizer.exp_avg[at.clone()], &optimizer.exp_avg_sq[at]].concat()
    });
    let adapter = weights[..layout().params()[2].offset].iter();
    (adapter.map(|w| w.to_bits()).collect(), moments.map(f32::to_bits).collect())
}

#[test]
fn what_rests_keeps_its_bits_on_owner_and_mirror_and_a_bad_gradient_of_it_harms_nobody() {
    for world in 1..=4 {
        on_ring(world, |rank, comm| {
            let mut optimizer = ShardedAdamW::new(&layout(), world, Rank(rank as u32), &settings());
            let mut mirrored = MirroredAdamW::new(&layout(), world, Rank(rank as u32), &settings(), true);
            let mut weights = noise(layout().len(), 0);
            let mut again = weights.clone();
            mirrored.begin(0, &again);
            let mut before = lora_bits(&optimizer, &weights);
            for step in 0..6 {
                let resting = (step % 3 > 0).then_some(Group::Lora);
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
                let twin = mirrored.step(&mut grads, &mut again, &input, comm).expect("a step").grad_norm;
                assert_eq!(norm.to_bits(), twin.to_bits());
                assert!(again == weights, "step {step} with a mirror");
            }
            let previous = Rank(((rank + world - 1) % world) as u32);
            let own = mirrored.state(Copy::Own, 6, &again, &[]).expect("the newest version");
            assert!(own.exp_avg == optimizer.exp_avg && own.exp_avg_sq == optimizer.exp_avg_sq);
            if world > 1 {
                let mirror = mirrored.state(Copy::Mirror, 6, &again, &[]).expect("the newest version");
                assert!(mirror.weights[..] == again[chunk(again.len(), world, previous.0 as usize)]);
            }
        });
    }
}

#[test]
fn a_resumed_run_gives_the_bits_of_an_uninterrupted_one() {
    for world in 1..=3 {
        let whole = trained(world, 6);
        let resumed = on_ring(world, |rank, comm| {
            let mut first = ShardedAdamW::new(&layout(), world, Rank(rank as u32), &settings());
            let mut weights = noise(layout().len(), 0);
            run(&mut first, comm, &mut weights, 0..3);
            (first.export(), weights)
        });
        let saved: Vec<_> = resumed.iter().map(|(file, _)| file.clone()).collect();
        let resumed = on_ring(world, |rank, comm| {
            let mut second = ShardedAdamW::new(&layout(), world, Rank(rank as u32), &settings());
            second.import(&views(&saved)).expect("the files are whole");
            let mut weights = resumed[rank].1.clone();
            run(&mut second, comm, &mut weights, 3..6);
            (second, weights)
        });
        for ((whole, weights), (second, resumed)) in whole.iter().zip(&resumed) {
            assert!(weights == resumed);
            assert!(whole.export() == second.export());
            assert_eq!(second.steps(), 6);
        }
    }
}

#[test]
fn a_state_survives_any_change_of_world_bit_for_bit() {
    let two: Vec<_> = trained(2, 3).into_iter().map(|(optimizer, _)| optimizer).collect();
    let three = resharded(&files(&two), 3);
    let one = resharded(&files(&three), 1);
    let many = resharded(&files(&one), 7);
    let back = resharded(&files(&many), 2);
    for ranks in [&three, &one, &many, &back] {
        assert!(moments(ranks) == moments(&two));
        assert!(ranks.iter().all(|optimizer| optimizer.steps() == 3));
    }
    assert!(files(&back) == files(&two));
}

#[test]
fn a_state_fits_a_layout_in_another_order() {
    let trained = trained(2, 2);
    let mut reversed = TrainableLayout::default();
    for param in layout().params().iter().rev() {
        reversed.add(param.name.clone(), &param.shape, param.group, param.decay, Init::Zeros);
    }
    let ranks: Vec<_> = trained.into_iter().map(|(optimizer, _)| optimizer).collect();
    let mut optimizer = ShardedAdamW::new(&reversed, 1, Rank(0), &settings());
    optimizer.import(&views(&files(&ranks))).expect("names decide");
    let whole = moments(&ranks).0;
    for param in layout().params() {
        let there = reversed.get(reversed.find(&param.name).expect("the same names")).offset;
        assert_eq!(whole[param.offset..][..param.len()], optimizer.exp_avg[there..][..param.len()]);
    }
}

#[test]
fn a_gradient_that_is_not_finite_stops_all_ranks_before_anything_changes() {
    for bad in [f32::NAN, f32::INFINITY] {
        let names = on_ring(2, |rank, comm| {
            let mut optimizer = ShardedAdamW::new(&layout(), 2, Rank(rank as u32), &settings());
            let before = noise(layout().len(), 0);
            let (mut weights, mut grads) = (before.clone(), noise(layout().len(), 5));
            if rank == 1 {
                // In rank 0's shard, brought by rank 1.
                grads[40] = bad;
            }
            let error = optimizer.step(&mut grads, &mut weights, &input(), comm).expect_err("not finite");
            assert!(
                weights == before && optimizer.steps() == 0 && optimizer.exp_avg.iter().all(|m| *m == 0.0)
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
    let mut optimizer = ShardedAdamW::new(&layout(), 1, Rank(0), &settings());
    let (mut right, mut wrong) = (noise(layout().len(), 0), noise(3, 0));
    let comm = &mut Solo::default();
    assert!(optimizer.step(&mut wrong, &mut right.clone(), &input(), comm).is_err());
    assert!(optimizer.step(&mut right, &mut wrong, &input(), comm).is_err());
    let mut other = ShardedAdamW::new(&layout(), 2, Rank(0), &settings());
    let error = other.step(&mut right.clone(), &mut right, &input(), comm).expect_err("a world of one");
    assert!(error.to_string().contains("expected 2, found 1"), "{error}");
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut layout = TrainableLayout::default();
    layout.add("w".into(), &[300, 1000], Group::Expert, true, Init::Zeros);
    layout.add("b".into(), &[1001], Group::Expert, false, Init::Zeros);
    let in_pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool starts");
        let mut optimizer = ShardedAdamW::new(&layout, 1, Rank(0), &settings());
        let mut weights = noise(layout.len(), 0);
        pool.install(|| run(&mut optimizer, &mut Solo::default(), &mut weights, 0..2));
        weights
    };
    assert!(in_pool(1) == in_pool(3));
}

#[test]
fn the_bytes_are_those_of_the_formula() {
    let bytes =
        on_ring(2, |rank, comm| ShardedAdamW::new(&layout(), 2, Rank(rank as u32), &settings()).bytes(comm));
    let whole = layout().len() as u64;
    assert_eq!(bytes[0].moments.0 + bytes[1].moments.0, 8 * whole);
    for bytes in bytes {
        assert_eq!((bytes.weights.0, bytes.grads.0), (4 * whole, 4 * whole));
        assert_eq!(bytes.moments_unpartitioned.0, 8 * whole);
        assert_eq!(bytes.comm_buffers.0, 128 << 10);
    }
}

#[test]
fn files_that_do_not_make_up_one_checkpoint_are_refused_and_named() {
    let good: Vec<_> = trained(2, 1).into_iter().map(|(optimizer, _)| optimizer).collect();
    let (good, later) = (files(&good), files(&trained(2, 2).into_iter().map(|(o, _)| o).collect::<Vec<_>>()));
    let import = |files: &[&[u8]]| {
        let mut optimizer = ShardedAdamW::new(&layout(), 1, Rank(0), &settings());
        let error = optimizer.import(files).expect_err("not one checkpoint");
        assert!(optimizer.steps() == 0 && optimizer.exp_avg.iter().all(|m| *m == 0.0), "nothing has changed");
        error
    };
    assert!(matches!(import(&[]), StateError::Unreadable { .. }));
    assert!(matches!(import(&[&good[0]]), StateError::Coverage { copies: 0, .. }));
    assert!(matches!(import(&[&good[0], &good[1], &good[1]]), StateError::Coverage { copies: 2, .. }));
    assert!(matches!(import(&[&good[0], &later[1]]), StateError::Steps { file: 1, expected: 1, found: 2 }));
    assert!(matches!(
        import(&[&good[0], &good[1][..good[1].len() - 1]]),
        StateError::Unreadable { file: 1, .. }
    ));
    assert!(matches!(import(&[b"not a file at all"]), StateError::Unreadable { file: 0, .. }));
}

#[test]
fn a_state_of_another_model_is_refused_with_the_name_of_the_tensor() {
    let mut other = TrainableLayout::default();
    other.add("lora.a".into(), &[5, 8], Group::Lora, true, Init::Zeros);
    let file = ShardedAdamW::new(&other, 1, Rank(0), &settings()).export();
    let mut optimizer = ShardedAdamW::new(&layout(), 1, Rank(0), &settings());
    let error = optimizer.import(&[&file]).expect_err("lora.a has another size");
    assert!(error.to_string().contains("exp_avg.lora.a[0..]"), "{error}");
    let mut unknown = TrainableLayout::default();
    unknown.add("lora.z".into(), &[5], Group::Lora, true, Init::Zeros);
    let file = ShardedAdamW::new(&unknown, 1, Rank(0), &settings()).export();
    let error = optimizer.import(&[&file]).expect_err("lora.z is unknown");
    assert!(error.to_string().contains("lora.z"), "{error}");
}

proptest! {
    #[test]
    fn garbled_files_are_errors_and_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut file = ShardedAdamW::new(&layout(), 1, Rank(0), &settings()).export();
        let at = at.index(file.len());
        file[at] = byte;
        let mut optimizer = ShardedAdamW::new(&layout(), 1, Rank(0), &settings());
        let _ = optimizer.import(&[&file]);
        let _ = optimizer.import(&[&file[..at]]);
    }
}
