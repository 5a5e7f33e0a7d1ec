//! State that is written and read again, at any world size, and files that are not what they should be.

use proptest::prelude::*;

use super::*;
use crate::zero::{Copy, ReplicatedOptimizer, ScaleState, StateError};
use coxswain_proto::run_spec::LossScale;

fn files(ranks: &[ShardedOptimizer]) -> Vec<Vec<u8>> {
    ranks.iter().map(ShardedOptimizer::export).collect()
}

fn views(files: &[Vec<u8>]) -> Vec<&[u8]> {
    files.iter().map(Vec::as_slice).collect()
}

/// What `world` ranks hold after reading `files`.
fn resharded(files: &[Vec<u8>], world: usize) -> Vec<ShardedOptimizer> {
    (0..world)
        .map(|rank| {
            let mut optimizer = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
            optimizer.import(&views(files)).expect("the files are whole");
            optimizer
        })
        .collect()
}

#[test]
fn a_resumed_run_gives_the_bits_of_an_uninterrupted_one() {
    for world in 1..=3 {
        let whole = trained(world, 6);
        let resumed = on_ring(world, |rank, comm| {
            let mut first = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
            let mut weights = noise(layout().len(), 0);
            run(&mut first, comm, &mut weights, 0..3);
            (first.export(), weights)
        });
        let saved: Vec<_> = resumed.iter().map(|(file, _)| file.clone()).collect();
        let resumed = on_ring(world, |rank, comm| {
            let mut second = ShardedOptimizer::new(&layout(), world, Rank(rank as u32), &settings());
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
fn the_loss_scale_is_a_part_of_the_state_at_any_world_size() {
    let scaled = || {
        let loss_scale = LossScale { initial: Some(65_536.0), growth_interval: Some(3) };
        Optimizer { loss_scale, ..settings() }
    };
    let on =
        |settings: &Optimizer, world, rank| ShardedOptimizer::new(&layout(), world, Rank(rank), settings);
    let mut two = [0, 1].map(|rank| on(&scaled(), 2, rank));
    for optimizer in &mut two {
        // One overflow, then two steps that are taken.
        optimizer.skip(true);
        optimizer.loss_scaler.iter_mut().for_each(|scaler| (0..2).for_each(|_| scaler.taken()));
    }
    let saved = files(&two);
    let expected = Some(ScaleState { exponent: 15, good: 2 });
    let state = |optimizer: &ShardedOptimizer| optimizer.loss_scaler.map(|scaler| scaler.state());
    let mut three = on(&scaled(), 3, 2);
    three.import(&views(&saved)).expect("whole");
    assert_eq!((state(&three), three.steps(), three.skipped), (expected, 1, 1));
    // A run that does not scale takes the rest; one that does begins anew with a state that had none.
    let mut without = on(&settings(), 1, 0);
    without.import(&views(&saved)).expect("whole");
    assert_eq!((state(&without), without.skipped), (None, 1));
    three.import(&views(&[without.export()])).expect("whole");
    assert_eq!(state(&three), expected, "nothing is said of it");
    // Ranks whose scales differ are not of one checkpoint, and a scale that cannot be is damage.
    two[1].skip(true);
    two[1].steps = 1;
    two[1].skipped = 1;
    assert!(on(&scaled(), 1, 0).import(&views(&files(&two))).is_err());
    let text = String::from_utf8_lossy(&saved[0]).into_owned();
    assert!(text.contains(r#""loss_scale_exponent":"15""#), "{text}");
    let at = text.find(r#"_exponent":"15""#).expect("it is there") + r#"_exponent":""#.len();
    let mut damaged = saved[0].clone();
    damaged[at] = b'x';
    let error = on(&scaled(), 2, 0).import(&[damaged.as_slice(), &saved[1]]).expect_err("no number");
    assert!(error.to_string().contains("loss scale"), "{error}");
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
    let mut optimizer = ShardedOptimizer::new(&reversed, 1, Rank(0), &settings());
    optimizer.import(&views(&files(&ranks))).expect("names decide");
    let whole = moments(&ranks).0;
    for param in layout().params() {
        let there = reversed.get(reversed.find(&param.name).expect("the same names")).offset;
        assert_eq!(whole[param.offset..][..param.len()], floats(&optimizer.state[0])[there..][..param.len()]);
    }
}

#[test]
fn a_rank_needs_only_the_files_that_have_of_its_parts() {
    let saved = files(&trained(4, 2).into_iter().map(|(optimizer, _)| optimizer).collect::<Vec<_>>());
    let weights = vec![0.25; layout().len()];
    for world in [2, 3, 4] {
        for rank in 0..world as u32 {
            let fresh = || ReplicatedOptimizer::new(&layout(), world, Rank(rank), &settings(), Some(1));
            let import = |files: &[&[u8]]| {
                let mut optimizer = fresh();
                optimizer.import(files, &weights).expect("its parts are there");
                let (mut bytes, everywhere) = (Vec::new(), 0..layout().len());
                optimizer.write_to(&mut bytes).expect("to memory");
                let replicated =
                    optimizer.state(Copy::Replica, 2, &weights, &Vec::new()).expect("its own version");
                assert!(optimizer.keeps_of(&everywhere));
                (bytes, replicated)
            };
            let parts = fresh();
            let wanted: Vec<&[u8]> = (0..4)
                .map(|of| if parts.keeps_of(&parts.part_in(4, of)) { saved[of].as_slice() } else { &[] })
                .collect();
            let read = wanted.iter().filter(|file| !file.is_empty()).count();
            assert!(world != 4 || read == 2, "{read} files for rank {rank} of {world}");
            assert!(import(&wanted) == import(&views(&saved)), "rank {rank} of {world}");
        }
    }
}

#[test]
fn files_that_do_not_make_up_one_checkpoint_are_refused_and_named() {
    let good: Vec<_> = trained(2, 1).into_iter().map(|(optimizer, _)| optimizer).collect();
    let (good, later) = (files(&good), files(&trained(2, 2).into_iter().map(|(o, _)| o).collect::<Vec<_>>()));
    let import = |files: &[&[u8]]| {
        let mut optimizer = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings());
        let error = optimizer.import(files).expect_err("not one checkpoint");
        assert!(
            optimizer.steps() == 0 && floats(&optimizer.state[0]).iter().all(|m| *m == 0.0),
            "nothing has changed"
        );
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
    other.add("lora.a".into(), &[5, 8], Group::LORA, true, Init::Zeros);
    let file = ShardedOptimizer::new(&other, 1, Rank(0), &settings()).export();
    let mut optimizer = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings());
    let error = optimizer.import(&[&file]).expect_err("lora.a has another size");
    assert!(error.to_string().contains("exp_avg.lora.a[0..]"), "{error}");
    let mut unknown = TrainableLayout::default();
    unknown.add("lora.z".into(), &[5], Group::LORA, true, Init::Zeros);
    let file = ShardedOptimizer::new(&unknown, 1, Rank(0), &settings()).export();
    let error = optimizer.import(&[&file]).expect_err("lora.z is unknown");
    assert!(error.to_string().contains("lora.z"), "{error}");
}

proptest! {
    #[test]
    fn garbled_files_are_errors_and_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut file = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings()).export();
        let at = at.index(file.len());
        file[at] = byte;
        let mut optimizer = ShardedOptimizer::new(&layout(), 1, Rank(0), &settings());
        let _ = optimizer.import(&[&file]);
        let _ = optimizer.import(&[&file[..at]]);
    }
}
