//! The linears before and behind an expert that has a state's token, and into whose actions the time is
//! mixed. Their names are LeRobot's.
//!
//! ```text
//! state [b, w]             state_proj(state)
//! actions [b * c, e]       action_time_mlp_out(silu(action_time_mlp_in([action_in_proj(x), sinusoids(t)])))
//! velocity [b * c, padded] action_out_proj(norm(actions))
//! ```

use burn::tensor::{Tensor, activation::silu};
use coxswain_models::{
    joint::{LayerSource, outline::NamedShape},
    pretrained::error::ModelError,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::ParamScope,
};

use crate::suffix::Inputs;

/// A linear and its features, `[inputs, outputs]`.
pub(crate) type NamedLinear = (&'static str, [usize; 2]);

/// Weights and biases of linears.
pub(crate) fn tensors_of(linears: &[NamedLinear]) -> impl Iterator<Item = NamedShape> {
    linears.iter().flat_map(|&(name, [inputs, outputs])| {
        [(format!("{name}.weight"), vec![outputs, inputs]), (format!("{name}.bias"), vec![outputs])]
    })
}

/// The linears of an expert of width `e`, of a state's token of width `d`, and of such values of a state and
/// an action.
pub(crate) fn linears([state, action]: [usize; 2], d: usize, e: usize) -> [NamedLinear; 5] {
    [
        ("model.state_proj", [state, d]),
        ("model.action_in_proj", [action, e]),
        ("model.action_out_proj", [e, action]),
        ("model.action_time_mlp_in", [2 * e, e]),
        ("model.action_time_mlp_out", [e, e]),
    ]
}

/// These linears.
pub(crate) struct Projections<B: ModelBackend> {
    padded: [usize; 2],
    periods: [f64; 2],
    state: LoraLinear<B>,
    action_in: LoraLinear<B>,
    action_out: LoraLinear<B>,
    time_in: LoraLinear<B>,
    time_out: LoraLinear<B>,
}

impl<B: ModelBackend> Projections<B> {
    /// Loads them; `periods`: the shortest and the longest one of the time's sinusoids.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        padded: [usize; 2],
        [d, e]: [usize; 2],
        periods: [f64; 2],
    ) -> Result<Self, ModelError> {
        let [state, action_in, action_out, time_in, time_out] =
            linears(padded, d, e).map(|(name, features)| source.linear(name, features, true));
        let [state, action_in, action_out] = [state?, action_in?, action_out?];
        Ok(Self { padded, periods, state, action_in, action_out, time_in: time_in?, time_out: time_out? })
    }
}

impl<B: Tape<Base = B>> Projections<B> {
    /// The states' tokens.
    pub fn state<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2> {
        self.state.forward(params, T::lift(given.state_bc(self.padded[0])))
    }

    /// Tokens of noisy actions.
    pub fn actions<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        given: Inputs<'_, B>,
    ) -> Tensor<T, 2> {
        let a_ne = self.action_in.forward(params, T::lift(given.noisy_nc(self.padded[1])));
        let ([rows, e], batch) = (a_ne.dims(), given.draws.times.len());
        let time_bce = given.sinusoids_be(e, self.periods).unsqueeze_dim::<3>(1);
        let time_ne = time_bce.expand([batch, rows / batch.max(1), e]).reshape([rows, e]);
        let both = Tensor::cat(vec![a_ne, T::lift(time_ne)], 1);
        self.time_out.forward(params, silu(self.time_in.forward(params, both)))
    }

    /// Velocities of normed actions.
    pub fn velocity<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        normed_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        self.action_out.forward(params, normed_ne)
    }
}
