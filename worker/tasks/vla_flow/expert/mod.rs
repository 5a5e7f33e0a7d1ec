//! The action expert: DiT blocks that predict the velocity of a noisy action chunk, given the vision-language
//! hidden states, the state, the sensor tokens and the flow time.
//!
//! ```text
//! tokens  = [state | sensor tokens | future tokens | horizon actions] + positions       [b, r, t, d]
//! cond    = silu(W_2 silu(W_1 sinusoids(1000 t)))                              [b * r, d]
//! blocks  : even ones cross-attend the hidden states, odd ones the tokens     `block`
//! velocity = W_out (layer_norm(last horizon tokens) * (1 + scale) + shift)    `ends`
//! ```
//!
//! Rows are in the order sample, repeat, token: `m = b * r` draws of `t` tokens. All `r` draws of a sample
//! share one set of keys and values of its hidden states.
//!
//! The output layer and every AdaLN start at zero, as is customary for diffusion transformers: the first
//! prediction is zero velocity and a block starts without modulation. In the very first step only the output
//! layer therefore gets a gradient.
//!
//! A layerwise expert ([`ExpertForm::layerwise`], QwenPI_v3 of starVLA) has a block for each layer of the
//! language model, which cross-attends that layer's hidden states through a norm and a projection of its own.
//! Times of its embeddings are whole thousandths, and the decoder of velocities reads the last block as it
//! is. No token of it attends to another, so that its future tokens change nothing, as in starVLA.
//!
//! Training runs it in segments (`recompute::segment`): each block's parameter gradients go to host memory
//! before the next block's exist, which for an expert trained in full is what bounds the peak. What this
//! module does not do: draw noise or compute a loss (`flow`), or know where hidden states come from.
//!
//! An expert that is brought ([`Learning::Nothing`], [`Learning::Adapters`]) is made of constants. Gradients
//! pass through it to its adapters, the hidden states and the sensor tokens, as far as there are some that
//! want them, and stop there.

mod block;
mod ends;
mod features;
mod registrar;
mod shape;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::tensor::Tensor;
use coxswain_nn::dtypes::ActivationsDtype;

pub(super) use self::registrar::Registrar;
use self::{
    block::{DitBlock, DitLayer, KeyValueSource, Rows},
    ends::{
        Head, HeadSegment, TimeEmbedding, TimeSegment, TokenEmbedding, TokenSegment, sinusoids, thousandths,
        token_sinusoids,
    },
    features::{FeatureNorm, FeatureSegment},
};
pub use self::{
    registrar::Learning,
    shape::{ExpertForm, ExpertShape, ModelSizes},
};
use coxswain_nn::recompute::{
    Retention, Tower, TowerGradient, Trace,
    segment::{Input, RecordedSegment, Segment},
};
use coxswain_nn::{
    kernels::{AttentionMask, DropoutRows, Tape},
    params::{GradientSums, ParamScope, TrainableLayout, Trainables, held},
};

/// The expert: where its parameters lie in the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct ActionExpert {
    shape: ExpertShape,
    time: TimeEmbedding,
    tokens: TokenEmbedding,
    blocks: Vec<DitBlock>,
    head: Head,
    features: Option<FeatureNorm>,
}

/// What the expert attends to besides its own tokens.
#[derive(Clone)]
pub struct Conditioning<B: Tape<Base = B>> {
    /// Samples, `b`.
    pub batch: usize,
    /// `[b, state]`; none without a state.
    pub state_bc: Option<Tensor<B, 2>>,
    /// `[b * sensor_tokens, width]`; none without a sensor.
    pub sensor: Option<Input<B>>,
    /// Vision-language hidden states, `[b * s, context]`: for all blocks, or for each its own.
    pub hidden: Vec<Input<B>>,
    /// Which of the `s` hidden states of each sample count.
    pub mask: AttentionMask,
}

/// Noisy chunks on the device.
#[derive(Clone)]
pub struct Draws<'t, B: Tape<Base = B>> {
    /// Flow times, `[b * r]`.
    pub times: &'t [f32],
    /// `[b * r * horizon, action]`.
    pub noisy_nc: Tensor<B, 2>,
}

/// Blocks that read the same hidden states.
type BlockTower<'a, B> = Tower<'a, B, Vec<DitLayer<'a>>>;

/// What a forward pass kept.
pub struct ExpertTrace<'a, B: Tape<Base = B>> {
    time: RecordedSegment<'a, B>,
    tokens: RecordedSegment<'a, B>,
    /// All blocks, or each with the hidden states that it alone reads.
    towers: Vec<(BlockTower<'a, B>, Trace<'a, B>)>,
    head: RecordedSegment<'a, B>,
    features: Option<RecordedSegment<'a, B>>,
}

/// Gradients of what went into the expert; none where not tracked.
pub struct ExpertGradient<B: Tape<Base = B>> {
    /// By the hidden states, in their order, `[b * s, context]`.
    pub hidden: Option<Vec<Tensor<B, 2>>>,
    /// By the sensor tokens, `[b * sensor_tokens, width]`.
    pub sensor: Option<Tensor<B, 2>>,
}

impl ActionExpert {
    /// Registers all parameters under `expert.…`. `heads` must divide `width`.
    pub fn register(layout: &mut TrainableLayout, shape: ExpertShape, learning: Learning<'_>) -> Self {
        assert!(shape.width.is_multiple_of(shape.heads.max(1)), "checked with the run spec");
        let registrar = &mut Registrar { layout, learning };
        Self {
            shape,
            time: TimeEmbedding::register(registrar, &shape),
            tokens: TokenEmbedding::register(registrar, &shape),
            blocks: (0..shape.layers).map(|index| DitBlock::register(registrar, &shape, index)).collect(),
            head: Head::register(registrar, &shape),
            features: (shape.form.feature_norm)
                .then(|| FeatureNorm::register(registrar, "features", shape.context)),
        }
    }

    /// The expert's sizes.
    pub fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    /// Predicts velocities, `[b * r * horizon, action]`, keeping what `retention` says for one backward pass.
    /// `dropout` are the rows of its tokens, if some of what blocks add to them is dropped.
    pub fn forward<'a, B: Tape<Base = B>>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        conditioning: Conditioning<B>,
        draws: Draws<'_, B>,
        dropout: Option<DropoutRows<B>>,
    ) -> (Tensor<B, 2>, ExpertTrace<'a, B>) {
        let rows = self.rows(&conditioning, &draws);
        let time = RecordedSegment::run(&self.time_segment(&draws), trainables, vec![]);
        let token_segment = self.token_segment(&rows, &conditioning, &draws);
        let sensor_trains = conditioning.sensor.as_ref().is_some_and(|sensor| sensor.tracked);
        let tokens_train = sensor_trains || self.tokens.trains();
        let tokens =
            RecordedSegment::run(&token_segment, trainables, conditioning.sensor.into_iter().collect());
        let cond = Input { value: time.output(), tracked: self.time.trains() };
        let mut hidden = conditioning.hidden;
        let features = self.features.as_ref().map(|norm| {
            let features = RecordedSegment::run(&FeatureSegment(norm), trainables, hidden.clone());
            hidden = vec![Input { value: features.output(), tracked: hidden[0].tracked || norm.trains() }];
            features
        });
        let mut x = Input { value: tokens.output(), tracked: tokens_train };
        let mut towers = Vec::with_capacity(hidden.len());
        for (blocks, hidden) in self.blocks.chunks(self.blocks.len() / hidden.len()).zip(hidden) {
            let sides_train = cond.tracked || hidden.tracked;
            let layer = |block: &'a DitBlock| DitLayer {
                block,
                rows: rows.clone(),
                trains: sides_train || block.trains(),
            };
            let layers: Vec<_> = blocks.iter().map(layer).collect();
            let tracked = x.tracked || layers.iter().any(|layer| layer.trains);
            let (sides, dropout) = (vec![cond.clone(), hidden], dropout.clone());
            let tower = Tower { layers, trainables, retention, sides, dropout };
            let Ok((value, trace)) = tower.forward(x.value, x.tracked);
            towers.push((tower, trace));
            x = Input { value, tracked };
        }
        let head = RecordedSegment::run(&self.head_segment(&rows), trainables, vec![x, cond]);
        (head.output(), ExpertTrace { time, tokens, towers, head, features })
    }

    /// Carries the gradient of the velocities back; parameter gradients are added to `grads`.
    pub fn backward<B: Tape<Base = B>>(
        trace: ExpertTrace<'_, B>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> ExpertGradient<B> {
        let ExpertTrace { time, tokens, towers, head, features } = trace;
        let mut of_head = head.backward(dv_nc, grads).into_iter();
        let mut of_tokens = of_head.next().flatten();
        let mut of_cond = of_head.next().flatten();
        let mut of_hidden = Vec::with_capacity(towers.len());
        for (tower, trace) in towers.into_iter().rev() {
            // Nothing trains below the head, or below a block, of an expert that is brought.
            let Some(dx_nd) = of_tokens.take() else { break };
            let Ok(TowerGradient { input, sides }) = tower.backward(trace, dx_nd, grads);
            let mut sides = sides.into_iter();
            of_cond = match (sides.next().flatten(), of_cond) {
                (Some(of_blocks), Some(above)) => Some(of_blocks + above),
                (of_blocks, above) => of_blocks.or(above),
            };
            of_hidden.push(sides.next().flatten());
            of_tokens = input;
        }
        if let Some(features) = features {
            let of_norm = of_hidden.pop().flatten().map(|dhidden_nd| features.backward(dhidden_nd, grads));
            of_hidden.extend(of_norm.into_iter().flatten());
        }
        if let Some(cond_md) = of_cond {
            time.backward(cond_md, grads);
        }
        let of_tokens = of_tokens.map(|dx_nd| tokens.backward(dx_nd, grads));
        let sensor = of_tokens.into_iter().flatten().next().flatten();
        let hidden: Option<Vec<_>> = of_hidden.into_iter().rev().collect();
        ExpertGradient { hidden: hidden.filter(|all| !all.is_empty()), sensor }
    }

    /// A function that predicts velocities without a tape, for sampling: what does not depend on the flow's
    /// position is computed here, once.
    pub fn velocity<'a, B: Tape<Base = B>>(
        &'a self,
        trainables: &'a Trainables<B>,
        activations: ActivationsDtype,
        conditioning: Conditioning<B>,
    ) -> impl Fn(Draws<'_, B>) -> Tensor<B, 2> + 'a {
        let params = ParamScope::<B>::frozen(trainables);
        let in_blocks = ParamScope::<B>::frozen(trainables).holding(activations);
        let mut hidden: Vec<_> = conditioning.hidden.iter().map(|input| input.value.clone()).collect();
        if let Some(norm) = &self.features {
            hidden = vec![norm.apply(&params, hidden.swap_remove(0))];
        }
        // One for all blocks, or one for each.
        let of_each = hidden.iter().cycle().zip(&self.blocks);
        let projected: Vec<_> = of_each
            .map(|(hidden_nd, block)| block.is_cross().then(|| block.project(&params, hidden_nd)))
            .collect();
        move |draws| {
            let rows = self.rows(&conditioning, &draws);
            let cond_md = self.time_segment(&draws).run(&params, &[]);
            let sensor: Vec<_> = conditioning.sensor.iter().map(|input| input.value.clone()).collect();
            let x_nd = self.token_segment(&rows, &conditioning, &draws).run(&params, &sensor);
            let mut x_nd = held::rounded(activations, x_nd);
            for (block, projected) in self.blocks.iter().zip(&projected) {
                let attended = match projected {
                    Some(projected) => KeyValueSource::Projected(projected),
                    None => KeyValueSource::Hidden(&hidden[0]),
                };
                x_nd = block.mlp(&in_blocks, block.attend(&in_blocks, &rows, x_nd, &cond_md, attended));
            }
            self.head_segment(&rows).run(&params, &[x_nd, cond_md])
        }
    }

    fn rows<B: Tape<Base = B>>(&self, conditioning: &Conditioning<B>, draws: &Draws<'_, B>) -> Arc<Rows> {
        let batch = conditioning.batch;
        let (repeats, tokens) = (draws.times.len() / batch.max(1), self.shape.tokens());
        Arc::new(Rows { batch, repeats, tokens, mask: conditioning.mask.clone() })
    }

    fn thousandths<B: Tape<Base = B>>(&self, draws: &Draws<'_, B>) -> Vec<f64> {
        thousandths(draws.times, self.shape.form.layerwise)
    }

    fn time_segment<B: Tape<Base = B>>(&self, draws: &Draws<'_, B>) -> TimeSegment<'_, B> {
        let sinusoids_mf = sinusoids(&self.thousandths(draws), &draws.noisy_nc.device());
        TimeSegment { embedding: &self.time, sinusoids_mf }
    }

    fn token_segment<B: Tape<Base = B>>(
        &self,
        rows: &Arc<Rows>,
        conditioning: &Conditioning<B>,
        draws: &Draws<'_, B>,
    ) -> TokenSegment<'_, B> {
        TokenSegment {
            embedding: &self.tokens,
            rows: rows.clone(),
            state_bc: conditioning.state_bc.clone(),
            noisy_nc: draws.noisy_nc.clone(),
            sinusoids_md: self.shape.form.time_in_actions.then(|| {
                token_sinusoids(&self.thousandths(draws), self.shape.width, &draws.noisy_nc.device())
            }),
        }
    }

    fn head_segment(&self, rows: &Arc<Rows>) -> HeadSegment<'_> {
        HeadSegment { head: &self.head, rows: rows.clone(), horizon: self.shape.horizon }
    }
}
