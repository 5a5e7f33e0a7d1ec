//! A small vision-language-action policy trained for a few steps: images, adapters on every linear of the
//! language model, an action expert. What it computes must be the CPU's numbers, and the CPU's must be the
//! stored ones.

use std::{fs, path::PathBuf};

use coxswain_nn::dtypes::WeightsDtype;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use serde_json::json;

use coxswain_models::{Shelf, pretrained::synthetic::SyntheticCheckpoint};
use coxswain_nn::{
    kernels::{
        Tape,
        flat::{Flat, FlatOn},
    },
    params::{FlatGrads, Trainables},
    rng::{Key, Purpose},
};
use coxswain_task::{Losses, StageClock, Width};

use super::{
    data::{MicroBatch, SampleDims},
    policy::Policy,
};

/// Steps of gradient descent.
const STEPS: u64 = 4;
const RATE: f32 = 0.05;
/// The CPU's losses, from the machine this was written on. Kernels of other processors add in another order.
pub(super) const STORED: [f64; STEPS as usize] = [1.796_666_954, 1.599_017_535, 1.538_768_164, 1.509_501_545];

const DIMS: SampleDims = SampleDims { state: 8, sensor_window: 0, sensor_channels: 0, horizon: 8, action: 7 };
const IMAGE: u32 = 250;
/// `(t, h, w)` of each image in patches; two by two of them become a token.
const GRID: [u32; 3] = [1, 4, 6];
const PATCH_VALUES: usize = 3 * 2 * 14 * 14;

/// Trains on `device`.
pub fn step<B: Tape<Base = B>>(models: Shelf<B>, device: &B::Device, width: Width) -> Losses {
    let model = Scratch::new()?;
    let checkpoint = SyntheticCheckpoint {
        like: &model.0,
        tokenizer: None,
        out: &model.0.join("model"),
        dtype: WeightsDtype::Float32,
        seed: 5,
    };
    let family = models.vision_language.of(&model.0).map_err(|error| error.to_string())?;
    family.make_checkpoint(&checkpoint).map_err(|error| error.to_string())?;
    let spec: RunSpec = serde_json::from_value(json!({
        "run": {"name": "selftest", "output_dir": "unused", "seed": 11},
        "model": {"path": checkpoint.out, "weights_dtype": width.name()},
        "lora": {"rank": 4, "alpha": 8.0},
        "expert": {"width": 64, "heads": 2, "layers": 2, "repeated_noise": 2},
        "data": {"path": "unused", "cameras": ["unused"], "horizon": DIMS.horizon},
        "train": {"steps": STEPS, "global_batch": 2, "micro_batch": 2, "recompute": "full"},
    }))
    .map_err(|error| error.to_string())?;
    let (policy, layout, mut values) =
        Policy::<B>::load(&spec, models, DIMS, device).map_err(|error| error.to_string())?;
    let mut grads = FlatGrads::<B::Flat>::at(&B::Flat::place(device), layout.len());
    let mut trainables = Trainables::<B>::new(layout, values.clone(), device);
    let mut losses = Vec::new();
    let batch = batch();
    for _ in 0..STEPS {
        grads.zero();
        let loss = policy
            .forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default())
            .map_err(|error| error.to_string())?;
        losses.push(loss.loss_sum / loss.valid);
        let scale = RATE / loss.valid as f32;
        let gradients = grads.values_mut().read(0..values.len());
        values.iter_mut().zip(&*gradients).for_each(|(value, gradient)| *value -= scale * *gradient);
        trainables.set(values.clone());
    }
    Ok(losses)
}

/// Two samples with an image each. The same one in every step, noise and all, so that the loss falls.
fn batch() -> MicroBatch {
    let rows = 2;
    let patches = GRID.iter().product::<u32>() as usize;
    let draws = |purpose, len: usize| {
        let mut values = vec![0.0; len];
        Key { seed: 23, purpose, step: 0, sample: 0, repeat: 0 }.draws().normal(&mut values);
        values
    };
    let prompt: Vec<u32> =
        [252].into_iter().chain(vec![IMAGE; patches / 4]).chain([253, 5, 17, 100, 42, 7]).collect();
    // The second row is shorter by two tokens: padded on the left.
    let seq_len = prompt.len() + 2;
    let input_ids = [&[9, 9], &prompt[..], &[0, 0], &prompt[..]].concat();
    MicroBatch {
        step: Step(0),
        sample_indices: vec![0, 1],
        input_ids,
        valid: vec![0..seq_len as u32, 2..seq_len as u32],
        seq_len,
        pixel_values: vec![draws(Purpose::FlowNoise, rows * patches * PATCH_VALUES).into()],
        image_shapes: vec![GRID; rows],
        images_per_row: vec![1; rows],
        state: draws(Purpose::FlowTime, rows * DIMS.state),
        actions: draws(Purpose::Init, rows * DIMS.horizon * DIMS.action),
        action_widths: vec![DIMS.action; rows],
        action_valid: vec![1.0; rows * DIMS.horizon],
        ..MicroBatch::default()
    }
}

/// A directory with the model's `config.json`, gone with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, String> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("cox-selftest-{}-{number}", std::process::id()));
        let config = json!({
            "model_type": "qwen2_5_vl", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "initializer_range": 0.05,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "torch_dtype": "float32",
            "image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
            "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 56,
                "out_hidden_size": 128, "fullatt_block_indexes": [1], "in_chans": 3, "hidden_act": "silu"},
        });
        let written =
            fs::create_dir_all(&dir).and_then(|()| fs::write(dir.join("config.json"), config.to_string()));
        let this = Self(dir);
        written
            .map_err(|error| format!("{}: {error}; set TMPDIR to a directory with room", this.0.display()))?;
        Ok(this)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is a few megabytes in a directory for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
