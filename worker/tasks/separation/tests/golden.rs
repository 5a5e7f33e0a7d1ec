//! The whole network against PyTorch, on the fixtures of
//! `integration-tests/fixtures/make_separation_fixtures.py`.

use std::{collections::HashMap, sync::Arc};

use coxswain_nn::params::TrainableLayout;
use coxswain_nn::recompute::Retention;
use coxswain_proto::run_spec::Recompute;
use safetensors::SafeTensors;

use super::*;
use crate::separation::{
    config::{LossWeights, SeparationSettings},
    data::{SegmentBatch, SegmentSample},
    network::{Separator, SeparatorShape},
    scene::Scene,
    stft::Stft,
};

const VALUES: f64 = 1e-4;
const GRADIENTS: f64 = 1e-3;

/// A case: its tensors, its sizes, and the objective that they describe.
struct GoldenSeparator {
    tensors: HashMap<String, Vec<f32>>,
    objective: SeparationObjective,
    trainables: Trainables<Flex>,
    batch: SegmentBatch,
}

impl GoldenSeparator {
    fn read(case: &str, recompute: Recompute) -> Self {
        let path = repository().join(format!("integration-tests/fixtures/separation/{case}.safetensors"));
        let bytes = std::fs::read(path).expect("a fixture");
        let file = SafeTensors::deserialize(&bytes).expect("a fixture");
        let floats = |bytes: &[u8]| {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>()
        };
        let tensors: HashMap<_, _> =
            file.tensors().into_iter().map(|(name, view)| (name, floats(view.data()))).collect();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a fixture");
        let metadata = metadata.metadata().clone().expect("sizes");
        let number = |key: &str| metadata[key].parse::<usize>().expect("a number");
        let weight = |key: &str| metadata.get(key).map_or(1.0, |text| text.parse().expect("a number"));
        let edges: Vec<usize> =
            metadata["band_edges"].split(',').map(|edge| edge.parse().expect("a number")).collect();
        let shape = SeparatorShape {
            stems: metadata["stems"].split(',').count(),
            bands: edges.windows(2).map(|edges| edges[0]..edges[1]).collect(),
            width: number("hidden_dim"),
            layers: number("layers"),
            heads: number("heads"),
        };
        let mut settings = SeparationSettings::from_spec(&spec(&[])).expect("its own settings");
        settings.loss = LossWeights { waveform: weight("waveform"), spectrum: weight("spectrum") };
        let stft = Stft::new(number("n_fft"), number("hop"), number("samples"));
        let mut layout = TrainableLayout::default();
        let separator = Separator::register(&mut layout, shape);
        let values = layout.params().iter().flat_map(|param| &tensors[&format!("param.{}", param.name)]);
        let trainables = Trainables::new(layout.clone(), values.copied().collect(), &Default::default());
        let signals = |name: &str| {
            let values = &tensors[name];
            let segments = values.chunks_exact(values.len() / number("batch"));
            segments.map(|segment| Arc::new(segment.to_vec())).collect::<Vec<_>>()
        };
        let segments = signals("in.mixture").into_iter().zip(signals("in.stems")).enumerate();
        let segments: Vec<_> = segments
            .map(|(index, (mixture, stems))| SegmentSample { index: index as u64, mixture, stems })
            .collect();
        let batch = SegmentBatch::from_samples(Step(0), stft.frames(), &segments.iter().collect::<Vec<_>>());
        let retention = Retention::in_float32(recompute);
        let objective = SeparationObjective { separator, stft, settings, retention, seed: 0 };
        Self { tensors, objective, trainables, batch }
    }
}

#[test]
fn a_spectrum_is_what_torch_stft_makes_of_a_signal() {
    for case in ["two-stems", "odd"] {
        let golden = GoldenSeparator::read(case, Recompute::None);
        let stft = &golden.objective.stft;
        let mut found = Vec::new();
        stft.spectrum(golden.batch.mixtures(stft.samples())[0], |_, frame| {
            found.extend(frame.iter().flat_map(|value| [value.re, value.im]));
        });
        assert!(relative_error(&found, &golden.tensors["out.spectrum"]) < 1e-6, "{case}");
    }
}

#[test]
fn estimates_loss_and_every_gradient_are_pytorchs() {
    for (case, recompute) in
        [("two-stems", Recompute::None), ("two-stems", Recompute::Full), ("odd", Recompute::Selective)]
    {
        let golden = GoldenSeparator::read(case, recompute);
        let GoldenSeparator { tensors, objective, trainables, batch } = &golden;
        let layout = trainables.layout();
        let mut grads = FlatGrads::new(layout.len());
        let loss = objective.forward_backward(trainables, batch, &mut grads, &mut StageClock::default());
        let (loss, wanted) = (loss.expect("sound").loss_sum, f64::from(tensors["out.loss"][0]));
        assert!((loss / wanted - 1.0).abs() < VALUES, "{case}: {loss} is not {wanted}");

        let scene = Scene::new(objective.separator.shape(), &objective.stft, batch);
        let size = [batch.indices.len(), batch.frames];
        let run = objective.separator.run(trainables, objective.retention, size);
        let estimates = scene.estimates(&run.masks(scene.inputs())).concat();
        let off = relative_error(&estimates, &tensors["out.estimates"]);
        assert!(off < VALUES, "{case}: estimates are off by {off}");

        let gradients = grads.values_mut();
        for param in layout.params() {
            let wanted = &tensors[&format!("grad.{}", param.name)];
            let off = relative_error(&gradients[param.range()], wanted);
            assert!(off < GRADIENTS, "{case}: the gradient of {} is off by {off}", param.name);
        }
        assert_eq!(layout.params().len(), tensors.keys().filter(|key| key.starts_with("grad.")).count());
    }
}
