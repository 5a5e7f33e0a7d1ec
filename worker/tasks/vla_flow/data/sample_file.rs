//! One sample in a safetensors file, as training sees it, but for random changes of its images.
//!
//! | tensor | type and shape |
//! |---|---|
//! | `input_ids`, `attention_mask` | i64 `[1, s]` |
//! | `pixel_values` | f32 `[patches, 1176]` |
//! | `image_grid_thw` | i64 `[images, 3]` |
//! | `state`, `actions` | f32 `[state]`, `[horizon, action]`, normalised |
//! | `sensor` | f32 `[window, channels]`, normalised; absent without a sensor |
//! | `action_is_pad` | bool `[horizon]` |
//! | `observation_is_pad` | bool `[frames]`, true before the episode's first; absent without history |
//!
//! The first four are what `cox model forward` reads. The header names index, episode, frame and data set.

use std::{collections::BTreeMap, path::Path};

use coxswain_proto::run_spec::RunSpec;
use safetensors::Dtype;

use super::{dataset::Dataset, mixture::Mixture, run_data::RunData};
use crate::{
    sample_file::{row, tensor, write},
    settings::checked,
    vla_flow::config::VlaSettings,
};
use coxswain_data::DataError;
use coxswain_models::Shelf;
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_task::Samples;

/// Writes sample `index` of the run's data to `out`; nothing is left behind on failure.
pub fn write_sample(spec: &RunSpec, models: Shelf<Sizes>, index: u64, out: &Path) -> Result<(), DataError> {
    let settings = checked(VlaSettings::from_spec(spec))?;
    let several = !settings.data.sets.is_empty();
    let (sample, dims, fingerprint) = if several {
        let sets = Mixture::from_spec(spec, models)?;
        (sets.sample(index)?, sets.dims(), Samples::fingerprint(&sets))
    } else {
        let dataset = Dataset::from_spec(spec, models)?;
        (dataset.sample(index)?, dataset.dims(), dataset.fingerprint())
    };
    let ids: Vec<i64> = sample.input_ids.iter().map(|id| i64::from(*id)).collect();
    let shapes: Vec<i64> = sample.image_shapes.iter().flatten().map(|g| i64::from(*g)).collect();
    let is_pad: Vec<u8> = sample.action_is_pad.iter().map(|p| u8::from(*p)).collect();
    let (seq, images) = (ids.len(), sample.image_shapes.len());
    let patches: usize = sample.image_shapes.iter().map(|g| g.iter().product::<u32>() as usize).sum();
    let columns = sample.pixel_values.len() / patches.max(1);
    let mask = vec![1; seq];
    let floats = |shape, values| tensor(Dtype::F32, shape, bytemuck::cast_slice::<f32, u8>(values));
    let mut tensors = BTreeMap::from([
        ("input_ids", row(&ids)),
        ("attention_mask", row(&mask)),
        ("pixel_values", floats(vec![patches, columns], &sample.pixel_values[..])),
        ("image_grid_thw", tensor(Dtype::I64, vec![images, 3], bytemuck::cast_slice(&shapes))),
        ("state", floats(vec![dims.state], &sample.state)),
        ("actions", floats(vec![dims.horizon, dims.action], &sample.actions)),
        ("action_is_pad", tensor(Dtype::BOOL, vec![dims.horizon], &is_pad)),
    ]);
    if !sample.sensor.is_empty() {
        tensors.insert("sensor", floats(vec![dims.sensor_window, dims.sensor_channels], &sample.sensor));
    }
    let frame_is_pad = sample.frame_is_pad(&settings.observation);
    let frame_is_pad: Vec<u8> = frame_is_pad.into_iter().map(u8::from).collect();
    if let [_, _, ..] = frame_is_pad[..] {
        let mask = tensor(Dtype::BOOL, vec![frame_is_pad.len()], &frame_is_pad);
        tensors.insert("observation_is_pad", mask);
    }
    let header = [
        ("index", sample.index.to_string()),
        ("episode", sample.episode.to_string()),
        ("frame", sample.frame.to_string()),
        ("fingerprint", fingerprint.to_string()),
    ];
    write(out, tensors, Some(header.map(|(key, value)| (key.to_owned(), value)).into()))
}
