//! The keys of the task `vla_flow`: a vision-language-action policy of a Qwen2.5-VL model and a flow-matching
//! action expert.

mod check;
mod data;
mod schema;
mod serve;
mod sets;
mod settings;
mod tap;
#[cfg(test)]
mod tests;
mod trainables;

pub use self::{
    data::{Data, DataSet, Normalization, Weights},
    schema::SCHEMA,
    serve::Serve,
    settings::{Optimizer, VlaMut, VlaSettings, VlaSpec},
    tap::TapSetting,
    trainables::{ActionEncoder, Expert, FlowConvention, LearningRates, Preset, Projection, Sensor},
};
