//! The golden policy, and what it is given of a batch.

use std::{collections::BTreeMap, fs, ops::Range, path::PathBuf, sync::Arc};

use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use coxswain_integration_tests::fixture;
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{
        checkpoint::CheckpointDir,
        prompts::{Prompts, Rows},
    },
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::floats,
    params::{FlatGrads, TrainableLayout, Trainables},
};
use coxswain_policies::{
    Draws, Policy, PolicyFiles, PolicyKind, PolicyObservation, Training, TuningSettings,
    directory::PolicyDirectory,
    images::{Alignment, Planes, letterbox, patches},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::{Dtype, SafeTensors};

/// Tensors by name, with their shapes.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A file of the golden case.
pub fn golden(file: &str) -> Tensors {
    let bytes = fs::read(at(file)).expect("part of the repository");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let values = match view.dtype() {
            Dtype::U8 => view.data().iter().map(|byte| f32::from(*byte)).collect(),
            Dtype::I32 => {
                let ids = view.data().chunks(4);
                ids.map(|id| i32::from_le_bytes(id.try_into().expect("4 bytes")) as f32).collect()
            }
            _ => floats(&view).expect("numbers"),
        };
        (name, (view.shape().to_vec(), values))
    });
    tensors.collect()
}

fn at(file: &str) -> PathBuf {
    fixture("golden/smolvla").join(file)
}

/// The policy, and what trains of it.
pub struct TunedPolicy {
    policy: Box<dyn Policy<Flex>>,
    outline: JointOutline,
    pub trainables: Trainables<Flex>,
}

/// Images, prompts and states of a batch, and what its loss is of.
pub struct Batch {
    ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    pixels: Vec<Arc<Vec<f32>>>,
    state: Vec<f32>,
    actions: Vec<f32>,
    noise: Vec<f32>,
    times: Vec<f32>,
    /// Which elements count.
    counts: Vec<bool>,
}

impl TunedPolicy {
    /// The golden policy, of which this trains.
    pub fn load(asked: TuningSettings<'_>) -> Self {
        let directory = PolicyDirectory::from_dir(&at("policy")).expect("it is read");
        let kind = PolicyKind::from_directory(&directory).expect("it is read");
        let (backbone, dtype, device) = (at("vlm"), FrozenDtype::Float32, Default::default());
        let outline = kind.outline(&directory, &backbone, shelf::<Flex>()).expect("it is read");
        let tuned = kind.tuned(&directory, &outline, asked).expect("it means something");
        let files = PolicyFiles { directory: &directory, backbone: &backbone, dtype };
        let mut layout = TrainableLayout::default();
        let policy = kind.load(files, &tuned, shelf(), &mut layout, &device).expect("it is read");
        let checkpoint = CheckpointDir { path: &directory.dir, rules: kind.rules() };
        let values = tuned.initial_values::<Flex>(3, &layout, checkpoint, dtype).expect("they are there");
        Self { policy, outline, trainables: Trainables::new(layout, values, &device) }
    }

    /// A batch by the names of the golden one.
    pub fn batch(&self, given: &Tensors) -> Batch {
        let (config, outline) = (self.policy.sizes(), &self.outline);
        let of = |name: &str| &given[name].1[..];
        let times = of("time").to_vec();
        let (mut rows, mut pixels) = (Vec::new(), Vec::new());
        for row in 0..times.len() {
            let mut ids = Vec::new();
            for camera in config.cameras.iter().filter(|camera| given.contains_key(*camera)) {
                let seen = given.get(&format!("{camera}_padding_mask"));
                if seen.is_some_and(|(_, seen)| seen[row] == 0.0) {
                    continue;
                }
                let (shape, bytes) = &given[camera];
                let (size, each) = ([shape[2], shape[3]], 3 * shape[2] * shape[3]);
                let values: Vec<f32> = bytes[row * each..][..each].iter().map(|byte| byte / 255.0).collect();
                let square = letterbox(Planes { values: &values, size }, outline.image_side, Alignment::End);
                pixels.push(Arc::new(patches(&square, outline.image_side, outline.patches.patch)));
                ids.resize(ids.len() + outline.image_tokens(), outline.image_token);
            }
            let width = given["tokens"].0[1];
            let part = row * width..(row + 1) * width;
            let tokens = of("tokens")[part.clone()].iter().zip(&of("tokens.mask")[part]);
            ids.extend(tokens.filter(|(_, seen)| **seen > 0.0).map(|(id, _)| *id as u32));
            rows.push(ids);
        }
        let longest = rows.iter().map(Vec::len).max().expect("a row");
        let valid = rows.iter().map(|row| 0..row.len() as u32).collect();
        let ids = rows.into_iter().flat_map(|mut row: Vec<u32>| {
            row.resize(longest, 0);
            row
        });
        let [of_state, of_action] = config.padded;
        let actions = padded(of("action.normalized"), config.action, of_action);
        let pad = of("action_is_pad");
        let counts =
            (0..actions.len()).map(|at| at % of_action < config.action && pad[at / of_action] == 0.0);
        Batch {
            ids: ids.collect(),
            valid,
            pixels,
            state: padded(of("state.normalized"), config.state, of_state),
            counts: counts.collect(),
            actions,
            noise: of("noise").to_vec(),
            times,
        }
    }

    /// The mean loss of a batch, and its gradients.
    pub fn gradients(&self, batch: &Batch) -> (f64, FlatGrads) {
        let Self { policy, outline, trainables } = self;
        let rows = Rows::Padded(&batch.valid);
        let prompts = Prompts { input_ids: &batch.ids, rows, images: &[], pixel_values: &batch.pixels };
        let observed =
            PolicyObservation { prompts, image: outline.image_token, state: &batch.state, features: None };
        let each = batch.noise.len() / batch.times.len();
        let between = batch.noise.iter().zip(&batch.actions).enumerate().map(|(at, (noise, action))| {
            let time = batch.times[at / each];
            time * noise + (1.0 - time) * action
        });
        let noisy: Vec<f32> = between.collect();
        let draws = Draws { times: &batch.times, noisy: &noisy };
        let training = Training { recompute: Recompute::None, dropout: None };
        let (velocity, backward) =
            policy.forward_kept(trainables, training, observed, draws).expect("it fits");
        let shape = velocity.dims();
        let velocity = velocity.into_data().into_vec::<f32>().expect("f32");
        let target = batch.noise.iter().zip(&batch.actions).map(|(noise, action)| noise - action);
        let errors: Vec<f32> = velocity
            .iter()
            .zip(target)
            .zip(&batch.counts)
            .map(|((v, target), counts)| if *counts { v - target } else { 0.0 })
            .collect();
        let count = batch.counts.iter().filter(|counts| **counts).count() as f64;
        let loss = errors.iter().map(|error| f64::from(error * error)).sum::<f64>() / count;
        let slopes: Vec<f32> = errors.iter().map(|error| 2.0 * error / count as f32).collect();
        let dv_nc = Tensor::from_data(TensorData::new(slopes, shape), &Default::default());
        let mut grads = FlatGrads::new(trainables.layout().len());
        backward(dv_nc, &mut grads);
        (loss, grads)
    }
}

/// Rows of values, each followed by zeros.
fn padded(values: &[f32], width: usize, to: usize) -> Vec<f32> {
    let rows = values.chunks(width);
    rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, to - width))).collect()
}
