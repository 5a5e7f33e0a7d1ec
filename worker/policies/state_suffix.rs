//! The suffix of policies whose state is a token before the actions: SmolVLA's and pi0's.

use burn::tensor::Tensor;
use coxswain_models::{
    joint::{JointOutline, LayerKind, LayerSource, StreamLayer, StreamShape},
    pretrained::error::ModelError,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    params::{BaseWeight, ParamScope},
};

use crate::{
    dropped::SuffixRows,
    features::PolicyFeatures,
    masks::StateMasks,
    policy::PolicySizes,
    prefix::Prefix,
    projections::Projections,
    rotary::Rotary,
    state_layer::{StateContext, StateLayer},
    suffix::{Inputs, LayerPlace, Suffix},
};

/// What such policies differ in.
#[derive(Clone, Debug)]
pub(crate) struct StateForm {
    pub features: PolicyFeatures,
    /// Where the expert is in the file.
    pub expert: &'static str,
    pub kind: LayerKind,
    /// Whether the state's token goes through the language model's layers, or through the expert's.
    pub state_in_vlm: bool,
    /// Every so many layers, from the first on, actions attend jointly; they never do if 0.
    pub joint_every: usize,
    /// Whether an action sees those up to itself, or all.
    pub causal: bool,
    /// Whether embeddings and features are multiplied by the root of their width.
    pub scaled: bool,
    /// Shortest and longest period of the time's sinusoids.
    pub periods: [f64; 2],
}

/// Whether the layer of this number attends jointly, of which every so many do.
pub(crate) fn is_joint(every: usize, layer: usize) -> bool {
    every > 0 && layer.is_multiple_of(every)
}

/// The expert and its projections.
pub(crate) struct StateSuffix<B: ModelBackend> {
    form: StateForm,
    layers: Vec<StreamLayer<B>>,
    projections: Projections<B>,
    norm_d: BaseWeight<B, 1>,
    vlm: StreamShape,
}

impl<B: ModelBackend> StateSuffix<B> {
    /// Loads it beside such a model; `shape`: sizes of a layer by its number.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        form: StateForm,
        vlm: &JointOutline,
        shape: impl Fn(usize) -> StreamShape,
    ) -> Result<Self, ModelError> {
        let expert = form.expert;
        let layers = (0..vlm.layers).map(|number| {
            StreamLayer::load(source, &format!("{expert}.layers.{number}"), shape(number), form.kind)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let e = shape(0).width;
        let d = if form.state_in_vlm { vlm.layer.width } else { e };
        let projections = Projections::load(source, form.features.padded, [d, e], form.periods)?;
        let norm_d = source.gain(&format!("{expert}.norm.weight"), e)?;
        Ok(Self { form, layers, projections, norm_d, vlm: vlm.layer })
    }
}

impl<B: Tape<Base = B>> StateSuffix<B> {
    fn layer<'a>(&'a self, at: &LayerPlace<'a, B, StateContext<B>>) -> StateLayer<'a, B> {
        let expert = &self.layers[at.number];
        let state = if self.form.state_in_vlm { &at.vlm.layers()[at.number] } else { expert };
        StateLayer { state, expert, joint: is_joint(self.form.joint_every, at.number), last: at.last }
    }
}

impl<B: Tape<Base = B>> Suffix<B> for StateSuffix<B> {
    type Context = StateContext<B>;

    const LEAD_IS_FIXED: bool = true;

    fn sizes(&self) -> PolicySizes<'_> {
        self.form.features.sizes()
    }

    fn width(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.shape.width)
    }

    fn prefix_scale(&self, width: usize) -> f32 {
        if self.form.scaled { (width as f32).sqrt() } else { 1.0 }
    }

    fn context(&self, prefix: &Prefix<'_, B>, device: &B::Device) -> StateContext<B> {
        let (batch, chunk) = (prefix.valid.len(), self.form.features.chunk);
        let lengths: Vec<u32> = prefix.valid.iter().map(|row| row.len() as u32).collect();
        let behind = lengths.iter().flat_map(|length| (1..=chunk as u32).map(move |place| length + place));
        let alone = (0..batch).flat_map(|_| 0..chunk as u32);
        let rotary = |positions: Vec<u32>| Rotary::new(&positions, batch, self.vlm.head_dim, device);
        StateContext {
            batch,
            behind: rotary(behind.collect()),
            alone: rotary(alone.collect()),
            state: rotary(lengths),
            masks: StateMasks::new(&prefix.valid, [prefix.seq, chunk], self.form.causal, device),
        }
    }

    fn lead<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2> {
        self.projections.state(params, given)
    }

    fn actions<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, given: Inputs<'_, B>) -> Tensor<T, 2> {
        self.projections.actions(params, given)
    }

    fn read<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, StateContext<B>>,
        s_bd: Tensor<T, 2>,
        known: [Tensor<T, 2>; 2],
    ) -> (Option<Tensor<T, 2>>, [Tensor<T, 4>; 2]) {
        let (layer, rows) = (self.layer(at), at.rows);
        let (next, keys_values) =
            params.reading(rows.map(|rows| &rows.state), || layer.state(params, at.context, known, s_bd));
        (next, params.reading(rows.map(|rows| &rows.known), || layer.keys_values(params, keys_values)))
    }

    fn act<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &LayerPlace<'_, B, StateContext<B>>,
        _state: &Tensor<T, 2>,
        read: [Tensor<T, 4>; 2],
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        self.layer(at).actions(params, at.context, read, a_ne)
    }

    fn velocity<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        _rows: Option<&SuffixRows<B>>,
        _state: Option<Tensor<T, 2>>,
        a_ne: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let normed_ne = self.form.kind.normed(a_ne, self.norm_d.on_tape(params), self.vlm.eps);
        self.projections.velocity(params, normed_ne)
    }
}
