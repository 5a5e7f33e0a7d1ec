//! The keys of the task `vla_flow`: a vision-language-action policy of a pretrained model and a head that
//! makes actions of its hidden states.

mod augmentation;
mod check;
mod data;
mod features;
mod layerwise;
mod observation;
mod oft;
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
    trainables::{
        ActionEncoder, Expert, FlowConvention, HeadKind, LearningRates, PolicyLoss, Preset, Projection,
        Sensor,
    },
};
