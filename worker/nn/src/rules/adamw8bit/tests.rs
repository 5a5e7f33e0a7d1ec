//! Steps against bitsandbytes' AdamW8bit on the CPU, from a fixture; parts against the whole.

use std::path::Path;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;
use crate::{
    params::{Group, Init, TrainableLayout},
    rules::{Hyperparameters, StateValues, counts, pieces},
};

type Values = Vec<StateValues<Vec<f32>>>;

fn settings() -> Optimizer {
    Optimizer { betas: [0.9, 0.95], eps: 1e-8, ..Optimizer::default() }
}

/// Values of magnitudes that differ by up to 2^12 within a block; the fixture's maker has the same.
fn fraction(i: usize, salt: usize) -> f32 {
    let numerator = ((i * 7919 + salt * 104_729) % 2048) as f32 - 1024.0;
    numerator / 1024.0 * 2f32.powi(-(((i * 31 + salt) % 13) as i32))
}

fn layout(lens: &[usize]) -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for (number, len) in lens.iter().enumerate() {
        layout.add(format!("p{number}"), &[*len], Group::BASE, true, Init::Zeros);
    }
    layout
}

fn fractions(layout: &TrainableLayout, step: usize) -> Vec<f32> {
    let params = layout.params().iter().enumerate();
    params.flat_map(|(salt, param)| (0..param.len()).map(move |i| fraction(i, 10 * step + salt))).collect()
}

/// Weights and state of a part after some steps; `rests` says which parameter is left out in which step.
fn trained(
    layout: &TrainableLayout,
    part: Range<usize>,
    steps: usize,
    rests: impl Fn(usize, usize) -> bool,
) -> (Vec<f32>, Values) {
    let rule = AdamW8bit::new(&settings());
    let buffers = UpdateRule::<Vec<f32>>::state(&rule);
    let pieces = pieces(buffers, layout, &part);
    let lens = buffers.iter().zip(counts(buffers, layout, &part));
    let mut state: Values =
        lens.map(|(buffer, len)| StateValues::zeros(buffer.element, len, |len| vec![0.0; len])).collect();
    let mut weights = fractions(layout, 0)[part.clone()].to_vec();
    for step in 1..=steps {
        let grads = fractions(layout, step);
        let with = Hyperparameters {
            gradient_factor: 1.0,
            lr: 1e-2 / step as f64,
            weight_decay: 0.1,
            step: step as u64,
        };
        let moving = pieces.iter().filter(|piece| !rests(step, piece.param));
        let updates: Vec<_> =
            moving.map(|piece| ParamUpdate { param: &layout.params()[piece.param], piece, with }).collect();
        let (weights, state, grads_from) = (&mut weights, &mut state[..], part.start);
        let part = Part { weights, weights_from: 0, state, grads: &grads, grads_from };
        rule.update(part, &updates, None);
    }
    (weights, state)
}

fn floats(values: &StateValues<Vec<f32>>) -> &[f32] {
    match values {
        StateValues::Float32(values) => values,
        StateValues::Uint8(_) => panic!("codes are no floats"),
    }
}

fn codes(values: &StateValues<Vec<f32>>) -> &[u8] {
    match values {
        StateValues::Uint8(values) => values,
        StateValues::Float32(_) => panic!("floats are no codes"),
    }
}

struct Golden(Vec<u8>);

impl Golden {
    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).expect("a safetensors file");
        file.tensor(name).expect("the fixture has it").data().to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }
}

#[track_caller]
fn assert_close(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1e-3), "{what} at {at}: {a} for {b}");
    }
}

/// A value within a rounding of the border between two codes may get the other one.
#[track_caller]
fn assert_same_codes(ours: &[u8], theirs: &[u8], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let others = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
    assert!(others * 1000 <= ours.len(), "{what}: {others} of {} codes", ours.len());
}

#[test]
fn it_repeats_bitsandbytes_on_the_cpu() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/fixtures/zero/adamw8bit.safetensors");
    let golden = Golden(std::fs::read(path).expect("the fixture is in the repository"));
    assert_eq!(SIGNED.values()[..], golden.floats("qmap1"));
    assert_eq!(UNSIGNED.values()[..], golden.floats("qmap2"));
    let layout = layout(&[4270, 4096, 176]);
    let (weights, state) = trained(&layout, 0..layout.len(), 6, |_, _| false);
    let names = ["large", "exact", "small"];
    let of_all = |what: &str, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| format!("{name}.{what}")).collect()
    };
    let theirs = |what: &str, names: &[&str]| -> Vec<f32> {
        of_all(what, names).iter().flat_map(|name| golden.floats(name)).collect()
    };
    assert_close(&weights, &theirs("weights", &names), "weights");
    assert_close(floats(&state[0]), &theirs("m", &names[2..]), "first moments in float32");
    assert_close(floats(&state[1]), &theirs("v", &names[2..]), "second moments in float32");
    assert_close(floats(&state[3]), &theirs("m_absmax", &names[..2]), "scales of first moments");
    assert_close(floats(&state[5]), &theirs("v_absmax", &names[..2]), "scales of second moments");
    for (buffer, what) in [(2, "m"), (4, "v")] {
        let theirs: Vec<u8> = of_all(what, &names[..2]).iter().flat_map(|name| golden.bytes(name)).collect();
        assert_same_codes(codes(&state[buffer]), &theirs, what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn parts_cut_at_blocks_have_the_bits_of_the_whole(
        lens in prop::collection::vec(prop::sample::select(vec![0usize, 3, 300, 4095, 4096, 4097, 5000, 9000]), 1..5),
        world in 1usize..6, rests in 0usize..4,
    ) {
        let layout = layout(&lens);
        let rests = |step: usize, param: usize| step == 2 && param == rests;
        let (weights, state) = trained(&layout, 0..layout.len(), 3, rests);
        let rule = AdamW8bit::new(&settings());
        let cuts = UpdateRule::<Vec<f32>>::grain(&rule).cuts(&layout, world);
        let mut joined: (Vec<f32>, [Vec<f32>; 4], [Vec<u8>; 2]) = Default::default();
        for rank in 0..world {
            let (weights, state) = trained(&layout, cuts.part(rank), 3, rests);
            joined.0.extend(weights);
            for (all, buffer) in joined.1.iter_mut().zip([0, 1, 3, 5]) {
                all.extend(floats(&state[buffer]));
            }
            for (all, buffer) in joined.2.iter_mut().zip([2, 4]) {
                all.extend(codes(&state[buffer]));
            }
        }
        prop_assert!(joined.0 == weights);
        prop_assert!([0, 1, 3, 5].iter().zip(&joined.1).all(|(buffer, all)| floats(&state[*buffer]) == all));
        prop_assert!([2, 4].iter().zip(&joined.2).all(|(buffer, all)| codes(&state[*buffer]) == all));
    }
}

#[test]
fn it_takes_two_bytes_an_element_and_a_scale_for_each_block_and_moment() {
    let layout = layout(&[4270, 4095]);
    let buffers = UpdateRule::<Vec<f32>>::state(&AdamW8bit::new(&settings())).to_vec();
    // 17 blocks; below 4096 elements both moments are float32.
    assert_eq!(crate::rules::bytes(&buffers, &layout, &(0..layout.len())), 2 * 4270 + 17 * 8 + 8 * 4095);
}
