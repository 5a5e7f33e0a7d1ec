//! One pass of a policy from file to file, to hold beside LeRobot's.

use std::{ops::Range, path::Path, sync::Arc};

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{
    Shelf,
    joint::JointOutline,
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

use super::{
    batch::{Draws, PolicyObservation, Training},
    config::SmolVlaConfig,
    images::{Planes, letterbox, patches},
    inputs::SmolVlaPrompts,
    names::RULES,
    network::{PolicyFiles, SmolVla},
    tuning::{TuningSettings, tuned},
};
use crate::{
    directory::MeanStd,
    export::PROCESSORS,
    pass_files::{PassInputs, PassResults},
};

/// LeRobot's steps that normalise, in the processor before and behind the policy.
const NORMALIZERS: [&str; 2] = ["normalizer_processor", "unnormalizer_processor"];
/// What LeRobot adds to deviations.
const EPS: f32 = 1e-8;

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

/// Samples from the noise; with recorded actions also the loss at the given times.
pub fn run<B: Tape<Base = B>>(
    job: PassJob<'_>,
    models: Shelf<B>,
    device: &B::Device,
) -> Result<(), ModelError> {
    let PassJob { files, inputs, out, gradients } = job;
    pool::join();
    let inputs = &PassInputs::read(inputs)?;
    let mut layout = TrainableLayout::default();
    let dir = &files.directory.dir;
    let config = SmolVlaConfig::of(files.directory)?;
    let outline = models.joint.of(files.backbone)?.outline(files.backbone, config.within())?;
    let tuned = tuned(dir, &config, &outline, TuningSettings::default())?;
    let policy = SmolVla::load(files, &tuned, models, &mut layout, device)?;
    let initial =
        tuned.initial_values::<B>(0, &layout, CheckpointDir { path: dir, rules: RULES }, files.dtype)?;
    let trainables = Trainables::new(layout, initial, device);
    let pass = Pass { files, policy: &policy, trainables: &trainables, inputs, outline, device };
    let batch = pass.batch()?;
    let mut results = PassResults::default();
    pass.sample(&batch, &mut results)?;
    if inputs.has("action") || inputs.has("time") {
        pass.loss(&batch, gradients, &mut results)?;
    } else if gradients {
        return Err(inputs.wrong("action", "missing; gradients are those of its loss".into()));
    }
    results.write(out)
}

struct Pass<'p, B: Tape<Base = B>> {
    files: PolicyFiles<'p>,
    policy: &'p SmolVla<B>,
    trainables: &'p Trainables<B>,
    inputs: &'p PassInputs,
    outline: JointOutline,
    device: &'p B::Device,
}

/// Images, prompts and states as the policy sees them.
struct ModelInputs {
    ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    pixels: Vec<Arc<Vec<f32>>>,
    image: u32,
    state: Vec<f32>,
}

impl ModelInputs {
    fn observed(&self) -> PolicyObservation<'_> {
        let rows = Rows::Padded(&self.valid);
        let prompts = Prompts { input_ids: &self.ids, rows, images: &[], pixel_values: &self.pixels };
        PolicyObservation { prompts, image: self.image, state: &self.state, features: None }
    }
}

impl<B: Tape<Base = B>> Pass<'_, B> {
    fn batch(&self) -> Result<ModelInputs, ModelError> {
        let Self { inputs, outline, policy, .. } = self;
        let config = &policy.config;
        let form = PromptForm { template: "{task}", images: 0, max_text_tokens: None };
        let prompts = SmolVlaPrompts::open(self.files.backbone, outline, config.most_tokens, &form)?;
        let cameras: Vec<_> = config.cameras.iter().filter(|camera| inputs.has(camera)).collect();
        if cameras.is_empty() {
            let names = config.cameras.join(", ");
            return Err(inputs.wrong("observation.images", format!("none of the policy's: {names}")));
        }
        let side = (outline.image_side / outline.patches.patch) as u32;
        let shape: ImageShape = [1, side, side];
        let (mut rows, mut pixels) = (Vec::new(), Vec::new());
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
                let square = letterbox(picture, outline.image_side);
                pixels.push(Arc::new(patches(&square, outline.image_side, outline.patches.patch)));
                shown.push(shape);
            }
            rows.push(prompts.encode(task, &shown).map_err(|problem| inputs.wrong("tasks", problem))?);
        }
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let valid = rows.iter().map(|row| 0..row.len() as u32).collect();
        let ids = rows.into_iter().flat_map(|mut row| {
            row.resize(longest, prompts.pad());
            row
        });
        let state = inputs.rows_of("observation.state", &[config.state])?;
        let state = self.normalized("observation.state", state, [config.state, config.padded[0]])?;
        Ok(ModelInputs { ids: ids.collect(), valid, pixels, image: outline.image_token, state })
    }

    /// Mean and deviation of a feature; none where the directory keeps none, and values go as they are.
    fn statistics(&self, side: usize, feature: &str, width: usize) -> Result<Option<MeanStd>, ModelError> {
        let directory = self.files.directory;
        let found = directory.statistics(PROCESSORS[side], NORMALIZERS[side])?.remove(feature);
        match found.as_ref().filter(|of| of.mean.len() != width) {
            None => Ok(found),
            Some(of) => Err(ModelError::Config {
                path: directory.dir.join(PROCESSORS[side]),
                field: feature.into(),
                problem: format!("statistics of {} values; config.json says {width}", of.mean.len()),
            }),
        }
    }

    /// Normalised, and padded from one width to another.
    fn normalized(
        &self,
        feature: &str,
        values: &[f32],
        [width, padded]: [usize; 2],
    ) -> Result<Vec<f32>, ModelError> {
        let of = self.statistics(0, feature, width)?;
        let mut out = vec![0.0; values.len() / width * padded];
        for (to, row) in out.chunks_mut(padded).zip(values.chunks(width)) {
            for (at, value) in row.iter().enumerate() {
                let one = of.as_ref().map(|of| (value - of.mean[at]) / (of.std[at] + EPS));
                to[at] = one.unwrap_or(*value);
            }
        }
        Ok(out)
    }

    fn sample(&self, seen: &ModelInputs, results: &mut PassResults) -> Result<(), ModelError> {
        let Self { inputs, policy, trainables, .. } = self;
        let config = &policy.config;
        let (rows, width, steps) = (inputs.rows(), config.padded[1], config.steps);
        let mut x = inputs.rows_of("noise", &[config.chunk, width])?.to_vec();
        let velocity = policy.velocity(trainables, seen.observed()).map_err(|error| self.unrun(error))?;
        for step in 0..steps {
            let times = vec![1.0 - step as f32 / steps as f32; rows];
            let v = values(velocity(Draws { times: &times, noisy: &x }));
            x.iter_mut().zip(v).for_each(|(x, v)| *x -= v / steps as f32);
        }
        let mut actions: Vec<f32> = x.chunks(width).flat_map(|step| step[..config.action].to_vec()).collect();
        let shape = [rows, config.chunk, config.action];
        results.add("actions.normalized", &shape, actions.clone());
        if let Some(of) = self.statistics(1, "action", config.action)? {
            let places = actions.iter_mut().enumerate();
            places.for_each(|(at, value)| {
                *value = *value * of.std[at % config.action] + of.mean[at % config.action];
            });
        }
        results.add("actions", &shape, actions);
        Ok(())
    }

    fn loss(&self, seen: &ModelInputs, gradients: bool, results: &mut PassResults) -> Result<(), ModelError> {
        let Self { inputs, policy, trainables, device, .. } = self;
        let config = &policy.config;
        let (rows, chunk, width) = (inputs.rows(), config.chunk, config.padded[1]);
        let noise = inputs.rows_of("noise", &[chunk, width])?;
        let times = inputs.rows_of("time", &[])?;
        let recorded = inputs.rows_of("action", &[chunk, config.action])?;
        let actions = self.normalized("action", recorded, [config.action, width])?;
        let padding = match inputs.has("action_is_pad") {
            true => inputs.rows_of("action_is_pad", &[chunk])?.to_vec(),
            false => vec![0.0; rows * chunk],
        };
        let mix = |(at, (noise, action)): (usize, (&f32, &f32))| {
            let time = times[at / (chunk * width)];
            time * noise + (1.0 - time) * action
        };
        let noisy: Vec<f32> = noise.iter().zip(&actions).enumerate().map(mix).collect();
        let draws = Draws { times, noisy: &noisy };
        let training = Training { recompute: Recompute::None, dropout: None };
        let forward = policy.forward(trainables, training, seen.observed(), draws);
        let (velocity, trace) = forward.map_err(|error| self.unrun(error))?;
        let velocity = values(velocity);
        let off: Vec<f32> = velocity
            .iter()
            .zip(noise.iter().zip(&actions))
            .map(|(v, (noise, action))| v - (noise - action))
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
            policy.backward(trainables, trace, dv_nc, &mut grads);
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
