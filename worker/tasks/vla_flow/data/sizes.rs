//! What the run file's keys mean for the sizes of a data set's samples, from metadata alone.

use coxswain_data::{
    DataError,
    lerobot::{Catalog, feature::Feature, info::Info},
};
use coxswain_models::vision_language::PromptForm;

use crate::vla_flow::config::{SensorFeature, VlaSettings};

pub(super) fn camera_size(info: &Info, name: &str) -> Result<(usize, usize), DataError> {
    let size = |f: &Feature| f.image_size().filter(|(h, w)| *h > 0 && *w > 0);
    let feature = info.require("cameras", name, |f| f.is_camera() && size(f).is_some())?;
    Ok(size(feature).unwrap_or_default())
}

/// Window and channels; a plain vector is a window of one reading, or one of as many rows as the run says.
pub(super) fn sensor_shape(info: &Info, sensor: Option<&SensorFeature>) -> Result<(usize, usize), DataError> {
    let Some(SensorFeature { key, window }) = sensor else { return Ok((0, 0)) };
    let one_or_two_axes = |f: &Feature| f.is_number() && matches!(f.shape.len(), 1 | 2);
    match info.require("sensor", key, one_or_two_axes)?.shape[..] {
        [own, channels] if window.is_some() => {
            let found = format!("[{own}, {channels}]: each row has a window of its own");
            let remedy = "leave data.sensor.window out: `sensor: NAME`";
            Err(DataError::invalid(&info.path, format!("features.{key}.shape"), found, remedy))
        }
        [own, channels] => Ok((own, channels)),
        [channels] => Ok((window.unwrap_or(1), channels)),
        _ => Ok((0, 0)),
    }
}

/// How prompts are made of a task's text.
pub(super) fn prompt_form(vla: &VlaSettings) -> PromptForm<'_> {
    PromptForm {
        template: &vla.data.prompt,
        images: vla.data.cameras.len() * vla.observation.frames(),
        max_text_tokens: vla.observation.max_text_tokens,
    }
}

/// Some episode is as long as what a sample looks back on: otherwise all of it would be padding, always.
pub(super) fn check_reach(catalog: &Catalog, vla: &VlaSettings) -> Result<(), DataError> {
    let longest = catalog.episodes.episodes.iter().map(|episode| episode.length).max().unwrap_or(0);
    let window = vla.data.sensor.as_ref().and_then(|sensor| sensor.window).unwrap_or(1) as u64;
    let looks = [("observation.history", vla.observation.reach() + 1), ("data.sensor.window", window)];
    match looks.into_iter().find(|(_, rows)| *rows > longest) {
        None => Ok(()),
        Some((key, rows)) => {
            let found = format!("{key} reaches over {rows} rows, but the longest episode has {longest}");
            let remedy = format!("reduce {key}, so that it looks back on fewer rows");
            Err(DataError::invalid(&catalog.info.path, "total_frames", found, remedy))
        }
    }
}
