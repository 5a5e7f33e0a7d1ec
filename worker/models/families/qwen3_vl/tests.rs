//! What the golden comparison (`integration-tests`) does not see: kept features with streams, gradients in
//! every recompute mode, generation, learned positions.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::{
    backend::{Flex, flex::FlexDevice},
    tensor::{Int, Tensor, TensorData},
};
use coxswain_nn::{
    dtypes::WeightsDtype,
    kernels::{FlatOps, flat::Flat},
    lora::{Lora, LoraPlan, LoraTargets},
    params::{FlatGrads, ParamScope, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::Recompute;
use serde_json::Value;

use super::{Qwen3Vl, Qwen3VlModel, positions::ResampledPositions};
use crate::{
    pretrained::prompts::{Prompts, Rows},
    two_towers::{grid, inputs::ForwardInputs},
    vision_language::{KeptInput, LoadOptions, Tap, VisionLanguage, VlFamily, VlPass},
};

/// Three streams and four layers; rows with two images, none and one; padding on the right.
const CASE: &str = "qwen3-untied-right";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/golden")
}

/// A model of a golden case, adapters with values of some size, and the case's inputs.
struct Fixture {
    model: Qwen3VlModel<Flex>,
    trainables: Trainables<Flex>,
    inputs: ForwardInputs,
    pixel_values: Vec<Arc<Vec<f32>>>,
}

impl Fixture {
    fn new(case: &str, targets: Option<&str>) -> Self {
        let dir = fixtures().join(case);
        let outline = Qwen3Vl.outline(&dir.join("model")).unwrap();
        let plan = targets.map(|targets| {
            let targets = LoraTargets::Regex(targets.into());
            LoraPlan::resolve(&Lora { rank: 2, alpha: 4.0, targets, ..Lora::default() }, &outline.modules)
                .unwrap()
        });
        let mut layout = TrainableLayout::default();
        let options = LoadOptions { head: true, ..WeightsDtype::Float32.into() };
        let model =
            Qwen3VlModel::load(&dir.join("model"), options, plan.as_ref(), &mut layout, &FlexDevice).unwrap();
        let values = (0..layout.len()).map(|at| ((at * 37 % 101) as f32 - 50.0) / 400.0).collect();
        let inputs = ForwardInputs::read(&dir.join("inputs.safetensors"), model.sizes.patch_values).unwrap();
        let pixel_values = vec![Arc::new(inputs.pixel_values.clone())];
        Self { model, trainables: Trainables::new(layout, values, &FlexDevice), inputs, pixel_values }
    }

    fn pass<'a>(&'a self, recompute: Recompute, kept: Option<KeptInput<'a>>) -> VlPass<'a, Flex> {
        let prompts = Prompts {
            input_ids: &self.inputs.input_ids,
            rows: Rows::Padded(&self.inputs.valid),
            images: &self.inputs.grids,
            pixel_values: &self.pixel_values,
        };
        let retention = Retention::in_float32(recompute);
        VlPass { prompts, kept, trainables: &self.trainables, retention, dropout: None }
    }

    /// Features at a tap, to be kept.
    fn features(&self, tap: Tap) -> Vec<f32> {
        let run = self.model.run(self.pass(Recompute::None, None)).unwrap();
        run.features(tap).unwrap()
    }

    /// The gradient of all that trains where every valid token's final hidden states are summed up, and so,
    /// times `weight`, is what is at the tap `also`.
    fn gradient(
        &self,
        recompute: Recompute,
        kept: Option<KeptInput<'_>>,
        also: Option<(Tap, f32)>,
    ) -> Vec<f32> {
        let run = self.model.run(self.pass(recompute, kept)).unwrap();
        let reads: Vec<Tap> = also.map(|(tap, _)| tap).into_iter().chain([Tap::Final]).collect();
        let (read, trace) = run.forward(&reads, &mut |_| ()).unwrap();
        let weights = also.map(|(_, weight)| weight).into_iter().chain([1.0]);
        let gradients = read.iter().zip(weights).map(|(x_nd, weight)| self.valid(x_nd.dims()) * weight);
        let mut grads = FlatGrads::<<Flex as FlatOps>::Flat>::at(&(), self.trainables.layout().len());
        trace.backward(gradients.collect(), &mut grads, &mut |_| ()).unwrap();
        grads.values().read(0..self.trainables.layout().len()).into_owned()
    }

    /// Ones at valid tokens; nothing comes from padding.
    fn valid(&self, [tokens, width]: [usize; 2]) -> Tensor<Flex, 2> {
        let mut values = vec![0.0; tokens * width];
        for cells in Rows::Padded(&self.inputs.valid).cells(tokens) {
            values[cells.start * width..cells.end * width].fill(1.0);
        }
        Tensor::from_data(TensorData::new(values, [tokens, width]), &FlexDevice)
    }

    fn hidden(&self, kept: Option<KeptInput<'_>>) -> Vec<f32> {
        let run = self.model.run(self.pass(Recompute::None, kept)).unwrap();
        run.features(Tap::Final).unwrap()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_pass_from_kept_features_has_the_bits_of_a_whole_one_at_every_tap() {
    let fixture = Fixture::new(CASE, None);
    let whole = bits(&fixture.hidden(None));
    let (tokens, images): (usize, usize) = (
        fixture.inputs.valid.iter().map(ExactSizeIterator::len).sum(),
        fixture.inputs.grids.iter().map(|shape| fixture.model.outline.patches.tokens(*shape)).sum(),
    );
    let width = fixture.model.sizes.text.hidden_size;
    for (tap, rows) in [
        (Tap::Vision, 4 * images),
        (Tap::Layer(0), tokens + 3 * images),
        (Tap::Layer(1), tokens + 2 * images),
        (Tap::Layer(2), tokens + images),
        (Tap::Layer(3), tokens),
        (Tap::Final, tokens),
    ] {
        let values = fixture.features(tap);
        assert_eq!(values.len(), rows * width, "{tap}");
        let kept = Some(KeptInput { tap, values: &values });
        assert!(bits(&fixture.hidden(kept)) == whole, "{tap}");
        // What is kept may be taken from what was kept below.
        let run = fixture.model.run(fixture.pass(Recompute::None, kept)).unwrap();
        let above =
            [Tap::Layer(2), Tap::Layer(4)].into_iter().filter(|above| tap != Tap::Final && *above >= tap);
        above
            .for_each(|above| assert!(bits(&run.features(above).unwrap()) == bits(&fixture.features(above))));
    }
}

#[test]
fn features_depend_on_their_own_sample_alone() {
    let fixture = Fixture::new(CASE, None);
    let Fixture { model, inputs, .. } = &fixture;
    let rows = Rows::Padded(&inputs.valid);
    let width = model.sizes.text.hidden_size;
    let images = model.rope_index(&inputs.input_ids, rows, &inputs.grids).unwrap().images_per_row;
    for tap in [Tap::Vision, Tap::Layer(0), Tap::Layer(2), Tap::Final] {
        let together = fixture.features(tap);
        let (mut rest, mut grids, mut pixels) = (&together[..], &inputs.grids[..], &inputs.pixel_values[..]);
        for (cells, count) in rows.cells(inputs.input_ids.len()).into_iter().zip(&images) {
            let (own_grids, other_grids) = grids.split_at(*count);
            let patches: u32 = own_grids.iter().map(|grid| grid.iter().product::<u32>()).sum();
            let (own_pixels, other_pixels) = pixels.split_at(patches as usize * model.sizes.patch_values);
            (grids, pixels) = (other_grids, other_pixels);
            let valid: Vec<_> = std::iter::once(0..cells.len() as u32).collect();
            let prompts = Prompts {
                input_ids: &inputs.input_ids[cells.clone()],
                rows: Rows::Padded(&valid),
                images: own_grids,
                pixel_values: &[Arc::new(own_pixels.to_vec())],
            };
            let pass = VlPass { prompts, ..fixture.pass(Recompute::None, None) };
            let alone = model.run(pass).unwrap().features(tap).unwrap();
            let (own, others) = rest.split_at(alone.len());
            assert_eq!(alone.len(), model.outline.rows_at(tap, cells.len(), own_grids) * width, "{tap}");
            assert!(bits(own) == bits(&alone), "{tap}");
            rest = others;
        }
        assert!(rest.is_empty(), "{tap}");
    }
}

#[test]
fn gradients_above_a_tap_are_those_of_a_whole_pass() {
    let fixture = Fixture::new(CASE, Some(r".*layers\.[23]\..*_proj"));
    let whole = fixture.gradient(Recompute::Full, None, None);
    assert!(whole.iter().any(|value| value.abs() > 1e-3));
    for tap in [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Layer(2)] {
        let values = fixture.features(tap);
        let kept = Some(KeptInput { tap, values: &values });
        assert!(bits(&fixture.gradient(Recompute::Full, kept, None)) == bits(&whole), "{tap}");
    }
}

#[test]
fn gradients_through_every_stream_are_the_same_bits_in_every_recompute_mode() {
    let streams = r".*(visual\.blocks\.\d\.(attn\.(qkv|proj)|mlp\.linear_fc\d)|deepstack_merger_list\.1\.linear_fc1|layers\.\d\..*_proj)";
    for targets in [streams, r".*deepstack_merger_list\.\d\.linear_fc2", r".*visual\.merger\.linear_fc1"] {
        let fixture = Fixture::new(CASE, Some(targets));
        let of = |mode| bits(&fixture.gradient(mode, None, None));
        let plain = of(Recompute::None);
        assert!(plain.iter().any(|bits| *bits != 0), "{targets}");
        for mode in [Recompute::Selective, Recompute::Full, Recompute::Every(2)] {
            assert!(of(mode) == plain, "{targets} with {mode:?}");
        }
    }
}

#[test]
fn gradients_of_several_taps_add_up() {
    let fixture = Fixture::new(CASE, Some(r".*(visual\.blocks\.\d\.attn\.qkv|layers\.\d\..*_proj)"));
    let of = |also| fixture.gradient(Recompute::Full, None, also);
    let alone = of(None);
    // Zeros of either sign.
    assert!(of(Some((Tap::Layer(2), 0.0))) == alone);
    let [one, two] = [1.0, 2.0].map(|weight| of(Some((Tap::Layer(2), weight))));
    let (mut off, mut size) = (0.0, 0.0);
    for ((alone, one), two) in alone.iter().zip(&one).zip(&two) {
        off += f64::from(two - alone - 2.0 * (one - alone)).powi(2);
        size += f64::from(one - alone).powi(2);
    }
    assert!(size > 1e-6 && (off / size).sqrt() < 1e-4, "{off} of {size}");
}

#[test]
fn what_is_written_token_by_token_is_what_a_whole_pass_gives() {
    let fixture = Fixture::new("qwen3-tied-left", None);
    let logits = |fixture: &Fixture| {
        let run = fixture.model.run(fixture.pass(Recompute::None, None)).unwrap();
        let seq = fixture.inputs.seq as i32;
        let last: Vec<i32> = (1..=fixture.inputs.batch() as i32).map(|row| row * seq - 1).collect();
        let rows = TensorData::new(last, [fixture.inputs.batch()]);
        let last: Tensor<Flex, 1, Int> = Tensor::from_data(rows, &FlexDevice);
        let x_bd = run.until(Tap::Final).unwrap().select(0, last);
        let params = ParamScope::<Flex>::frozen(&fixture.trainables);
        fixture.model.lm_head(&params, x_bd).unwrap().into_data().into_vec::<f32>().unwrap()
    };
    let near = |ours: Tensor<Flex, 2>, whole: &[f32]| {
        let ours = ours.into_data().into_vec::<f32>().unwrap();
        assert_eq!(ours.len(), whole.len());
        let off = ours.iter().zip(whole).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let size = whole.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        assert!((off / size).sqrt() < 1e-5, "{}", (off / size).sqrt());
    };
    let pass = fixture.pass(Recompute::None, None);
    let (mut decoder, first) = fixture.model.decode(pass.trainables, pass.retention, pass.prompts).unwrap();
    near(first, &logits(&fixture));
    let next = [7, 11, 13];
    let longer = {
        let mut inputs = fixture.inputs.clone();
        let rows = inputs.input_ids.chunks_exact(inputs.seq).zip(next);
        inputs.input_ids = rows.flat_map(|(row, next)| row.iter().copied().chain([next])).collect();
        inputs.seq += 1;
        inputs.valid.iter_mut().for_each(|row| row.end += 1);
        Fixture { inputs, ..Fixture::new("qwen3-tied-left", None) }
    };
    near(decoder.follow(&next).unwrap(), &logits(&longer));
}

#[test]
fn learned_positions_are_resampled_as_transformers_does_it() {
    let text = fs::read_to_string(fixtures().join("qwen3-positions.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    for case in cases.as_array().unwrap() {
        let side = case["side"].as_u64().unwrap() as usize;
        let grids: Vec<[u32; 3]> = serde_json::from_value(case["grids"].clone()).unwrap();
        let (mut ours, mut positions) = (ResampledPositions::default(), Vec::new());
        for &image @ [t, h, w] in &grids {
            let frame: Vec<_> = grid::positions([h, w], 2).collect();
            (0..t).for_each(|_| {
                ours.add(side, image, &frame);
                positions.extend_from_slice(&frame);
            });
        }
        let theirs: Vec<[u32; 2]> = serde_json::from_value(case["positions"].clone()).unwrap();
        // Of a large image every 29th patch is on record.
        let step = if positions.len() == theirs.len() { 1 } else { 29 };
        let kept: Vec<_> = positions.into_iter().step_by(step).collect();
        assert_eq!(kept, theirs, "{grids:?}");
        let entries: [Vec<i32>; 4] = serde_json::from_value(case["entries"].clone()).unwrap();
        let shares: [Vec<f32>; 4] = serde_json::from_value(case["shares"].clone()).unwrap();
        for number in 0..4 {
            let ours_kept: Vec<_> = ours.shares[number].iter().step_by(step).collect();
            assert!(
                ours_kept.iter().zip(&shares[number]).all(|(ours, theirs)| (**ours - theirs).abs() < 1e-6)
            );
            // An entry without a share is any.
            let of = ours.entries[number].iter().step_by(step).zip(&entries[number]).zip(&shares[number]);
            of.for_each(|((ours, theirs), share)| assert!(ours == theirs || *share < 1e-6, "{grids:?}"));
        }
    }
}
