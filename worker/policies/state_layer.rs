//! The state's token and the actions through one layer, beside the keys and values of the prefix.
//!
//! The state's token goes through a layer of its own stream, sees the prefix and itself, and knows nothing
//! of actions. Behind the last layer nothing reads it.

use burn::tensor::Tensor;
use coxswain_models::joint::StreamLayer;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::ParamScope,
};

use crate::{
    masks::StateMasks,
    rotary::{Rotary, attend, by_head},
};

/// What all layers share of a micro-batch.
pub(crate) struct StateContext<B: ModelBackend> {
    /// Samples.
    pub batch: usize,
    /// Where the states' tokens stand.
    pub state: Rotary<B>,
    /// Where actions stand behind the prefix.
    pub behind: Rotary<B>,
    /// Where they stand by themselves.
    pub alone: Rotary<B>,
    /// Who sees what.
    pub masks: StateMasks<B>,
}

/// A layer of both streams.
pub(crate) struct StateLayer<'a, B: ModelBackend> {
    /// The state's.
    pub state: &'a StreamLayer<B>,
    /// The actions'.
    pub expert: &'a StreamLayer<B>,
    /// Whether actions attend to each other here.
    pub joint: bool,
    /// Whether it is the last.
    pub last: bool,
}

impl<B: Tape<Base = B>> StateLayer<'_, B> {
    /// The state's token `[b, d]` through the layer, and the keys and values of prefix and state, given
    /// those of the prefix.
    pub fn state<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        context: &StateContext<B>,
        known: [Tensor<T, 2>; 2],
        s_bd: Tensor<T, 2>,
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 4>; 2]) {
        let y_bd = self.state.normed(params, s_bd.clone());
        let [k, v] = self.state.keys_values(params, [y_bd.clone(), y_bd.clone()], context.batch);
        let [known_k, known_v] = by_head(known, context.batch, &self.state.shape);
        let k = Tensor::cat(vec![known_k, context.state.rotate(k)], 1);
        let v = Tensor::cat(vec![known_v, v], 1);
        let out = (!self.last).then(|| {
            let q = context.state.rotate(self.state.queries(params, y_bd, context.batch));
            let heads = attend(q, [k.clone(), v.clone()], &context.masks.state);
            self.state.close(params, s_bd, heads)
        });
        (out, [k, v])
    }

    /// Keys and values of prefix and state as the actions read them.
    pub fn keys_values<T: Tape<Base = B>>(
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

    /// Actions `[b * c, e]` through the layer, given the [keys and values](Self::keys_values) that they read.
    pub fn actions<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        context: &StateContext<B>,
        [k, v]: [Tensor<T, 4>; 2],
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let y_ne = self.expert.normed(params, a_ne.clone());
        let q = self.expert.queries(params, y_ne.clone(), context.batch);
        let heads = if self.joint {
            let [own_k, own_v] = self.expert.keys_values(params, [y_ne.clone(), y_ne], context.batch);
            let k = Tensor::cat(vec![k, context.behind.rotate(own_k)], 1);
            attend(context.behind.rotate(q), [k, Tensor::cat(vec![v, own_v], 1)], &context.masks.joint)
        } else {
            attend(context.alone.rotate(q), [k, v], &context.masks.state)
        };
        self.expert.close(params, a_ne, heads)
    }
}
