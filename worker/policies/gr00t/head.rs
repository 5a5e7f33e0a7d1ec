//! All that stands behind the vision-language model: a norm and layers of self-attention on its hidden
//! states, and blocks that make velocities of a state and noisy actions.
//!
//! A sample's hidden states come as those of its images, those of its text, and padding, so that either is
//! one range of keys. No layer here knows where a hidden state stood.

use std::sync::Arc;

use burn::tensor::Tensor;
use coxswain_models::pretrained::error::ModelError;
use coxswain_nn::{
    kernels::{DropoutRows, ModelBackend, Tape},
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Retention, Tower, TowerGradient, Trace,
        segment::{Input, RecordedSegment, Segment},
    },
};

use super::{
    block::{AttentionSource, Block, BlockRows, BlockShape, HeadLayer, LayerNorm},
    config::{DropoutRates, Gr00tConfig, HeadSizes},
    ends::{Ends, TimeSegment, TokenSegment, VelocitySegment},
    names::HEAD,
};
use crate::{batch::Draws, source::ExpertSource};

/// Where the norm on hidden states is.
pub(super) const NORM: &str = "vlln";

/// The blocks of either kind, each with its path: on hidden states, then on actions.
pub(super) fn blocks(
    sizes: &HeadSizes,
    rates: DropoutRates,
) -> impl Iterator<Item = (String, BlockShape<'static>)> + use<> {
    let HeadSizes { context, vl_layers, vl_heads, width, blocks, heads, text_every, .. } = *sizes;
    let on_hidden = (0..vl_layers).map(move |number| {
        let shape = BlockShape {
            at: "",
            width: context,
            heads: vl_heads,
            source: context,
            attended: AttentionSource::Own,
            timed: false,
            dropout: rates.vl,
        };
        (format!("{HEAD}.vl_self_attention.transformer_blocks.{number}"), shape)
    });
    let on_actions = (0..blocks).map(move |number| {
        let attended = match number {
            number if number % 2 == 1 => AttentionSource::Own,
            number if number.is_multiple_of(2 * text_every) => AttentionSource::Text,
            _ => AttentionSource::Images,
        };
        let source = if attended == AttentionSource::Own { width } else { context };
        let shape = BlockShape { at: "", width, heads, source, attended, timed: true, dropout: rates.blocks };
        (format!("{HEAD}.model.transformer_blocks.{number}"), shape)
    });
    on_hidden.chain(on_actions)
}

/// The head's weights.
pub(super) struct ActionHead<B: ModelBackend> {
    norm: LayerNorm<B>,
    on_hidden: Vec<Block<B>>,
    on_actions: Vec<Block<B>>,
    ends: Ends<B>,
}

/// What is given of a micro-batch beside its hidden states.
pub(super) struct HeadInputs<'g, B: ModelBackend> {
    pub state: &'g [f32],
    pub draws: Draws<'g>,
    pub rows: Arc<BlockRows<B>>,
    pub dropout: Option<&'g HeadRows<B>>,
    pub device: &'g B::Device,
}

/// As dropout knows rows: states and tokens of actions behind them.
pub(super) struct HeadRows<B: ModelBackend> {
    pub states: DropoutRows<B>,
    pub tokens: DropoutRows<B>,
}

/// Blocks in their micro-batch.
type BlockTower<'a, B> = Tower<'a, B, Vec<HeadLayer<'a, B>>>;

/// What a forward pass kept.
pub(super) struct HeadTrace<'a, B: Tape<Base = B>> {
    norm: RecordedSegment<'a, B>,
    on_hidden: (BlockTower<'a, B>, Trace<'a, B>),
    time: RecordedSegment<'a, B>,
    tokens: RecordedSegment<'a, B>,
    on_actions: (BlockTower<'a, B>, Trace<'a, B>),
    velocity: RecordedSegment<'a, B>,
}

/// What velocities are predicted from, ready for each step of sampling.
pub(super) struct PreparedHead<'a, B: Tape<Base = B>> {
    head: &'a ActionHead<B>,
    rows: Arc<BlockRows<B>>,
    /// Of each block that reads hidden states.
    projected: Vec<Option<[Tensor<B, 2>; 2]>>,
}

impl<B: Tape<Base = B>> ActionHead<B> {
    /// Loads it.
    pub fn load(source: &mut ExpertSource<'_, '_, B>, config: &Gr00tConfig) -> Result<Self, ModelError> {
        let (sizes, rates) = (&config.head, config.dropout);
        let norm = LayerNorm::load(source, &format!("{HEAD}.{NORM}"), sizes.context)?;
        let all =
            blocks(sizes, rates).map(|(at, shape)| Block::load(source, BlockShape { at: &at, ..shape }));
        let mut on_hidden = all.collect::<Result<Vec<_>, _>>()?;
        let on_actions = on_hidden.split_off(sizes.vl_layers);
        Ok(Self { norm, on_hidden, on_actions, ends: Ends::load(source, sizes, rates.state)? })
    }

    /// Predicts velocities, `[b * c, action]`, from hidden states `[b * s, context]`.
    pub fn forward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        hidden: Input<B>,
        given: &HeadInputs<'_, B>,
    ) -> (Tensor<B, 2>, HeadTrace<'a, B>) {
        let (rows, dropout) = (&given.rows, given.dropout);
        let below = hidden.tracked;
        let norm = RecordedSegment::run(&NormSegment(&self.norm), trainables, vec![hidden]);
        let normed = Input { value: norm.output(), tracked: below || self.norm.trains() };
        let of_hidden = rows.dropout.as_ref().map(|[hidden, _]| hidden.clone());
        let tower = self.tower(&self.on_hidden, trainables, retention, vec![], rows);
        let tower = Tower { dropout: of_hidden, ..tower };
        let tracked = normed.tracked || tower.layers.iter().any(|layer| layer.trains);
        let Ok((value, trace)) = tower.forward(normed.value, normed.tracked);
        let (on_hidden, hidden) = ((tower, trace), Input { value, tracked });
        let time = RecordedSegment::run(&self.time(given), trainables, vec![]);
        let tokens = RecordedSegment::run(&self.tokens(given), trainables, vec![]);
        let told = Input { value: time.output(), tracked: self.ends.time_trains() };
        let x = Input { value: tokens.output(), tracked: self.ends.tokens_train() };
        let tower = self.tower(&self.on_actions, trainables, retention, vec![told.clone(), hidden], rows);
        let tower = Tower { dropout: dropout.map(|rows| rows.tokens.clone()), ..tower };
        let tracked = x.tracked || tower.layers.iter().any(|layer| layer.trains);
        let Ok((value, trace)) = tower.forward(x.value, x.tracked);
        let inputs = vec![Input { value, tracked }, told];
        let velocity = RecordedSegment::run(&self.velocity(rows), trainables, inputs);
        let predicted = velocity.output();
        (predicted, HeadTrace { norm, on_hidden, time, tokens, on_actions: (tower, trace), velocity })
    }

    /// Carries the gradient of velocities back; that of the hidden states, if it is wanted.
    pub fn backward(
        trace: HeadTrace<'_, B>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) -> Option<Tensor<B, 2>> {
        let HeadTrace { norm, on_hidden, time, tokens, on_actions: (tower, trace), velocity } = trace;
        let mut of_velocity = velocity.backward(dv_nc, grads).into_iter();
        let (dx_nd, mut dtime) = (of_velocity.next().flatten(), of_velocity.next().flatten());
        let mut dhidden = None;
        if let Some(dx_nd) = dx_nd {
            let Ok(TowerGradient { input, sides }) = tower.backward(trace, dx_nd, grads);
            let mut sides = sides.into_iter();
            dtime = sum(dtime, sides.next().flatten());
            dhidden = sides.next().flatten();
            if let Some(dx_nd) = input {
                tokens.backward(dx_nd, grads);
            }
        }
        if let Some(dtime_bd) = dtime {
            time.backward(dtime_bd, grads);
        }
        let (tower, trace) = on_hidden;
        let Ok(TowerGradient { input, .. }) = tower.backward(trace, dhidden?, grads);
        norm.backward(input?, grads).into_iter().next().flatten()
    }

    /// Runs what does not depend on actions and their time.
    pub fn prepare<'a>(
        &'a self,
        params: &ParamScope<'_, B>,
        hidden_nd: Tensor<B, 2>,
        rows: Arc<BlockRows<B>>,
    ) -> PreparedHead<'a, B> {
        let mut x_nd = self.norm.apply(params, hidden_nd);
        for block in &self.on_hidden {
            x_nd = block.mlp(params, block.attend(params, &rows, x_nd, None, None));
        }
        let of = |block: &Block<B>| block.is_cross().then(|| block.project(params, &rows, &x_nd));
        let projected = self.on_actions.iter().map(of).collect();
        PreparedHead { head: self, rows, projected }
    }

    fn tower<'a>(
        &'a self,
        blocks: &'a [Block<B>],
        trainables: &'a Trainables<B>,
        retention: Retention,
        sides: Vec<Input<B>>,
        rows: &Arc<BlockRows<B>>,
    ) -> BlockTower<'a, B> {
        let below = sides.iter().any(|side| side.tracked);
        let layer =
            |block: &'a Block<B>| HeadLayer { block, rows: rows.clone(), trains: below || block.trains() };
        let layers = blocks.iter().map(layer).collect();
        Tower { layers, trainables, retention, sides, dropout: None }
    }

    fn time<'g>(&'g self, given: &HeadInputs<'g, B>) -> TimeSegment<'g, B> {
        TimeSegment { ends: &self.ends, times: given.draws.times, device: given.device }
    }

    fn tokens<'g>(&'g self, given: &HeadInputs<'g, B>) -> TokenSegment<'g, B> {
        let HeadInputs { state, draws, dropout, device, .. } = *given;
        TokenSegment { ends: &self.ends, state, draws, dropout: dropout.map(|rows| &rows.states), device }
    }

    fn velocity(&self, rows: &Arc<BlockRows<B>>) -> VelocitySegment<'_, B> {
        VelocitySegment { ends: &self.ends, rows: rows.clone() }
    }
}

impl<B: Tape<Base = B>> PreparedHead<'_, B> {
    /// Velocities, `[b * c, action]`, without a tape.
    pub fn velocity(&self, params: &ParamScope<'_, B>, given: &HeadInputs<'_, B>) -> Tensor<B, 2> {
        let Self { head, rows, projected } = self;
        let time_bd = head.time(given).run(params, &[]);
        let mut x_nd = head.tokens(given).run(params, &[]);
        for (block, projected) in head.on_actions.iter().zip(projected) {
            x_nd = block.mlp(params, block.attend(params, rows, x_nd, Some(&time_bd), projected.clone()));
        }
        head.velocity(rows).run(params, &[x_nd, time_bd])
    }
}

/// The norm on hidden states.
struct NormSegment<'a, B: ModelBackend>(&'a LayerNorm<B>);

impl<B: Tape<Base = B>> Segment<B> for NormSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.apply(params, inputs[0].clone())
    }
}

fn sum<B: ModelBackend>(one: Option<Tensor<B, 2>>, other: Option<Tensor<B, 2>>) -> Option<Tensor<B, 2>> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one + other),
        (one, other) => one.or(other),
    }
}
