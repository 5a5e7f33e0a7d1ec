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

use std::{collections::HashMap, path::Path};

use coxswain_proto::run_spec::RunSpec;
use safetensors::tensor::{Dtype, TensorView};

use super::{dataset::Dataset, mixture::Mixture, run_data::RunData};
use crate::{settings::checked, vla_flow::config::VlaSettings};
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
    let ones = vec![1i64; seq];
    let mut tensors: Vec<(&str, Dtype, Vec<usize>, &[u8])> = vec![
        ("input_ids", Dtype::I64, vec![1, seq], bytemuck::cast_slice(&ids)),
        ("attention_mask", Dtype::I64, vec![1, seq], bytemuck::cast_slice(&ones)),
        ("pixel_values", Dtype::F32, vec![patches, columns], bytemuck::cast_slice(&sample.pixel_values[..])),
        ("image_grid_thw", Dtype::I64, vec![images, 3], bytemuck::cast_slice(&shapes)),
        ("state", Dtype::F32, vec![dims.state], bytemuck::cast_slice(&sample.state)),
        ("actions", Dtype::F32, vec![dims.horizon, dims.action], bytemuck::cast_slice(&sample.actions)),
        ("action_is_pad", Dtype::BOOL, vec![dims.horizon], &is_pad),
    ];
    if !sample.sensor.is_empty() {
        let shape = vec![dims.sensor_window, dims.sensor_channels];
        tensors.push(("sensor", Dtype::F32, shape, bytemuck::cast_slice(&sample.sensor)));
    }
    let frame_is_pad = sample.frame_is_pad(&settings.observation);
    let frame_is_pad: Vec<u8> = frame_is_pad.into_iter().map(u8::from).collect();
    if let [_, _, ..] = frame_is_pad[..] {
        tensors.push(("observation_is_pad", Dtype::BOOL, vec![frame_is_pad.len()], &frame_is_pad));
    }
    let views = tensors.into_iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(dtype, shape, bytes).expect("shapes are taken from the values"))
    });
    let header = [
        ("index", sample.index.to_string()),
        ("episode", sample.episode.to_string()),
        ("frame", sample.frame.to_string()),
        ("fingerprint", fingerprint.to_string()),
    ];
    let header: HashMap<String, String> = header.map(|(k, v)| (k.to_string(), v)).into();
    let bytes = safetensors::serialize(views, Some(header))
        .map_err(|e| DataError::invalid(out, "(file)", e.to_string(), "report this sample"))?;
    publish(out, &bytes)
}

/// Writes a file that appears whole or not at all.
fn publish(out: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let partial = out.with_file_name(name);
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, out));
    written.map_err(|e| {
        // The first failure is the one to tell; a leftover that cannot be removed either is secondary.
        let _ = std::fs::remove_file(&partial);
        DataError::io(out, "write")(e)
    })
}
