//! What stands before the first layer and behind the last: projections, and the flow's time.
//!
//! ```text
//! state [b, d]             state_proj(state)
//! actions [b * c, e]       action_time_mlp_out(silu(action_time_mlp_in([action_in_proj(x), sinusoids(t)])))
//! velocity [b * c, padded] action_out_proj(rms_norm(actions))
//! ```

use burn::tensor::{Tensor, activation::silu};
use coxswain_models::{joint::LayerSource, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{BaseWeight, ParamScope},
    recompute::segment::Segment,
};

use super::{config::SmolVlaConfig, names::EXPERT_AT};

/// The projections, and the expert's last norm.
pub(super) struct Ends<B: ModelBackend> {
    state: LoraLinear<B>,
    action_in: LoraLinear<B>,
    action_out: LoraLinear<B>,
    time_in: LoraLinear<B>,
    time_out: LoraLinear<B>,
    norm_d: BaseWeight<B, 1>,
    eps: f64,
}

impl<B: ModelBackend> Ends<B> {
    /// Loads them beside a language model of width `d` and an expert of width `e`.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        config: &SmolVlaConfig,
        [d, e]: [usize; 2],
        eps: f64,
    ) -> Result<Self, ModelError> {
        let [state, action_in, action_out, time_in, time_out] =
            config.projections(d, e).map(|(name, features)| source.linear(name, features, true));
        let norm_d = source.gain(&format!("{EXPERT_AT}.norm.weight"), e)?;
        let [state, action_in, action_out] = [state?, action_in?, action_out?];
        Ok(Self { state, action_in, action_out, time_in: time_in?, time_out: time_out?, norm_d, eps })
    }

    /// Whether the state's token trains.
    pub fn state_trains(&self) -> bool {
        self.state.trains()
    }
}

/// The state's token, of states `[b, padded]`.
pub(super) struct StateSegment<'a, B: Tape<Base = B>> {
    pub ends: &'a Ends<B>,
    pub state_bc: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for StateSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.ends.state.forward(params, T::lift(self.state_bc.clone()))
    }
}

/// The expert's tokens, of noisy actions `[b * c, padded]` and sinusoids `[b * c, e]`.
pub(super) struct ActionSegment<'a, B: Tape<Base = B>> {
    pub ends: &'a Ends<B>,
    pub noisy_nc: Tensor<B, 2>,
    pub sinusoids_ne: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> Segment<B> for ActionSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Ends { action_in, time_in, time_out, .. } = self.ends;
        let a_ne = action_in.forward(params, T::lift(self.noisy_nc.clone()));
        let both = Tensor::cat(vec![a_ne, T::lift(self.sinusoids_ne.clone())], 1);
        time_out.forward(params, silu(time_in.forward(params, both)))
    }
}

/// Velocities, of the last layer's `[b * c, e]`.
pub(super) struct VelocitySegment<'a, B: Tape<Base = B>>(pub &'a Ends<B>);

impl<B: Tape<Base = B>> Segment<B> for VelocitySegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let Ends { norm_d, eps, action_out, .. } = self.0;
        action_out.forward(params, T::rms_norm(inputs[0].clone(), norm_d.on_tape(params), *eps))
    }
}
