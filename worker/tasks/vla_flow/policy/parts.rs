//! What a policy is made of, and what its passes share.

use std::path::PathBuf;

use burn::tensor::{Tensor, TensorData};
use coxswain_models::vision_language::{Tap, VisionLanguage};
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::{AttentionMask, Tape},
    lora::{LoraPlan, TrainedModules},
    recompute::Retention,
};
use coxswain_proto::run_spec::CacheMode;

use crate::vla_flow::{
    config::FlowConvention,
    data::{MicroBatch, SampleDims},
    head::ActionHead,
    sensor::SensorEncoder,
};

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
pub struct Policy<B: Tape<Base = B>> {
    pub(super) model: Box<dyn VisionLanguage<B>>,
    pub(super) lora: Option<LoraPlan>,
    pub(super) full: TrainedModules,
    pub(super) sensor: Option<SensorEncoder>,
    pub(super) head: ActionHead,
    /// Where the head reads hidden states.
    pub(super) reads: Vec<Tap>,
    /// Adapters of a head that is brought.
    pub(super) expert_lora: Option<LoraPlan>,
    pub(super) tap: Option<Tap>,
    pub(super) source: Source,
    pub(super) dims: SampleDims,
    pub(super) settings: Settings,
    pub(super) device: B::Device,
}

/// Where the frozen weights came from.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub dir: PathBuf,
    pub dtype: FrozenDtype,
}

/// The run's settings that the policy acts on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub seed: u64,
    pub convention: FlowConvention,
    pub repeats: usize,
    pub sampling_steps: usize,
    pub retention: Retention,
    pub cache: CacheMode,
}

/// Hidden states of a micro-batch, after the final norm.
#[derive(Clone)]
pub struct VlFeatures<B: Tape<Base = B>> {
    /// `[b * s, d]`.
    pub hidden_nd: Tensor<B, 2>,
    /// Which of the `s` states of each row count.
    pub mask: AttentionMask,
}

impl<B: Tape<Base = B>> Policy<B> {
    /// The vision-language model.
    pub fn model(&self) -> &dyn VisionLanguage<B> {
        &*self.model
    }

    /// The policy's adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraPlan> {
        self.lora.as_ref()
    }

    /// The adapters of its expert, if that has any.
    pub fn expert_lora(&self) -> Option<&LoraPlan> {
        self.expert_lora.as_ref()
    }

    /// What of the vision-language model trains in full.
    pub fn full(&self) -> &TrainedModules {
        &self.full
    }

    /// Most bytes of streamed frozen weights that were in memory at once so far.
    pub fn most_streamed(&self) -> u64 {
        self.model.most_streamed()
    }

    /// Sizes of a sample.
    pub fn dims(&self) -> SampleDims {
        self.dims
    }

    pub(super) fn upload(&self, values: &[f32], columns: usize) -> Tensor<B, 2> {
        let rows = values.len() / columns;
        // Kept features are megabytes a sample; where nothing is computed, nothing is copied.
        if !B::VALUES {
            return Tensor::zeros([rows, columns], &self.device);
        }
        Tensor::from_data(TensorData::new(values.to_vec(), [rows, columns]), &self.device)
    }
}

/// Values of a tensor; zeros where there are none.
pub(in crate::vla_flow) fn download<B: Tape<Base = B>>(x: Tensor<B, 2>) -> Vec<f32> {
    if !B::VALUES {
        return vec![0.0; x.shape().num_elements()];
    }
    x.into_data().convert::<f32>().into_vec().expect("converted to f32")
}

pub(super) fn keys_mask(batch: &MicroBatch) -> AttentionMask {
    AttentionMask::Keys(batch.valid.clone().into())
}
