//! The separator as the engine trains it.

use std::{io, path::Path, sync::Arc};

use coxswain_nn::{
    files::{replace, write_tensors},
    kernels::Tape,
    params::{GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::{
    config::SettingsError,
    ids::Step,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    Artifact, Batch, Evaluation, Example, ExamplePicture, Fault, MicroLoss, Module, Objective, PartSum, Pass,
    Samples, StageClock, TaskError,
};
use serde_json::{Value, json};

use super::{
    bands::split,
    config::SeparationSettings,
    data::{CHANNELS, SegmentBatch, SegmentSample},
    measures::{chunked_sdr, sdr},
    network::{SEPARATOR, Separator, SeparatorShape},
    scene::{MaskLoss, Scene},
    stft::Stft,
};

/// From signals to spectra, as its time is shown.
pub(super) const SPECTRA: &str = "spectra";
/// From masks to the loss and back to the masks.
pub(super) const LOSS: &str = "loss";

/// What held-out segments are measured by: the loss, and decibels of signal over distortion, of whole
/// segments and of chunks of a second. The decibels are better the higher they are.
const MEASURES: [&str; 3] = ["loss", SDR, CSDR];
const SDR: &str = "sdr";
const CSDR: &str = "csdr";

pub(super) const WEIGHTS: Artifact =
    Artifact { path: "separator.safetensors", what: "the separator's weights" };
const CONFIG: Artifact = Artifact { path: "separator.json", what: "configuration of the separator" };

/// A separator, and the run that it is trained by.
pub(super) struct SeparationObjective {
    pub(super) separator: Separator,
    pub(super) stft: Stft,
    pub(super) settings: SeparationSettings,
    pub(super) retention: Retention,
    pub(super) seed: u64,
}

impl SeparationObjective {
    /// The separator of a run, and the layout of everything that trains in it.
    pub fn new(spec: &RunSpec) -> Result<(Self, TrainableLayout), SettingsError> {
        let settings = SeparationSettings::from_spec(spec)?;
        let network = &settings.network;
        let stft = Stft::new(network.n_fft, network.hop, settings.data.segment());
        let mut layout = TrainableLayout::default();
        let separator = Separator::register(&mut layout, shape(&settings));
        let retention = Retention { recompute: spec.train.recompute, activations: network.activations_dtype };
        Ok((Self { separator, stft, retention, seed: spec.run.seed, settings }, layout))
    }

    /// Sizes of its network.
    fn shape(&self) -> &SeparatorShape {
        self.separator.shape()
    }

    fn scene<'a>(&'a self, batch: &'a SegmentBatch) -> Scene<'a> {
        Scene::new(self.separator.shape(), &self.stft, batch)
    }

    /// What it makes of a mixture, `[channels, l]` with no more samples than a segment, which silence
    /// completes: `[stems, channels]` signals of a segment's length.
    pub fn estimates<B: Tape<Base = B>>(&self, trainables: &Trainables<B>, mixture: &[f32]) -> Vec<Vec<f32>> {
        let samples = self.stft.samples();
        let mut whole = vec![0.0; CHANNELS * samples];
        let channels = mixture.chunks_exact((mixture.len() / CHANNELS).max(1));
        whole.chunks_exact_mut(samples).zip(channels).for_each(|(to, of)| to[..of.len()].copy_from_slice(of));
        let segment = SegmentSample { index: 0, mixture: Arc::new(whole), stems: Arc::default() };
        let batch = SegmentBatch::from_samples(Step(0), self.stft.frames(), &[&segment]);
        let scene = self.scene(&batch);
        scene.estimates(&self.masks(trainables, &scene, self.size(&batch)))
    }

    /// The spectrum of a signal as a picture: decibels, the lowest frequency at the bottom.
    fn spectrum(&self, name: String, signal: &[f32]) -> Option<ExamplePicture> {
        /// Below it a bin counts as silent.
        const FLOOR: f32 = 1e-7;
        let mut decibels = Vec::with_capacity(self.stft.frames() * self.stft.bins());
        self.stft.spectrum(signal, |_, bins| {
            decibels.extend(bins.iter().map(|bin| 20.0 * bin.norm().max(FLOOR).log10()));
        });
        ExamplePicture::of_spectrum(name, self.stft.bins(), &decibels)
    }

    fn size(&self, batch: &SegmentBatch) -> [usize; 2] {
        [batch.indices.len(), self.stft.frames()]
    }

    /// Masks of a batch, of a pass that keeps nothing.
    fn masks<B: Tape<Base = B>>(
        &self,
        trainables: &Trainables<B>,
        scene: &Scene<'_>,
        size: [usize; 2],
    ) -> Vec<Vec<f32>> {
        let retention = Retention { recompute: Recompute::None, ..self.retention };
        self.separator.run(trainables, retention, size).masks(scene.inputs())
    }
}

/// Sizes of the network of these settings.
pub(super) fn shape(settings: &SeparationSettings) -> SeparatorShape {
    let network = &settings.network;
    SeparatorShape {
        stems: settings.data.stems.len(),
        bands: split(network.n_fft / 2 + 1, network.bands, settings.data.sample_rate),
        width: network.hidden_dim,
        layers: network.layers,
        heads: network.heads,
    }
}

/// A loss of a batch that is a number.
fn finite(batch: &SegmentBatch, judged: &MaskLoss) -> Result<MicroLoss, TaskError> {
    let broken = batch.indices.iter().zip(&judged.by_segment).filter(|(_, loss)| !loss.is_finite());
    let broken: Vec<u64> = broken.map(|(index, _)| *index).collect();
    if broken.is_empty() {
        return Ok(judged.loss);
    }
    let message = format!(
        "step {}: the loss of segments {broken:?} is not finite; lower the learning rate",
        batch.step
    );
    Err(TaskError::new(Fault::Numeric, message))
}

impl<B: Tape<Base = B>> Objective<B> for SeparationObjective {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        let batch: &SegmentBatch = batch.content();
        if batch.indices.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let scene = self.scene(batch);
        let inputs = scene.inputs();
        clock.lap(SPECTRA);
        let run = self.separator.run(trainables, self.retention, self.size(batch));
        let (masks, kept) = run.forward(inputs, &mut |stage| clock.lap(stage));
        let judged = scene.judge(&masks, self.settings.loss);
        drop(masks);
        let loss = finite(batch, &judged)?;
        clock.lap(LOSS);

        clock.enter(Pass::Backward);
        let slope = |band| scene.slope(&judged, band);
        run.backward(kept, slope, grads, &mut |stage| clock.lap(stage));
        Ok(loss)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        let batch: &SegmentBatch = batch.content();
        if batch.indices.is_empty() {
            return Ok(MicroLoss::default());
        }
        let scene = self.scene(batch);
        let masks = self.masks(trainables, &scene, self.size(batch));
        finite(batch, &scene.judge(&masks, self.settings.loss))
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn parts(&self) -> Vec<String> {
        let stems = &self.settings.data.stems;
        [SDR, CSDR]
            .iter()
            .flat_map(|measure| stems.iter().map(move |stem| format!("{measure}/{stem}")))
            .collect()
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let batch: &SegmentBatch = batch.content();
        let (scene, stems) = (self.scene(batch), self.shape().stems);
        let masks = self.masks(trainables, &scene, self.size(batch));
        let loss = finite(batch, &scene.judge(&masks, self.settings.loss))?;
        let estimates = scene.estimates(&masks);
        let mut parts = vec![PartSum::default(); 2 * stems];
        let wanted = batch.stems(self.stft.samples());
        let signals = estimates.chunks_exact(CHANNELS).zip(wanted.chunks_exact(CHANNELS));
        for (place, (estimate, wanted)) in signals.enumerate() {
            let estimate: Vec<&[f32]> = estimate.iter().map(Vec::as_slice).collect();
            let second = self.settings.data.sample_rate as usize;
            let ratios = [sdr(&estimate, wanted), chunked_sdr(&estimate, wanted, second)];
            for (measure, ratio) in ratios.into_iter().enumerate() {
                let part = &mut parts[measure * stems + place % stems];
                (part.count, part.sum) = (part.count + 1.0, part.sum + ratio);
            }
        }
        let over = |parts: &[PartSum]| parts.iter().map(|part| part.sum).sum();
        let sums = vec![loss.loss_sum * stems as f64, over(&parts[..stems]), over(&parts[stems..])];
        Ok(Evaluation { count: loss.valid * stems as f64, sums, parts })
    }

    /// Spectra of the first channel: the mixture, then each stem as it was recorded and as it was separated.
    fn examples(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Vec<Example>, TaskError> {
        let batch: &SegmentBatch = batch.content();
        let (scene, length) = (self.scene(batch), self.stft.samples());
        let estimates = scene.estimates(&self.masks(trainables, &scene, self.size(batch)));
        let stems = &self.settings.data.stems;
        let (mixtures, recorded) = (batch.mixtures(length), batch.stems(length));
        let example = |(row, &sample): (usize, &u64)| {
            let mixture = self.spectrum("mixture".to_owned(), mixtures[row * CHANNELS]);
            let pairs = stems.iter().enumerate().flat_map(|(stem, name)| {
                let signal = (row * stems.len() + stem) * CHANNELS;
                [
                    self.spectrum(format!("{name}, recorded"), recorded[signal]),
                    self.spectrum(format!("{name}, separated"), &estimates[signal]),
                ]
            });
            let pictures = [mixture].into_iter().chain(pairs).flatten().collect();
            Example { sample, title: format!("segment {sample}"), pictures, ..Example::default() }
        };
        Ok(batch.indices.iter().enumerate().map(example).collect())
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let part = |name: &str| {
            let prefix = format!("{SEPARATOR}.{name}.");
            let params: Vec<_> =
                layout.params().iter().filter(|param| param.name.starts_with(&prefix)).collect();
            Module::of_params(format!("{SEPARATOR}.{name}"), true, &params)
        };
        ["split", "blocks", "masks"].map(part).into()
    }

    fn base(&self) -> &str {
        ""
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        Ok(layout.initial_values(self.seed))
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let write = |artifact: Artifact, content: &dyn Fn(&Path) -> io::Result<()>| {
            let path = dir.join(artifact.path);
            replace(&path, content)
                .map_err(|error| TaskError::io(format!("write {}: {error}", path.display())))
        };
        write(WEIGHTS, &|path| write_tensors(path, layout, values, |_| true))?;
        let text = format!("{:#}\n", described(&self.settings, self.shape()));
        write(CONFIG, &|path| std::fs::write(path, &text))?;
        Ok(vec![WEIGHTS, CONFIG])
    }
}

/// Everything that a reader of the weights has to know.
fn described(settings: &SeparationSettings, shape: &SeparatorShape) -> Value {
    let network = &settings.network;
    let edges: Vec<usize> = std::iter::once(0).chain(shape.bands.iter().map(|band| band.end)).collect();
    json!({
        "stems": settings.data.stems,
        "sample_rate": settings.data.sample_rate,
        "channels": CHANNELS,
        "n_fft": network.n_fft,
        "hop": network.hop,
        "band_edges": edges,
        "hidden_dim": shape.width,
        "layers": shape.layers,
        "heads": shape.heads,
    })
}
