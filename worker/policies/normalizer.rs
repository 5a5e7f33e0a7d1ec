//! How values of a feature are normalised before a policy and back behind it, as its processors say.
//!
//! ```text
//! MEAN_STD     (x - mean) / (std + 1e-8)            back: x std + mean
//! QUANTILES    2 (x - q01) / (q99 - q01) - 1        back: (x + 1) (q99 - q01) / 2 + q01
//! clamped      2 (x - min) / (max - min) - 1 within [-1, 1], 0 where nothing changes; back: the same within
//!              [-1, 1]. GR00T's own steps, which say nothing of it
//! IDENTITY     x, as where the directory keeps no statistics of the feature
//! ```
//!
//! LeRobot's `processor/normalize_processor.py`; what lies beyond the quantiles is not clamped.

use coxswain_data::NormMode;
use coxswain_models::pretrained::error::ModelError;

use crate::{directory::PolicyDirectory, export::PROCESSORS};

/// LeRobot's steps that normalise, in the processor before and behind the policy.
const NORMALIZERS: [&str; 2] = ["normalizer_processor", "unnormalizer_processor"];
/// What LeRobot adds to deviations, and has in the place of a range that is 0.
const EPS: f32 = 1e-8;
/// Steps of GR00T's, before and behind the policy, that normalise by minima and maxima.
pub(crate) const CLAMPING: [&str; 2] = ["groot_n1_7_pack_inputs_v1", "groot_action_unpack_unnormalize_v2"];

/// The processor before a policy, or behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Before,
    Behind,
}

/// A feature, as processors name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormalizedFeature<'f> {
    /// The feature's name.
    pub name: &'f str,
    /// `STATE` or `ACTION`.
    pub kind: &'f str,
    /// Values of it.
    pub width: usize,
}

/// Statistics of a feature, and what is done with them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Normalizer {
    /// Means and deviations.
    MeanStd([Vec<f32>; 2]),
    /// The 1st and the 99th percentile.
    Quantiles([Vec<f32>; 2]),
    /// Minima and maxima.
    Clamped([Vec<f32>; 2]),
}

impl Normalizer {
    /// The normalizer of a feature on this side of a policy; none where values go as they are.
    pub fn for_feature(
        directory: &PolicyDirectory,
        side: Side,
        feature: NormalizedFeature<'_>,
    ) -> Result<Option<Self>, ModelError> {
        let NormalizedFeature { name, kind, width } = feature;
        let (file, step) = (PROCESSORS[side as usize], step_of(directory, side)?);
        let wrong = |problem: String| {
            Err(ModelError::Config { path: directory.dir.join(file), field: name.into(), problem })
        };
        let mode = mode_of(directory, side, kind)?;
        let keys = match mode {
            NormMode::MeanStd => ["mean", "std"],
            NormMode::Quantiles => ["q01", "q99"],
            NormMode::MinMaxClamped => ["min", "max"],
            _ => return Ok(None),
        };
        let mut kept = directory.kept_by(file, step)?;
        if !kept.keys().any(|key| key.starts_with(&format!("{name}."))) {
            return Ok(None);
        }
        let found = keys.map(|key| kept.remove(&format!("{name}.{key}")).ok_or(key));
        let [first, second] = match found {
            [Ok(first), Ok(second)] => [first, second],
            [Err(key), _] | [_, Err(key)] => {
                return wrong(format!("has statistics, but no {key}; export the policy again"));
            }
        };
        if [first.len(), second.len()] != [width; 2] {
            let [a, b] = [first.len(), second.len()];
            return wrong(format!("{a} values of {} and {b} of {}; expected {width}", keys[0], keys[1]));
        }
        Ok(Some(match mode {
            NormMode::Quantiles => Self::Quantiles([first, second]),
            NormMode::MinMaxClamped => Self::Clamped([first, second]),
            _ => Self::MeanStd([first, second]),
        }))
    }

    /// The value at this place as the policy sees it.
    pub fn normalized(&self, at: usize, value: f32) -> f32 {
        match self {
            Self::MeanStd([mean, std]) => (value - mean[at]) / (std[at] + EPS),
            Self::Quantiles([low, high]) => 2.0 * (value - low[at]) / range(low[at], high[at]) - 1.0,
            Self::Clamped([low, high]) if low[at] == high[at] => 0.0,
            Self::Clamped([low, high]) => {
                (2.0 * (value - low[at]) / (high[at] - low[at]) - 1.0).clamp(-1.0, 1.0)
            }
        }
    }

    /// And back.
    pub fn raw(&self, at: usize, value: f32) -> f32 {
        match self {
            Self::MeanStd([mean, std]) => value * std[at] + mean[at],
            Self::Quantiles([low, high]) => (value + 1.0) * range(low[at], high[at]) / 2.0 + low[at],
            Self::Clamped([low, high]) => {
                (value.clamp(-1.0, 1.0) + 1.0) * 0.5 * (high[at] - low[at]) + low[at]
            }
        }
    }
}

/// By what states or actions are normalised before a policy.
pub(crate) fn mode(directory: &PolicyDirectory, kind: &str) -> Result<NormMode, ModelError> {
    mode_of(directory, Side::Before, kind)
}

/// The step that normalises.
pub(crate) fn step_of(directory: &PolicyDirectory, side: Side) -> Result<&'static str, ModelError> {
    let steps = directory.steps(PROCESSORS[side as usize])?;
    let clamping = CLAMPING[side as usize];
    let clamps = steps.iter().any(|step| step.name == clamping);
    Ok(if clamps { clamping } else { NORMALIZERS[side as usize] })
}

fn mode_of(directory: &PolicyDirectory, side: Side, kind: &str) -> Result<NormMode, ModelError> {
    let (file, step) = (PROCESSORS[side as usize], step_of(directory, side)?);
    if step == CLAMPING[side as usize] {
        return Ok(NormMode::MinMaxClamped);
    }
    let steps = directory.steps(file)?;
    let found = steps.iter().find(|found| found.name == step);
    match found.and_then(|found| found.config.get("norm_map")?.get(kind)?.as_str()) {
        Some("MEAN_STD") => Ok(NormMode::MeanStd),
        Some("QUANTILES") => Ok(NormMode::Quantiles),
        None | Some("IDENTITY") => Ok(NormMode::Identity),
        Some(other) => Err(ModelError::Config {
            path: directory.dir.join(file),
            field: format!("norm_map.{kind}"),
            problem: format!("{other}; expected MEAN_STD, QUANTILES or IDENTITY"),
        }),
    }
}

fn range(low: f32, high: f32) -> f32 {
    if high == low { EPS } else { high - low }
}
