//! A tiny policy against LeRobot: one training step of it, and a sampled chunk
//! (`integration-tests/fixtures/make_smolvla.py`).

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{
        adapters::TunedModules,
        checkpoint::CheckpointDir,
        pictures::Rgb,
        prompts::{Prompts, Rows},
    },
    vision_language::PromptForm,
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::sizes::Sizes,
    params::{FlatGrads, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::{
    Draws, KeptFeatures, KeptTokens, Policy, PolicyFiles, PolicyKind, PolicyObservation, Training,
    TuningSettings,
    directory::{MeanStd, PolicyDirectory},
    export::{Export, PROCESSORS, Statistics, write},
    golden::{GoldenPolicy, VALUES, close},
    images::{Alignment, Planes, letterbox, patches},
};

const AT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/smolvla");

mod files;
mod pass;
mod trained;

fn golden() -> GoldenPolicy {
    GoldenPolicy::new("smolvla", "vlm")
}

/// Rows of values, each followed by zeros.
fn padded(values: &[f32], width: usize, to: usize) -> Vec<f32> {
    let row =
        |row: &[f32]| row.iter().copied().chain(std::iter::repeat_n(0.0, to - width)).collect::<Vec<_>>();
    values.chunks(width).flat_map(row).collect()
}

/// The batch as this policy sees it: of a camera that a row has not, nothing is there.
struct Batch {
    ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    pixels: Vec<Arc<Vec<f32>>>,
    image: u32,
    state: Vec<f32>,
    actions: Vec<f32>,
    noisy: Vec<f32>,
}

impl Batch {
    fn of(expected: &GoldenPolicy, config: &SmolVlaConfig) -> Self {
        let outline = outline(&Path::new(AT).join("vlm"), config);
        let image = outline.image_token;
        let time = expected.values("time");
        let (mut rows, mut pixels) = (Vec::new(), Vec::new());
        for row in 0..time.len() {
            let mut ids = Vec::new();
            for camera in
                config.sizes().cameras.iter().filter(|camera| expected.tensors.contains_key(*camera))
            {
                let mask = expected.tensors.get(&format!("{camera}_padding_mask"));
                if mask.is_some_and(|(_, seen)| seen[row] == 0.0) {
                    continue;
                }
                let (shape, values) = &expected.tensors[camera];
                let (size, each) = ([shape[2], shape[3]], 3 * shape[2] * shape[3]);
                let values = &values[row * each..][..each];
                let square = letterbox(Planes { values, size }, outline.image_side, Alignment::End);
                pixels.push(Arc::new(patches(&square, outline.image_side, outline.patches.patch)));
                ids.resize(ids.len() + outline.image_tokens(), image);
            }
            let width = expected.tensors["tokens"].0[1];
            let tokens = expected.values("tokens")[row * width..][..width].iter();
            let mask = &expected.values("tokens.mask")[row * width..][..width];
            ids.extend(tokens.zip(mask).filter(|(_, seen)| **seen > 0.0).map(|(id, _)| *id as u32));
            rows.push(ids);
        }
        let longest = rows.iter().map(Vec::len).max().expect("a row");
        let valid = rows.iter().map(|row| 0..row.len() as u32).collect();
        let ids = rows.into_iter().flat_map(|mut row: Vec<u32>| {
            row.resize(longest, 0);
            row
        });
        let actions =
            padded(expected.values("action.normalized"), config.sizes().action, config.sizes().padded[1]);
        let each = actions.len() / time.len();
        let noisy = expected.values("noise").iter().zip(&actions).enumerate();
        let noisy =
            noisy.map(|(at, (noise, action))| time[at / each] * noise + (1.0 - time[at / each]) * action);
        let state =
            padded(expected.values("state.normalized"), config.sizes().state, config.sizes().padded[0]);
        Self { ids: ids.collect(), valid, pixels, image, state, noisy: noisy.collect(), actions }
    }

    fn observed(&self) -> PolicyObservation<'_> {
        let rows = Rows::Padded(&self.valid);
        let prompts = Prompts { input_ids: &self.ids, rows, images: &[], pixel_values: &self.pixels };
        PolicyObservation { prompts, image: self.image, state: &self.state, features: None }
    }
}

fn outline(dir: &Path, config: &SmolVlaConfig) -> JointOutline {
    let family = shelf::<Sizes>().joint.of(dir).expect("it is read");
    family.outline(dir, config.within()).expect("it is read")
}

fn config() -> SmolVlaConfig {
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    SmolVlaConfig::from_directory(&directory).expect("it is read")
}

fn policy() -> (Box<dyn Policy<Flex>>, Trainables<Flex>) {
    policy_of(TuningSettings::default())
}

/// The policy, of which this trains.
fn policy_of(asked: TuningSettings<'_>) -> (Box<dyn Policy<Flex>>, Trainables<Flex>) {
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    let (mut layout, device) = (TrainableLayout::default(), Default::default());
    let files = PolicyFiles { directory: &directory, backbone: &vlm_dir(), dtype: FrozenDtype::Float32 };
    let tuned = tuned_of(&directory, asked).expect("it means something");
    let kind = PolicyKind::from_directory(&directory).expect("it is read");
    let policy = kind.load(files, &tuned, shelf(), &mut layout, &device).expect("it is read");
    let values = initial_values(&tuned, &directory.dir, &layout);
    (policy, Trainables::new(layout, values, &device))
}

fn tuned_of(directory: &PolicyDirectory, asked: TuningSettings<'_>) -> Result<TunedModules, String> {
    let config = SmolVlaConfig::from_directory(directory).expect("it is read");
    tuning::tuned(&directory.dir, &config, &outline(&vlm_dir(), &config), asked)
        .map_err(|error| error.to_string())
}

fn initial_values(tuned: &TunedModules, dir: &Path, layout: &TrainableLayout) -> Vec<f32> {
    let checkpoint = CheckpointDir { path: dir, rules: RULES };
    tuned.initial_values::<Flex>(3, layout, checkpoint, FrozenDtype::Float32).expect("they are there")
}

fn vlm_dir() -> PathBuf {
    Path::new(AT).join("vlm")
}

/// What LeRobot's step has beside the batch: the target, and which elements count.
struct Step<'e> {
    expected: &'e GoldenPolicy,
    batch: Batch,
    target: Vec<f32>,
    counts: Vec<bool>,
}

impl<'e> Step<'e> {
    fn of(expected: &'e GoldenPolicy, config: &SmolVlaConfig) -> Self {
        let batch = Batch::of(expected, config);
        let target: Vec<f32> = expected
            .values("noise")
            .iter()
            .zip(&batch.actions)
            .map(|(noise, action)| noise - action)
            .collect();
        let pad = expected.values("action_is_pad");
        let counts =
            (0..target.len()).map(|at| at % 32 < config.sizes().action && pad[at / 32] == 0.0).collect();
        Self { expected, batch, target, counts }
    }

    fn draws(&self) -> Draws<'_> {
        Draws { times: self.expected.values("time"), noisy: &self.batch.noisy }
    }

    /// The mean loss, and all gradients of it.
    fn gradients(
        &self,
        policy: &dyn Policy<Flex>,
        trainables: &Trainables<Flex>,
        training: Training<'_>,
    ) -> (f64, FlatGrads) {
        let observed = self.batch.observed();
        let (velocity, backward) =
            policy.forward_kept(trainables, training, observed, self.draws()).expect("it fits");
        let (loss, slopes) = self.loss(&vector(velocity));
        let mut grads = FlatGrads::new(trainables.layout().len());
        let dv =
            Tensor::from_data(TensorData::new(slopes, [self.target.len() / 32, 32]), &Default::default());
        backward(dv, &mut grads);
        (loss, grads)
    }

    fn loss(&self, velocity: &[f32]) -> (f64, Vec<f32>) {
        let count = self.counts.iter().filter(|counts| **counts).count() as f32;
        let off: Vec<f32> = velocity
            .iter()
            .zip(&self.target)
            .zip(&self.counts)
            .map(|((v, t), counts)| if *counts { v - t } else { 0.0 })
            .collect();
        let loss = off.iter().map(|off| f64::from(*off) * f64::from(*off)).sum::<f64>() / f64::from(count);
        (loss, off.iter().map(|off| 2.0 * off / count).collect())
    }

    /// The loss alone, as sampling runs the policy.
    fn loss_of(&self, policy: &dyn Policy<Flex>, trainables: &Trainables<Flex>) -> f64 {
        let velocity = policy.sampler(trainables, self.batch.observed()).expect("it fits");
        self.loss(&vector(velocity(self.draws()))).0
    }
}

const PLAIN: Training<'_> = Training { recompute: Recompute::None, dropout: None };

fn vector(tensor: Tensor<Flex, 2>) -> Vec<f32> {
    tensor.into_data().into_vec().expect("f32")
}
