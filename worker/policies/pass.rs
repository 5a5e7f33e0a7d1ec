//! One pass of a policy from file to file, to hold beside LeRobot's.

use std::{ops::Range, path::Path, sync::Arc};

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{
    Shelf,
    pretrained::{
        checkpoint::CheckpointDir,
        error::ModelError,
        pictures::ImageShape,
        prompts::{Prompts, Rows},
    },
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::{
    kernels::{
        Tape,
        flat::{Flat, FlatOn},
        pool,
    },
    params::{FlatGrads, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;

use crate::{
    batch::{Draws, PolicyObservation, Training},
    images::{Planes, PolicyImages},
    kind::PolicyKind,
    normalizer::{NormalizedFeature, Normalizer, Side},
    pass_files::{PassInputs, PassResults},
    policy::{NoiseEnd, Policy, PolicyFiles, PolicySizes},
    tuning::TuningSettings,
};

/// Features, by name and type.
const STATE: [&str; 2] = ["observation.state", "STATE"];
const ACTION: [&str; 2] = ["action", "ACTION"];

/// From which file to which, and whether with gradients.
#[derive(Clone, Copy, Debug)]
pub struct PassJob<'j> {
    /// The policy's files.
    pub files: PolicyFiles<'j>,
    /// What is read.
    pub inputs: &'j Path,
    /// What is written.
    pub out: &'j Path,
    /// Whether gradients of what trains are wanted.
    pub gradients: bool,
}

/// A policy that a pass goes through.
pub(crate) struct PassPolicy<'p, B: Tape<Base = B>> {
    /// The policy.
    pub policy: &'p dyn Policy<B>,
    /// What of it trains.
    pub trainables: &'p Trainables<B>,
    /// The id that stands for a token of an image.
    pub image: u32,
    /// Pictures to its input.
    pub images: &'p dyn PolicyImages,
    /// Tasks and states to ids.
    pub prompts: &'p dyn PromptEncoder,
    /// What the pass keeps for its gradients.
    pub recompute: Recompute,
    /// Where it is.
    pub device: &'p B::Device,
}

/// Samples from the noise; with recorded actions also the loss at the given times.
pub fn run<B: Tape<Base = B>>(
    job: PassJob<'_>,
    models: Shelf<B>,
    device: &B::Device,
) -> Result<(), ModelError> {
    pool::join();
    let inputs = &PassInputs::from_file(job.inputs)?;
    let PolicyFiles { directory, backbone, dtype } = job.files;
    let kind = PolicyKind::from_directory(directory)?;
    let outline = kind.outline(directory, backbone, models)?;
    let tuned = kind.tuned(directory, &outline, TuningSettings::default())?;
    let mut layout = TrainableLayout::default();
    let policy = &*kind.load(job.files, &tuned, models, &mut layout, device)?;
    let checkpoint = CheckpointDir { path: &directory.dir, rules: kind.rules() };
    let initial = tuned.initial_values::<B>(0, &layout, checkpoint, dtype)?;
    let form = PromptForm { template: "{task}", images: 0, max_text_tokens: None };
    let of = PassPolicy {
        policy,
        trainables: &Trainables::new(layout, initial, device),
        image: outline.image_token,
        images: &*kind.images(backbone, &outline)?,
        prompts: &*kind.prompts(backbone, &outline, &form)?,
        recompute: Recompute::None,
        device,
    };
    run_through(job, inputs, of)
}

/// Samples as [`run`] does, through a policy that is loaded.
pub(crate) fn run_through<B: Tape<Base = B>>(
    job: PassJob<'_>,
    inputs: &PassInputs,
    of: PassPolicy<'_, B>,
) -> Result<(), ModelError> {
    let PassJob { files, out, gradients, .. } = job;
    let sizes = of.policy.sizes();
    let pass = Pass { files, sizes, of, inputs };
    let batch = pass.batch()?;
    let mut results = PassResults::default();
    pass.sample(&batch, &mut results)?;
    if inputs.has("action") || inputs.has("time") {
        pass.loss(&batch, gradients, &mut results)?;
    } else if gradients {
        return Err(inputs.wrong("action", "missing; --gradients needs it to compute the loss".into()));
    }
    results.write(out)
}

struct Pass<'p, B: Tape<Base = B>> {
    files: PolicyFiles<'p>,
    sizes: PolicySizes<'p>,
    of: PassPolicy<'p, B>,
    inputs: &'p PassInputs,
}

/// Images, prompts and states as the policy sees them.
struct ModelInputs {
    ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    pixels: Vec<Arc<Vec<f32>>>,
    shapes: Vec<ImageShape>,
    image: u32,
    state: Vec<f32>,
}

impl ModelInputs {
    fn observed(&self) -> PolicyObservation<'_> {
        let rows = Rows::Padded(&self.valid);
        let prompts =
            Prompts { input_ids: &self.ids, rows, images: &self.shapes, pixel_values: &self.pixels };
        PolicyObservation { prompts, image: self.image, state: &self.state, features: None }
    }
}

impl<B: Tape<Base = B>> Pass<'_, B> {
    fn batch(&self) -> Result<ModelInputs, ModelError> {
        let Self { inputs, sizes: config, of: PassPolicy { image, images, prompts, .. }, .. } = self;
        let of_states = inputs.rows_of("observation.state", &[config.state])?;
        let states = self.normalized(STATE, of_states)?;
        let cameras: Vec<_> = config.cameras.iter().filter(|camera| inputs.has(camera)).collect();
        if cameras.is_empty() {
            let names = config.cameras.join(", ");
            return Err(inputs.wrong("observation.images", format!("missing; expected any of {names}")));
        }
        let (mut rows, mut pixels, mut shapes) = (Vec::new(), Vec::new(), Vec::new());
        for (row, task) in inputs.tasks.iter().enumerate() {
            let mut shown = Vec::new();
            for camera in &cameras {
                let mask = format!("{camera}_padding_mask");
                if inputs.has(&mask) && inputs.rows_of(&mask, &[])?[row] == 0.0 {
                    continue;
                }
                let (size, values) = inputs.images(camera)?;
                let each = 3 * size[0] * size[1];
                let picture = Planes { values: &values[row * each..][..each], size };
                let seen = images.seen(picture).map_err(|problem| inputs.wrong(camera, problem))?;
                pixels.push(Arc::new(seen.pixel_values));
                shown.push(seen.shape);
            }
            let state = &states[row * config.state..][..config.state];
            let ids = prompts.encode_observed(task, state, &shown);
            rows.push(ids.map_err(|problem| inputs.wrong("tasks", problem))?);
            shapes.extend(shown);
        }
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let valid = rows.iter().map(|row| 0..row.len() as u32).collect();
        let ids = rows.into_iter().flat_map(|mut row| {
            row.resize(longest, prompts.pad());
            row
        });
        let state = widened(&states, config.state, config.padded[0]);
        Ok(ModelInputs { ids: ids.collect(), valid, pixels, shapes, image: *image, state })
    }

    fn normalizer(&self, side: Side, [name, kind]: [&str; 2]) -> Result<Option<Normalizer>, ModelError> {
        let width = if kind == STATE[1] { self.sizes.state } else { self.sizes.action };
        Normalizer::for_feature(self.files.directory, side, NormalizedFeature { name, kind, width })
    }

    fn normalized(&self, feature: [&str; 2], values: &[f32]) -> Result<Vec<f32>, ModelError> {
        let Some(of) = self.normalizer(Side::Before, feature)? else { return Ok(values.to_vec()) };
        let width = if feature == STATE { self.sizes.state } else { self.sizes.action };
        let each = values.iter().enumerate();
        Ok(each.map(|(at, value)| of.normalized(at % width, *value)).collect())
    }

    fn sample(&self, seen: &ModelInputs, results: &mut PassResults) -> Result<(), ModelError> {
        let Self { inputs, sizes: config, of: PassPolicy { policy, trainables, .. }, .. } = self;
        let (rows, width, steps) = (inputs.rows(), config.padded[1], config.steps);
        let mut x = inputs.rows_of("noise", &[config.chunk, width])?.to_vec();
        let velocity = policy.sampler(trainables, seen.observed()).map_err(|error| self.unrun(error))?;
        for step in 0..steps {
            let progress = step as f32 / steps as f32;
            let (time, towards) = match config.noise {
                NoiseEnd::Zero => (progress, 1.0),
                NoiseEnd::One => (1.0 - progress, -1.0),
            };
            let v = values(velocity(Draws { times: &vec![time; rows], noisy: &x }));
            x.iter_mut().zip(v).for_each(|(x, v)| *x += towards * v / steps as f32);
        }
        let mut actions: Vec<f32> = x.chunks(width).flat_map(|step| step[..config.action].to_vec()).collect();
        let shape = [rows, config.chunk, config.action];
        results.add("actions.normalized", &shape, actions.clone());
        if let Some(of) = self.normalizer(Side::Behind, ACTION)? {
            let places = actions.iter_mut().enumerate();
            places.for_each(|(at, value)| *value = of.raw(at % config.action, *value));
        }
        results.add("actions", &shape, actions);
        Ok(())
    }

    fn loss(&self, seen: &ModelInputs, gradients: bool, results: &mut PassResults) -> Result<(), ModelError> {
        let Self {
            inputs, sizes: config, of: PassPolicy { policy, trainables, recompute, device, .. }, ..
        } = self;
        let (rows, chunk, width) = (inputs.rows(), config.chunk, config.padded[1]);
        let noise = inputs.rows_of("noise", &[chunk, width])?;
        let times = inputs.rows_of("time", &[])?;
        let recorded = inputs.rows_of("action", &[chunk, config.action])?;
        let mut actions = widened(&self.normalized(ACTION, recorded)?, config.action, width);
        let padding = match inputs.has("action_is_pad") && !config.counts_padding {
            true => inputs.rows_of("action_is_pad", &[chunk])?.to_vec(),
            false => vec![0.0; rows * chunk],
        };
        if config.blanks_padding {
            let padded = actions.chunks_mut(width).zip(&padding).filter(|(_, pad)| **pad != 0.0);
            padded.for_each(|(step, _)| step.fill(0.0));
        }
        let mix = |(at, (noise, action)): (usize, (&f32, &f32))| {
            let time = times[at / (chunk * width)];
            match config.noise {
                NoiseEnd::Zero => (1.0 - time) * noise + time * action,
                NoiseEnd::One => time * noise + (1.0 - time) * action,
            }
        };
        let target = |noise: &f32, action: &f32| match config.noise {
            NoiseEnd::Zero => action - noise,
            NoiseEnd::One => noise - action,
        };
        let noisy: Vec<f32> = noise.iter().zip(&actions).enumerate().map(mix).collect();
        let draws = Draws { times, noisy: &noisy };
        let training = Training { recompute: *recompute, dropout: None };
        let forward = policy.forward_kept(trainables, training, seen.observed(), draws);
        let (velocity, backward) = forward.map_err(|error| self.unrun(error))?;
        let velocity = values(velocity);
        let off: Vec<f32> = velocity
            .iter()
            .zip(noise.iter().zip(&actions))
            .map(|(v, (noise, action))| v - target(noise, action))
            .collect();
        let losses: Vec<f32> = off.iter().map(|off| off * off).collect();
        let counts = |at: usize| at % width < config.action && padding[at / width] == 0.0;
        let count = (0..losses.len()).filter(|at| counts(*at)).count().max(1) as f32;
        let sum: f32 = losses.iter().enumerate().filter(|(at, _)| counts(*at)).map(|(_, loss)| loss).sum();
        let shape = [rows, chunk, width];
        results.add("loss", &[], vec![sum / count]);
        results.add("losses", &shape, losses);
        results.add("velocity", &shape, velocity);
        if gradients {
            let slope = |(at, off): (usize, &f32)| if counts(at) { 2.0 * off / count } else { 0.0 };
            let slopes = off.iter().enumerate().map(slope).collect::<Vec<_>>();
            let dv_nc = Tensor::from_data(TensorData::new(slopes, [rows * chunk, width]), *device);
            let layout = trainables.layout();
            let mut grads = FlatGrads::<B::Flat>::at(&B::Flat::place(device), layout.len());
            backward(dv_nc, &mut grads);
            for param in layout.params() {
                let values = grads.values().read(param.range()).into_owned();
                results.add(format!("grad.{}", param.name), &param.shape, values);
            }
        }
        Ok(())
    }

    fn unrun(&self, error: impl ToString) -> ModelError {
        self.inputs.wrong("tasks", error.to_string())
    }
}

fn values<B: Tape<Base = B>>(x: Tensor<B, 2>) -> Vec<f32> {
    x.into_data().convert::<f32>().into_vec().expect("converted to f32")
}

/// Rows of values, each followed by zeros.
fn widened(values: &[f32], width: usize, to: usize) -> Vec<f32> {
    let row =
        |row: &[f32]| row.iter().copied().chain(std::iter::repeat_n(0.0, to - width)).collect::<Vec<_>>();
    values.chunks(width).flat_map(row).collect()
}
