//! What a checkpoint says about its images: the image processor's settings, wherever its version of
//! Transformers keeps them.
//!
//! | file | written by |
//! |---|---|
//! | `processor_config.json`, field `image_processor` | Transformers 5; wins, as it does there |
//! | `preprocessor_config.json` | published checkpoints, and `save_pretrained` until then |
//!
//! Settings that ask for other images than the ones made here (no resizing, another filter, patches of
//! another size) are refused by name.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::shape::PatchShape;
use coxswain_data::{DataError, text::read_json};

const OWN_FILE: &str = "preprocessor_config.json";
const SHARED_FILE: &str = "processor_config.json";
/// `PIL.Image.Resampling.BICUBIC`.
const BICUBIC: u32 = 3;

/// Settings of the image processor, and the file they are from.
#[derive(Debug)]
pub(super) struct Preprocessor {
    pub(super) path: PathBuf,
    pub(super) min_pixels: Option<usize>,
    pub(super) max_pixels: Option<usize>,
    pub(super) mean: [f64; 3],
    pub(super) std: [f64; 3],
    pub(super) rescale_factor: f64,
}

/// In its published (`min_pixels`), its oldest (`size.min_pixels`) and its newer (`size.shortest_edge`) form.
/// Null is absent: the class's default, which is what we do.
#[derive(Debug, Deserialize)]
struct Settings {
    min_pixels: Option<usize>,
    max_pixels: Option<usize>,
    size: Option<Size>,
    image_mean: Option<[f64; 3]>,
    image_std: Option<[f64; 3]>,
    rescale_factor: Option<f64>,
    resample: Option<u32>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    patch_size: Option<usize>,
    merge_size: Option<usize>,
    temporal_patch_size: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
struct Size {
    shortest_edge: Option<usize>,
    longest_edge: Option<usize>,
    min_pixels: Option<usize>,
    max_pixels: Option<usize>,
}

const CLIP_MEAN: [f64; 3] = [0.48145466, 0.4578275, 0.40821073];
const CLIP_STD: [f64; 3] = [0.26862954, 0.26130258, 0.27577711];

impl Preprocessor {
    /// Reads the settings of the checkpoint at `model`, whose vision tower has this shape.
    pub(super) fn from_checkpoint(model: &Path, shape: PatchShape) -> Result<Self, DataError> {
        let (path, settings) = find(model)?;
        settings.check(&path, shape)?;
        let size = settings.size.unwrap_or_default();
        Ok(Self {
            path,
            min_pixels: settings.min_pixels.or(size.shortest_edge).or(size.min_pixels),
            max_pixels: settings.max_pixels.or(size.longest_edge).or(size.max_pixels),
            mean: settings.image_mean.unwrap_or(CLIP_MEAN),
            std: settings.image_std.unwrap_or(CLIP_STD),
            rescale_factor: settings.rescale_factor.unwrap_or(1.0 / 255.0),
        })
    }
}

fn find(model: &Path) -> Result<(PathBuf, Settings), DataError> {
    let (own, shared) = (model.join(OWN_FILE), model.join(SHARED_FILE));
    if shared.exists() {
        let mut fields: Map<String, Value> = read_json(&shared)?;
        if let Some(nested) = fields.remove("image_processor") {
            let settings = serde_json::from_value(nested).map_err(|error| {
                DataError::invalid(
                    &shared,
                    "image_processor",
                    error.to_string(),
                    "repair or restore the file",
                )
            })?;
            return Ok((shared, settings));
        }
    }
    if !own.exists() {
        let found = format!("missing, and there is no {SHARED_FILE} with an image_processor");
        let remedy =
            "copy either from the published checkpoint, or write it with AutoProcessor's save_pretrained";
        return Err(DataError::invalid(&own, "(file)", found, remedy));
    }
    let settings = read_json(&own)?;
    Ok((own, settings))
}

impl Settings {
    fn check(&self, path: &Path, shape: PatchShape) -> Result<(), DataError> {
        let refuse =
            |field: &str, found: String, remedy: &str| Err(DataError::invalid(path, field, found, remedy));
        let steps = [
            ("do_resize", self.do_resize),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
        ];
        for (field, switch) in steps {
            if switch == Some(false) {
                let remedy =
                    "images are always resized, rescaled and normalised here; use the published settings";
                return refuse(field, "false".into(), remedy);
            }
        }
        if let Some(filter) = self.resample.filter(|filter| *filter != BICUBIC) {
            return refuse("resample", filter.to_string(), "only 3 (bicubic) is supported");
        }
        let sizes = [
            ("patch_size", self.patch_size, shape.patch),
            ("merge_size", self.merge_size, shape.merge),
            ("temporal_patch_size", self.temporal_patch_size, shape.frames),
        ];
        for (field, message, tower) in sizes {
            if let Some(message) = message.filter(|message| *message != tower) {
                let found = format!("{message}, but the vision tower in config.json has {tower}");
                return refuse(field, found, "copy both files from the same checkpoint");
            }
        }
        let std = self.image_std.unwrap_or(CLIP_STD);
        if std.iter().any(|deviation| *deviation <= 0.0) {
            return refuse("image_std", format!("{std:?}"), "standard deviations must be positive");
        }
        Ok(())
    }
}
