//! The keys of the task `vla_flow`: a vision-language-action policy of a Qwen2.5-VL model and a flow-matching
//! action expert.

mod augmentation;
mod check;
mod data;
mod features;
mod observation;
mod schema;
mod serve;
mod sets;
mod settings;
mod tap;
#[cfg(test)]
mod tests;
mod trainables;

pub use self::{
    augmentation::{
        Affine, Augmentation, Crop, Jitter, ResizedCrop, Transform, Transforms, WeightedTransform,
    },
    data::{Data, DataSet, Normalization},
    features::{FeatureList, SensorFeature},
    observation::Observation,
    schema::SCHEMA,
    serve::Serve,
    sets::in_metric,
    settings::{Optimizer, VlaMut, VlaSettings, VlaSpec},
    tap::TapSetting,
    trainables::{ActionEncoder, Expert, FlowConvention, LearningRates, Preset, Projection, Sensor},
};
