//! The state's token and the actions through one layer, beside the keys and values of the prefix.
//!
//! As a segment both are one row of each sample, `[b, d + c * e]`: the state's token, then the actions;
//! behind the last layer the actions alone, since nothing reads the state's token there.

use burn::tensor::Tensor;
use coxswain_models::joint::{StreamLayer, StreamShape};
use coxswain_nn::{
    kernels::{DropoutRows, ModelBackend, Tape},
    params::ParamScope,
    recompute::segment::Segment,
};

use super::masks::Masks;
use crate::{
    dropped::SuffixRows,
    rotary::{Rotary, attend},
};

/// What all layers share of a micro-batch.
pub(super) struct Suffix<B: ModelBackend> {
    /// Samples.
    pub batch: usize,
    /// Actions of each.
    pub chunk: usize,
    /// Where the state's tokens stand.
    pub state: Rotary<B>,
    /// Where actions stand behind the prefix.
    pub behind: Rotary<B>,
    /// Where they stand by themselves.
    pub alone: Rotary<B>,
    /// Who sees what.
    pub masks: Masks<B>,
    /// As adapters drop of rows; none if they drop nothing.
    pub dropout: Option<SuffixRows<B>>,
}

impl<B: ModelBackend> Suffix<B> {
    /// Those of the states' tokens and of actions.
    pub fn rows(&self) -> [Option<DropoutRows<B>>; 2] {
        let rows = self.dropout.as_ref();
        [rows.map(|rows| rows.state.clone()), rows.map(|rows| rows.actions.clone())]
    }
}

/// A layer of both streams.
pub(super) struct PairedLayer<'a, B: ModelBackend> {
    /// The language model's.
    pub vlm: &'a StreamLayer<B>,
    /// The expert's.
    pub expert: &'a StreamLayer<B>,
    /// Whether actions attend to each other here.
    pub joint: bool,
    /// Whether it is the last.
    pub last: bool,
}

impl<'a, B: Tape<Base = B>> PairedLayer<'a, B> {
    /// The state's token `[b, d]` through the layer, and the keys and values of prefix and state, given
    /// those of the prefix.
    pub fn state<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        suffix: &Suffix<B>,
        known: [Tensor<T, 2>; 2],
        s_bd: Tensor<T, 2>,
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 4>; 2]) {
        let y_bd = self.vlm.normed(params, s_bd.clone());
        let [k, v] = self.vlm.keys_values(params, [y_bd.clone(), y_bd.clone()], suffix.batch);
        let StreamShape { kv_heads, head_dim, .. } = self.vlm.shape;
        let [known_k, known_v] = known.map(|x_no| {
            let tokens = x_no.dims()[0] / suffix.batch.max(1);
            x_no.reshape([suffix.batch, tokens, kv_heads, head_dim])
        });
        let k = Tensor::cat(vec![known_k, suffix.state.rotate(k)], 1);
        let v = Tensor::cat(vec![known_v, v], 1);
        let out = (!self.last).then(|| {
            let q = suffix.state.rotate(self.vlm.queries(params, y_bd, suffix.batch));
            let heads = attend(q, [k.clone(), v.clone()], &suffix.masks.state);
            self.vlm.close(params, s_bd, heads)
        });
        (out, [k, v])
    }

    /// Keys and values of prefix and state as the actions read them.
    pub fn read<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        known: [Tensor<T, 4>; 2],
    ) -> [Tensor<T, 4>; 2] {
        if self.joint {
            return known;
        }
        let [batch, keys, heads, head_dim] = known[0].dims();
        let rows = known.map(|x_bshk| x_bshk.reshape([batch * keys, heads * head_dim]));
        self.expert.keys_values(params, rows, batch)
    }

    /// Actions `[b * c, e]` through the layer, given what they [`read`](Self::read).
    pub fn actions<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        suffix: &Suffix<B>,
        [k, v]: [Tensor<T, 4>; 2],
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let y_ne = self.expert.normed(params, a_ne.clone());
        let q = self.expert.queries(params, y_ne.clone(), suffix.batch);
        let heads = if self.joint {
            let [own_k, own_v] = self.expert.keys_values(params, [y_ne.clone(), y_ne], suffix.batch);
            let k = Tensor::cat(vec![k, suffix.behind.rotate(own_k)], 1);
            attend(suffix.behind.rotate(q), [k, Tensor::cat(vec![v, own_v], 1)], &suffix.masks.joint)
        } else {
            attend(suffix.alone.rotate(q), [k, v], &suffix.masks.state)
        };
        self.expert.close(params, a_ne, heads)
    }
}

/// A layer on one micro-batch: state and actions, and the prefix's keys and values, `[b * s, kv]`.
pub(super) struct LayerSegment<'a, B: ModelBackend> {
    pub layer: PairedLayer<'a, B>,
    pub suffix: &'a Suffix<B>,
}

impl<B: Tape<Base = B>> Segment<B> for LayerSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Self { layer, suffix } = self;
        let (d, e) = (layer.vlm.shape.width, layer.expert.shape.width);
        let Suffix { batch, chunk, dropout, .. } = suffix;
        let (batch, chunk, rows) = (*batch, *chunk, dropout.as_ref());
        let s_bd = inputs[0].clone().narrow(1, 0, d);
        let a_ne = inputs[0].clone().narrow(1, d, chunk * e).reshape([batch * chunk, e]);
        let known = [inputs[1].clone(), inputs[2].clone()];
        let (s_bd, keys_values) =
            params.reading(rows.map(|rows| &rows.state), || layer.state(params, suffix, known, s_bd));
        let read = params.reading(rows.map(|rows| &rows.known), || layer.read(params, keys_values));
        let a_be = layer.actions(params, suffix, read, a_ne).reshape([batch, chunk * e]);
        match s_bd {
            Some(s_bd) => Tensor::cat(vec![s_bd, a_be], 1),
            None => a_be,
        }
    }
}
