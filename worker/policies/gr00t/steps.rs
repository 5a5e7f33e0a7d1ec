//! What the steps of such a policy's processors say: how states, images and tasks come to the model.
//!
//! Read is what LeRobot writes for a robot of one's own: the data set's minima and maxima, absolute actions,
//! pictures through torchvision. What it takes over of NVIDIA's sidecar files for embodiments of theirs
//! (statistics by group, relative actions, OpenCV's pictures) is refused by key.

use coxswain_models::pretrained::{error::ModelError, fields::Fields};
use serde_json::Value;

use super::images::ImageGeometry;
use crate::{
    directory::{PolicyDirectory, Step},
    export::PROCESSORS,
    features::PolicyFeatures,
    normalizer::CLAMPING,
    processors::ReadProcessors,
};

/// The step that makes the backbone's input.
const ENCODE: &str = "groot_n1_7_vlm_encode_v1";
/// Steps of the processor before the policy that are read.
const BEFORE: &[&str] = &[
    "rename_observations_processor",
    "to_batch_processor",
    "relative_actions_processor",
    CLAMPING[0],
    ENCODE,
    "device_processor",
];
/// Steps of the processor after the policy.
const BEHIND: &[&str] = &[CLAMPING[1], "absolute_actions_processor", "device_processor"];

/// What of them is not fixed.
pub(super) struct PackedInputs {
    pub embodiment: usize,
    pub plain_text: bool,
    pub images: ImageGeometry,
}

impl PackedInputs {
    /// Checks the steps, and puts the cameras into their order.
    pub fn from_directory(
        directory: &PolicyDirectory,
        features: &mut PolicyFeatures,
    ) -> Result<Self, ModelError> {
        ReadProcessors { steps: [BEFORE, BEHIND], modes: &[] }.check(directory)?;
        let paths = PROCESSORS.map(|file| directory.dir.join(file));
        let step = |side: usize, name: &str| -> Result<Step, ModelError> {
            let found = directory.steps(PROCESSORS[side])?.into_iter().find(|step| step.name == name);
            found.ok_or_else(|| ModelError::Config {
                path: paths[side].clone(),
                field: "steps".into(),
                problem: format!("no step `{name}`; save the policy again with LeRobot 0.6.1 or later"),
            })
        };
        let [pack, encode, unpack] = [step(0, CLAMPING[0])?, step(0, ENCODE)?, step(1, CLAMPING[1])?];
        let [pack, encode] = [&pack, &encode].map(|step| Fields::new(&paths[0], &step.config));
        let (pack, encode, unpack) = (pack?, encode?, Fields::new(&paths[1], &unpack.config)?);
        only(&pack, "normalize_min_max", true)?;
        only(&pack, "clip_outliers", true)?;
        only(&pack, "use_percentiles", false)?;
        only(&unpack, "normalize_min_max", true)?;
        only(&unpack, "clip_normalized_action", true)?;
        only(&unpack, "libero_gripper_action", false)?;
        only(&encode, "use_albumentations", false)?;
        only(&encode, "letter_box_transform", false)?;
        for key in ["raw_stats", "modality_config"] {
            absent(&pack, key)?;
        }
        for key in ["shortest_image_edge", "crop_fraction"] {
            absent(&encode, key)?;
        }
        if pack.get("state_dropout_prob").and_then(Value::as_f64).unwrap_or(0.0) != 0.0 {
            return Err(pack.error("state_dropout_prob", "only 0 is supported"));
        }
        for (key, wanted) in [
            ("state_horizon", 1),
            ("video_horizon", 1),
            ("action_horizon", features.chunk),
            ("valid_action_horizon", features.chunk),
        ] {
            if let Some(found) = pack.uint(key)?.filter(|found| *found != wanted) {
                return Err(pack.error(key, format!("{found}; only {wanted} is supported")));
            }
        }
        order(&pack, features)?;
        let tag = pack.str("embodiment_tag")?.unwrap_or("new_embodiment");
        let known = pack.object("embodiment_mapping")?;
        let embodiment = known.map(|map| map.uint(tag)).transpose()?.flatten().unwrap_or(0);
        let plain_text = pack.bool("formalize_language")?.unwrap_or(true);
        Ok(Self { embodiment, plain_text, images: geometry(&encode)? })
    }
}

/// Cameras come by their names, or as the step lists them.
fn order(pack: &Fields<'_>, features: &mut PolicyFeatures) -> Result<(), ModelError> {
    let Some(keys) = pack.get("video_modality_keys") else {
        features.cameras.sort();
        return Ok(());
    };
    let named = keys.as_array().into_iter().flatten().filter_map(Value::as_str);
    let named: Vec<String> = named.map(|key| format!("observation.images.{key}")).collect();
    if let Some(name) = named.iter().find(|name| !features.cameras.contains(name)) {
        return Err(pack.error("video_modality_keys", format!("{name} is not among config.json's features")));
    }
    features.cameras = named;
    Ok(())
}

fn geometry(encode: &Fields<'_>) -> Result<ImageGeometry, ModelError> {
    let side = |key: &str| match encode.uints(key)?.as_deref().unwrap_or_default() {
        &[height, width] if height == width && height > 0 => Ok(height),
        found => Err(encode.error(key, format!("{found:?}; expected two equal sides"))),
    };
    let target = side("image_target_size")?;
    let crop = if encode.get("image_crop_size").is_some() { side("image_crop_size")? } else { target };
    Ok(ImageGeometry { target, crop })
}

fn only(fields: &Fields<'_>, key: &str, read: bool) -> Result<(), ModelError> {
    match fields.bool(key)?.filter(|found| *found != read) {
        Some(other) => Err(fields.error(key, format!("{other}, which is not supported"))),
        None => Ok(()),
    }
}

fn absent(fields: &Fields<'_>, key: &str) -> Result<(), ModelError> {
    let given = fields.get(key).filter(|value| value.as_object().is_none_or(|object| !object.is_empty()));
    match given {
        Some(_) => Err(fields.error(
            key,
            "set, but NVIDIA's settings for single embodiments are not supported; create the policy for \
             `new_embodiment`, with the model's name on the hub as `base_model_path`",
        )),
        None => Ok(()),
    }
}
