//! What stands behind a prefix: of each sample a row that leads (the state's token, or what tells the time),
//! and its actions, which go through a layer beside each of the language model's.

use burn::tensor::Tensor;
use coxswain_models::joint::JointModel;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::ParamScope,
    recompute::segment::Segment,
};

use crate::{
    batch::Draws, dropped::SuffixRows, policy::PolicySizes, prefix::Prefix, rotary::placed,
    sinusoids::sinusoids,
};

/// How a policy's expert goes on behind a prefix.
pub(crate) trait Suffix<B: Tape<Base = B>>: 'static {
    /// What its layers share of a micro-batch: positions and masks.
    type Context: 'static;

    /// Whether what leads depends on the state alone, and not on actions and their time.
    const LEAD_IS_FIXED: bool;

    /// What it says of samples.
    fn sizes(&self) -> PolicySizes<'_>;

    /// Width of its actions' tokens.
    fn width(&self) -> usize;

    /// What embeddings and features of the prefix are multiplied by, whose width this is.
    fn prefix_scale(&self, _width: usize) -> f32 {
        1.0
    }

    /// The context of such a prefix.
    fn context(&self, prefix: &Prefix<'_, B>, device: &B::Device) -> Self::Context;

    /// What leads, `[b, w]`.
    fn lead<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2>;

    /// Tokens of actions, `[b * c, e]`.
    fn actions<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2>;

    /// What leads, through a layer, if anything reads it behind; and the keys and values that actions read
    /// there, given those of the prefix, `[b * s, kv]`.
    fn read<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, Self::Context>,
        lead: Tensor<T, 2>,
        known: [Tensor<T, 2>; 2],
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 4>; 2]);

    /// Actions through a layer, given what leads before it and what they [`read`](Self::read).
    fn act<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, Self::Context>,
        lead: &Tensor<T, 2>,
        read: [Tensor<T, 4>; 2],
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2>;

    /// Velocities `[b * c, padded]`, behind the last layer.
    fn velocity<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        rows: Option<&SuffixRows<B>>,
        lead: Option<Tensor<T, 2>>,
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2>;
}

/// What is given of a micro-batch behind its prefix.
pub(crate) struct Inputs<'g, B: ModelBackend> {
    /// Normalised states, `[b, padded]`.
    pub state: &'g [f32],
    /// Actions on their way.
    pub draws: Draws<'g>,
    /// Where they are wanted.
    pub device: &'g B::Device,
}

impl<B: ModelBackend> Clone for Inputs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: ModelBackend> Copy for Inputs<'_, B> {}

impl<B: ModelBackend> Inputs<'_, B> {
    /// States of this width.
    pub fn state_bc(&self, width: usize) -> Tensor<B, 2> {
        placed(self.state.to_vec(), [self.state.len() / width, width], self.device)
    }

    /// Noisy actions of this width, `[b * c, padded]`.
    pub fn noisy_nc(&self, width: usize) -> Tensor<B, 2> {
        placed(self.draws.noisy.to_vec(), [self.draws.noisy.len() / width, width], self.device)
    }

    /// The times, `[b, e]`.
    pub fn sinusoids_be(&self, width: usize, periods: [f64; 2]) -> Tensor<B, 2> {
        let rows = self.draws.times.iter().flat_map(|time| sinusoids(*time, width, periods));
        placed(rows.collect(), [self.draws.times.len(), width], self.device)
    }
}

/// A layer of a micro-batch.
pub(crate) struct LayerPlace<'a, B: Tape<Base = B>, C> {
    pub number: usize,
    pub last: bool,
    pub vlm: &'a dyn JointModel<B>,
    pub context: &'a C,
    /// As adapters drop of rows; none if they drop nothing.
    pub rows: Option<&'a SuffixRows<B>>,
}

/// A part of a suffix as a segment. Between segments what leads and the actions are one row of each sample,
/// `[b, w + c * e]`.
pub(crate) struct SuffixSegment<'a, B: Tape<Base = B>, S: Suffix<B>> {
    pub suffix: &'a S,
    pub part: SuffixPart<'a, B, S::Context>,
}

/// Which.
pub(crate) enum SuffixPart<'a, B: Tape<Base = B>, C> {
    Lead(Inputs<'a, B>),
    Actions(Inputs<'a, B>),
    Layer(LayerPlace<'a, B, C>),
    Velocity(Option<&'a SuffixRows<B>>),
}

impl<B: Tape<Base = B>, S: Suffix<B>> Segment<B> for SuffixSegment<'_, B, S> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Self { suffix, part } = self;
        match part {
            SuffixPart::Lead(given) => suffix.lead(params, *given),
            SuffixPart::Actions(given) => suffix.actions(params, *given),
            SuffixPart::Layer(at) => {
                let (lead, a_ne) = self.apart(&inputs[0]);
                let lead = lead.expect("it goes up to the last layer");
                let known = [inputs[1].clone(), inputs[2].clone()];
                let (next, read) = suffix.read(params, at, lead.clone(), known);
                in_rows(next, suffix.act(params, at, &lead, read, a_ne), inputs[0].dims()[0])
            }
            SuffixPart::Velocity(rows) => {
                let (lead, a_ne) = self.apart(&inputs[0]);
                suffix.velocity(params, *rows, lead, a_ne)
            }
        }
    }
}

impl<B: Tape<Base = B>, S: Suffix<B>> SuffixSegment<'_, B, S> {
    /// What leads, if it is there, and actions `[b * c, e]`.
    fn apart<T: Tape<Base = B>>(&self, x_bw: &Tensor<T, 2>) -> (Option<Tensor<T, 2>>, Tensor<T, 2>) {
        let ([batch, width], chunk, e) = (x_bw.dims(), self.suffix.sizes().chunk, self.suffix.width());
        let before = width - chunk * e;
        let a_ne = x_bw.clone().narrow(1, before, chunk * e).reshape([batch * chunk, e]);
        ((before > 0).then(|| x_bw.clone().narrow(1, 0, before)), a_ne)
    }
}

/// What leads and actions `[b * c, e]` as one row of each sample.
pub(crate) fn in_rows<T: ModelBackend>(
    lead: Option<Tensor<T, 2>>,
    a_ne: Tensor<T, 2>,
    batch: usize,
) -> Tensor<T, 2> {
    let values = a_ne.shape().num_elements() / batch.max(1);
    let a_bw = a_ne.reshape([batch, values]);
    match lead {
        Some(lead) => Tensor::cat(vec![lead, a_bw], 1),
        None => a_bw,
    }
}
