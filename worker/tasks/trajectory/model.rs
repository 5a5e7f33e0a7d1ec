//! Extractor and network of a run: forward, backward, losses.
//!
//! ```text
//! pixels ─ extractor ─▶ trajectories [n, l * d] ─ encoder, decoder ─▶ reconstructions
//! loss of a trajectory = mean over its values of (reconstruction - value)^2 + beta * kl
//! ```
//!
//! Trajectories, `n` of them in a micro-batch, are what losses are sums over and are divided by. Where they
//! are kept the extractor does not run. Nothing of a batch outlives its pass.

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{Shelf, vision_language::PassError};
use coxswain_nn::{
    kernels::Tape,
    lora::LoraPlan,
    memory,
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
    rng::{Key, Purpose},
};
use coxswain_proto::{
    ids::Step,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{CachedFeatures, MicroLoss, Pass, StageClock, TaskError};

use super::{
    config::TrajectorySettings,
    data::ImageBatch,
    extractor::{EXTRACTOR, TrajectoryExtractor},
    network::{Draw, HalfRun, Network},
};

// Stages, as their times are shown.
const ENCODER: &str = "encoder";
const DECODER: &str = "decoder";

/// A micro-batch that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum TrajectoryError {
    /// Images do not fit the tower, or the tower's weights cannot be read any more.
    #[error("step {step}, images {images:?}: {source}")]
    Extractor {
        /// Optimizer step.
        step: Step,
        /// Images of the micro-batch.
        images: Vec<u64>,
        /// What does not fit.
        source: PassError,
    },
    /// Kept trajectories of another size.
    #[error("step {step}: {found} cached values, expected {expected}; clear the store in `cache.dir`")]
    Features {
        /// Optimizer step.
        step: Step,
        /// Values found.
        found: usize,
        /// Values that the batch calls for.
        expected: usize,
    },
    /// The loss is infinite or not a number.
    #[error("step {step}: the loss of images {images:?} is not finite; lower the learning rate")]
    NonFiniteLoss {
        /// Optimizer step.
        step: Step,
        /// The images concerned.
        images: Vec<u64>,
    },
}

/// What the trajectories of a batch have come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// Trajectories.
    pub count: f64,
    /// Sum of their mean squared errors.
    pub squared: f64,
    /// Sum of their divergences; 0 unless the latent is drawn.
    pub divergence: f64,
    /// Sum of the mean squared errors of each layer.
    pub by_layer: Vec<f64>,
}

/// Extractor and network.
pub struct TrajectoryModel<B: Tape<Base = B>> {
    /// The frozen part.
    pub extractor: TrajectoryExtractor<B>,
    /// The adapters of a network that does not train itself.
    pub plan: Option<LoraPlan>,
    /// The run's settings.
    pub settings: TrajectorySettings,
    network: Network,
    recompute: Recompute,
    seed: u64,
    device: B::Device,
}

impl<B: Tape<Base = B>> TrajectoryModel<B> {
    /// Reads the extractor and registers the network.
    pub fn load(
        spec: &RunSpec,
        models: Shelf<B>,
        device: &B::Device,
    ) -> Result<(Self, TrainableLayout), TaskError> {
        let settings = TrajectorySettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let extractor = TrajectoryExtractor::load(spec, models, &settings, device)?;
        let plan = Network::plan(settings.lora.as_ref(), &settings.network, &extractor.shape)
            .map_err(TaskError::bad_input)?;
        let mut layout = TrainableLayout::default();
        let network = Network::register(&mut layout, &settings.network, &extractor.shape, plan.as_ref());
        let (recompute, seed, device) = (spec.train.recompute, spec.run.seed, device.clone());
        Ok((Self { extractor, plan, settings, network, recompute, seed, device }, layout))
    }

    /// Runs one micro-batch and adds the gradient of its loss *sum* to `grads`.
    pub fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &ImageBatch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<(MicroLoss, Losses), TrajectoryError> {
        if batch.indices.is_empty() {
            return Ok(Default::default());
        }
        clock.enter(Pass::Forward);
        let run = HalfRun { trainables, recompute: self.recompute };
        let Network { encoder, decoder, .. } = &self.network;
        let x_ni = self.trajectories(batch)?;
        clock.lap(EXTRACTOR);
        memory::check();
        let tracked = encoder.trains();
        let (code, below) = encoder.forward(&run, Input::constant(x_ni.clone()));
        let (z_nz, drawn, divergence_n) = self.latent(&run, batch, Input { value: code, tracked });
        clock.lap(ENCODER);
        let (y_ni, above) = decoder.forward(&run, Input { value: z_nz, tracked });
        let error_ni = y_ni - x_ni;
        let losses = self.losses(batch, error_ni.clone(), divergence_n)?;
        clock.lap(DECODER);

        clock.enter(Pass::Backward);
        let dy_ni = error_ni * (2.0 / self.extractor.shape.width() as f64);
        let dz_nz = decoder.backward(&run, above, dy_ni, grads);
        clock.lap(DECODER);
        if let Some(dz_nz) = dz_nz {
            let dcode = match drawn {
                Some(drawn) => self.back_to_code(drawn, dz_nz, grads),
                None => Some(dz_nz),
            };
            dcode.and_then(|dcode| encoder.backward(&run, below, dcode, grads));
        }
        clock.lap(ENCODER);
        Ok((self.total(&losses), losses))
    }

    /// Losses of a batch without a trace. The latent is drawn as in training, or is its mean.
    pub fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &ImageBatch,
        drawn: bool,
    ) -> Result<Losses, TrajectoryError> {
        if batch.indices.is_empty() {
            return Ok(Losses::default());
        }
        let x_ni = self.trajectories(batch)?;
        let code = self.network.encoder.plain(trainables, x_ni.clone());
        let (z_nz, divergence_n) = match self.network.drawn {
            None => (code, Vec::new()),
            Some(latent) => {
                let noise_nz = self.noise(batch, latent, drawn);
                let params = ParamScope::<B>::frozen(trainables);
                apart(Draw { latent }.run(&params, &[code, noise_nz]), latent)
            }
        };
        let y_ni = self.network.decoder.plain(trainables, z_nz);
        self.losses(batch, y_ni - x_ni, divergence_n)
    }

    /// Whether its latents are drawn.
    pub fn draws(&self) -> bool {
        self.network.drawn.is_some()
    }

    /// The loss that training minimises, of what was found.
    pub fn total(&self, losses: &Losses) -> MicroLoss {
        let Losses { count, squared, divergence, .. } = losses;
        let beta = if self.draws() { self.settings.network.beta } else { 0.0 };
        MicroLoss { loss_sum: squared + beta * divergence, valid: *count }
    }

    /// Trajectories of a batch in host memory, to be kept.
    pub fn features(&self, batch: &ImageBatch) -> Result<CachedFeatures, TrajectoryError> {
        Ok(CachedFeatures { width: self.extractor.shape.dim, values: download(self.extracted(batch)?) })
    }

    /// Kept, or computed: `[n, l * d]`.
    fn trajectories(&self, batch: &ImageBatch) -> Result<Tensor<B, 2>, TrajectoryError> {
        let Some(features) = &batch.features else { return self.extracted(batch) };
        let shape = [batch.indices.len() * batch.positions, self.extractor.shape.width()];
        let (found, expected) = (features.values.len(), shape[0] * shape[1]);
        if found != expected {
            return Err(TrajectoryError::Features { step: batch.step, found, expected });
        }
        Ok(Tensor::from_data(TensorData::new(features.values.clone(), shape), &self.device))
    }

    fn extracted(&self, batch: &ImageBatch) -> Result<Tensor<B, 2>, TrajectoryError> {
        let images: Vec<&[f32]> = batch.pixel_values.iter().map(|image| &***image).collect();
        let found = self.extractor.trajectories(&images);
        found.map_err(|source| {
            let images = batch.indices.clone();
            TrajectoryError::Extractor { step: batch.step, images, source }
        })
    }

    /// The latent, with its graph and divergences where it is drawn.
    fn latent<'a>(
        &self,
        run: &HalfRun<'a, B>,
        batch: &ImageBatch,
        code: Input<B>,
    ) -> (Tensor<B, 2>, Option<RecordedSegment<'a, B>>, Vec<f32>) {
        let Some(latent) = self.network.drawn else { return (code.value, None, Vec::new()) };
        let noise_nz = Input::constant(self.noise(batch, latent, true));
        let graph = RecordedSegment::run(&Draw { latent }, run.trainables, vec![code, noise_nz]);
        let (z_nz, divergence_n) = apart(graph.output(), latent);
        (z_nz, Some(graph), divergence_n)
    }

    /// The gradient of codes, of that of drawn latents and of the divergence's weight.
    fn back_to_code(
        &self,
        drawn: RecordedSegment<'_, B>,
        dz_nz: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        let rows = dz_nz.dims()[0];
        let beta_n1 = Tensor::full([rows, 1], self.settings.network.beta, &self.device);
        let gradients = drawn.backward(Tensor::cat(vec![dz_nz, beta_n1], 1), grads);
        gradients.into_iter().next().flatten()
    }

    /// Standard normal, `[n, latent]`, a function of seed, step and image; zero if none is to be drawn.
    fn noise(&self, batch: &ImageBatch, latent: usize, drawn: bool) -> Tensor<B, 2> {
        let rows = batch.indices.len() * batch.positions;
        let mut noise = vec![0.0; rows * latent];
        if drawn {
            for (&sample, noise) in batch.indices.iter().zip(noise.chunks_mut(batch.positions * latent)) {
                let key =
                    Key { seed: self.seed, purpose: Purpose::Task, step: batch.step.0, sample, repeat: 0 };
                key.draws().normal(noise);
            }
        }
        Tensor::from_data(TensorData::new(noise, [rows, latent]), &self.device)
    }

    /// Sums of the squares of errors, `[n, l * d]`, by row and layer on the device, the rest on the host.
    fn losses(
        &self,
        batch: &ImageBatch,
        error_ni: Tensor<B, 2>,
        divergence_n: Vec<f32>,
    ) -> Result<Losses, TrajectoryError> {
        let (shape, [rows, width]) = (&self.extractor.shape, error_ni.dims());
        let layers = shape.layers.len();
        let error_md = error_ni.reshape([rows * layers, shape.dim]);
        let squares = download((error_md.clone() * error_md).sum_dim(1));
        let mut losses = Losses { count: rows as f64, by_layer: vec![0.0; layers], ..Losses::default() };
        let mut broken = Vec::new();
        for (row, squares) in squares.chunks(layers).enumerate() {
            let squared = squares.iter().map(|&sum| f64::from(sum)).sum::<f64>() / width as f64;
            let divergence = divergence_n.get(row).map_or(0.0, |&divergence| f64::from(divergence));
            if !(squared + divergence).is_finite() {
                broken.push(batch.indices[row / batch.positions]);
            }
            losses.squared += squared;
            losses.divergence += divergence;
            let of_layers = losses.by_layer.iter_mut().zip(squares);
            of_layers.for_each(|(sum, &square)| *sum += f64::from(square) / shape.dim as f64);
        }
        broken.dedup();
        match broken.is_empty() {
            true => Ok(losses),
            false => Err(TrajectoryError::NonFiniteLoss { step: batch.step, images: broken }),
        }
    }
}

/// Latents, and divergences in host memory.
fn apart<B: Tape<Base = B>>(drawn: Tensor<B, 2>, latent: usize) -> (Tensor<B, 2>, Vec<f32>) {
    (drawn.clone().narrow(1, 0, latent), download(drawn.narrow(1, latent, 1)))
}

fn download<B: Tape<Base = B>>(x: Tensor<B, 2>) -> Vec<f32> {
    x.into_data().convert::<f32>().into_vec().expect("converted to f32")
}
