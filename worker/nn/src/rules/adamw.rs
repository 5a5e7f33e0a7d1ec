//! AdamW as an update rule; the arithmetic is [`kernels::flat::adamw`](crate::kernels::flat::adamw)'s.

use coxswain_proto::run_spec::Optimizer;

use super::{
    rule::{Hyperparameters, ParamUpdate, UpdateRule},
    state::{StateBuffer, StateValues},
};
use crate::{
    kernels::flat::{Average, Coefficients, Flat, Part, Run},
    params::Grain,
};

/// AdamW with two float32 moments for each element.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    betas: [f64; 2],
    eps: f64,
}

impl AdamW {
    /// The rule of a run.
    pub fn new(settings: &Optimizer) -> Self {
        Self { betas: settings.betas, eps: settings.eps }
    }

    /// What one step multiplies with.
    pub(super) fn coefficients(&self, with: &Hyperparameters) -> Coefficients {
        let &Hyperparameters { gradient_factor, lr, weight_decay, step } = with;
        let [beta1, beta2] = self.betas;
        let power = |beta: f64| beta.powf(step as f64);
        Coefficients {
            factor: gradient_factor as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            keep: (1.0 - lr * weight_decay) as f32,
            step_size: (lr / (1.0 - power(beta1))) as f32,
            root_factor: (1.0 / (1.0 - power(beta2)).sqrt()) as f32,
            eps: self.eps as f32,
        }
    }

    /// Updates as the arithmetic takes them: neighbours that are updated alike are one.
    fn joined(&self, updates: &[ParamUpdate<'_>]) -> Vec<Run> {
        let alike = |one: &ParamUpdate<'_>, next: &ParamUpdate<'_>| {
            one.with == next.with && one.piece.range.end == next.piece.range.start
        };
        let join = |updates: &[ParamUpdate<'_>]| {
            let (first, last) = (updates.first()?, updates.last()?);
            let range = first.piece.range.start..last.piece.range.end;
            Some(Run { range, coefficients: self.coefficients(&first.with) })
        };
        updates.chunk_by(alike).filter_map(join).collect()
    }
}

impl<F: Flat> UpdateRule<F> for AdamW {
    fn state(&self) -> &[StateBuffer] {
        const { &[StateBuffer::float32("exp_avg"), StateBuffer::float32("exp_avg_sq")] }
    }

    fn grain(&self) -> Grain {
        Grain::Element
    }

    fn update(
        &self,
        part: Part<'_, F, &mut [StateValues<F>]>,
        updates: &[ParamUpdate<'_>],
        average: Option<Average<'_, F>>,
    ) {
        let Part { weights, weights_from, state, grads, grads_from } = part;
        let [StateValues::Float32(exp_avg), StateValues::Float32(exp_avg_sq)] = state else {
            unreachable!("a part has the state that its rule asks for");
        };
        let state = [exp_avg, exp_avg_sq];
        let part = Part { weights, weights_from, state, grads, grads_from };
        F::adamw(part, &self.joined(updates), average);
    }
}
