//! A SmolVLA policy on a device: read from its directory, run forward and back, and asked for velocities.

use std::{cell::Cell, sync::Arc};

use burn::tensor::Tensor;
use coxswain_models::{
    Shelf,
    joint::{JointModel, LayerKind, StreamLayer},
    pretrained::{
        adapters::TunedModules,
        blocks::BlockWeights,
        checkpoint::Checkpoint,
        error::{ModelError, TokenError},
        loader::{Loader, check_dtype},
    },
};
use coxswain_nn::{
    kernels::{Tape, precision},
    memory,
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
};

use super::{
    config::SmolVlaConfig,
    ends::{ActionSegment, Ends, StateSegment, VelocitySegment},
    layer::{LayerSegment, PairedLayer, Suffix},
    masks::Masks,
    names::{EXPERT_AT, RULES, is_reached},
    tuning,
};
use crate::{
    batch::{Draws, PolicyObservation, Training},
    dropped::{SampleRows, SuffixRows},
    kept::{KeptSegment, recorded},
    policy::{BackwardPass, Policy, PolicyFiles, PolicySizes, Velocity},
    prefix::{Prefix, PrefixPass},
    rotary::{Rotary, placed},
    sinusoids::sinusoids,
    source::ExpertSource,
};

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
pub struct SmolVla<B: Tape<Base = B>> {
    /// Its configuration.
    pub config: SmolVlaConfig,
    vlm: Box<dyn JointModel<B>>,
    expert: Vec<StreamLayer<B>>,
    ends: Ends<B>,
    device: B::Device,
}

/// What a forward pass kept.
pub struct Trace<'a, 'o, B: Tape<Base = B>> {
    pass: PrefixPass<'a, 'o, B>,
    prefix: Prefix<'a, B>,
    suffix: Suffix<B>,
    state: RecordedSegment<'a, B>,
    actions: RecordedSegment<'a, B>,
    layers: Vec<KeptSegment<'a, B>>,
    velocity: RecordedSegment<'a, B>,
}

impl<B: Tape<Base = B>> SmolVla<B> {
    /// Reads a policy. What trains of it is registered in `layout`: what is in full under the file's names,
    /// adapters under PEFT's.
    pub fn load(
        files: PolicyFiles<'_>,
        tuned: &TunedModules,
        models: Shelf<B>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let PolicyFiles { directory, backbone, dtype } = files;
        let config = SmolVlaConfig::of(directory)?;
        let family = models.joint.of(backbone)?;
        let within = config.within();
        let dir = &directory.dir;
        let checkpoint = &Arc::new(Checkpoint::open_for(dir, RULES, B::VALUES)?);
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            precision::follow(dtype.dense());
        }
        let inner = tuning::expert_inner(dir);
        let (trains, in_flight, blocks) = (tuned.trains(), Cell::default(), BlockWeights::Held);
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight };
        let vlm = family.load(backbone, within, &mut loader)?;
        let shape = vlm.outline().layer;
        let mut source = ExpertSource { loader: &mut loader, full: &tuned.full };
        let expert = (0..vlm.outline().layers).map(|number| {
            let at = format!("{EXPERT_AT}.layers.{number}");
            StreamLayer::load(&mut source, &at, config.expert(&shape, number, inner), LayerKind::Llama)
        });
        let expert = expert.collect::<Result<Vec<_>, _>>()?;
        let e = config.expert(&shape, 0, inner).width;
        let ends = Ends::load(&mut source, &config, [shape.width, e], shape.eps)?;
        // An adapter that nothing reads, as PEFT has it on the last layer, stays what it is.
        layout.without_decay(|name| !is_reached(name, vlm.outline().layers));
        Ok(Self { config, vlm, expert, ends, device: device.clone() })
    }

    /// Predicts velocities, `[b * chunk, padded]`, keeping what `training` says for one backward pass.
    pub fn forward<'a, 'o>(
        &'a self,
        trainables: &'a Trainables<B>,
        training: Training<'_>,
        observed: PolicyObservation<'o>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, Trace<'a, 'o, B>), TokenError> {
        let Training { recompute, dropout } = training;
        let rows =
            dropout.map(|keys| SampleRows::new(keys, observed.prompts, self.config.chunk, &self.device));
        let (of_prefix, of_suffix) = rows.map(|rows| (rows.tokens, rows.suffix)).unzip();
        let pass = PrefixPass { dropout: of_prefix, ..self.prefix(trainables, observed) };
        let prefix = pass.forward(recompute)?;
        let suffix = self.suffix(&prefix, of_suffix);
        let [of_state, of_actions] = suffix.rows();
        let state = recorded(&self.state_segment(observed), trainables, vec![], of_state);
        let actions = recorded(&self.action_segment(&suffix, draws), trainables, vec![], of_actions.clone());
        let rows = |x: Tensor<B, 2>| {
            let values = x.shape().num_elements() / suffix.batch;
            x.reshape([suffix.batch, values])
        };
        let mut x = Tensor::cat(vec![state.output(), rows(actions.output())], 1);
        let mut layers = Vec::with_capacity(self.expert.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            memory::check();
            let segment = LayerSegment { layer: self.layer(number), suffix: &suffix };
            let tracked = prefix.trains(number);
            let known = known.clone().map(|value| Input { value, tracked });
            let inputs = std::iter::once(Input::tracked(x)).chain(known).collect();
            let (out, kept) = KeptSegment::run(&segment, trainables, recompute, inputs, of_actions.clone());
            x = out;
            layers.push(kept);
        }
        let x = x.reshape([suffix.batch * suffix.chunk, self.expert_width()]);
        let velocity =
            recorded(&VelocitySegment(&self.ends), trainables, vec![Input::tracked(x)], of_actions);
        Ok((velocity.output(), Trace { pass, prefix, suffix, state, actions, layers, velocity }))
    }

    /// Carries the gradient of the velocities back; parameter gradients are added to `grads`.
    pub fn backward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        trace: Trace<'a, '_, B>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        let Trace { pass, mut prefix, suffix, state, actions, layers, velocity } = trace;
        let Some(dx) = velocity.backward(dv_nc, grads).into_iter().next().flatten() else { return };
        let (b, c, e, d) = (suffix.batch, suffix.chunk, self.expert_width(), self.vlm.outline().layer.width);
        let mut dx = dx.reshape([b, c * e]);
        let mut dprefix = None;
        for (number, kept) in layers.into_iter().enumerate().rev() {
            memory::check();
            let segment = LayerSegment { layer: self.layer(number), suffix: &suffix };
            let graph = kept.again(&segment, trainables, suffix.rows()[1].clone());
            let mut gradients = graph.backward(dx, grads).into_iter();
            let Some(below) = gradients.next().flatten() else { return };
            dx = below;
            if prefix.trains(number) {
                let known = gradients.flatten().collect();
                dprefix = pass.backward(&mut prefix, dprefix, known, grads);
            }
        }
        if self.ends.state_trains() {
            state.backward(dx.clone().narrow(1, 0, d), grads);
        }
        actions.backward(dx.narrow(1, d, c * e).reshape([b * c, e]), grads);
        if let Some(dprefix) = dprefix {
            pass.backward_of_embedding(prefix, dprefix, grads);
        }
    }

    /// A function that predicts velocities without a tape, for sampling: prefix and state are run here,
    /// once.
    pub fn velocity<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<impl Fn(Draws<'_>) -> Tensor<B, 2> + 'a, TokenError> {
        let prefix = self.prefix(trainables, observed).run()?;
        let suffix = self.suffix(&prefix, None);
        let params = ParamScope::<B>::frozen(trainables);
        let mut s_bd = Some(self.state_segment(observed).run(&params, &[]));
        let mut read = Vec::with_capacity(self.expert.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            let Some(state) = s_bd.take() else { break };
            let layer = self.layer(number);
            let (next, keys_values) = layer.state(&params, &suffix, known.clone(), state);
            read.push(layer.read(&params, keys_values));
            s_bd = next;
        }
        Ok(move |draws: Draws<'_>| {
            let params = ParamScope::<B>::frozen(trainables);
            let a_ne = self.action_segment(&suffix, draws).run(&params, &[]);
            let a_ne = read.iter().enumerate().fold(a_ne, |a_ne, (number, read)| {
                self.layer(number).actions(&params, &suffix, read.clone(), a_ne)
            });
            VelocitySegment(&self.ends).run(&params, &[a_ne])
        })
    }

    fn layer(&self, number: usize) -> PairedLayer<'_, B> {
        PairedLayer {
            vlm: &self.vlm.layers()[number],
            expert: &self.expert[number],
            joint: self.config.is_joint(number),
            last: number + 1 == self.expert.len(),
        }
    }

    fn expert_width(&self) -> usize {
        self.expert.first().map_or(0, |layer| layer.shape.width)
    }

    fn prefix<'a, 'o>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'o>,
    ) -> PrefixPass<'a, 'o, B> {
        let scale = (self.vlm.outline().layer.width as f32).sqrt();
        PrefixPass { model: &*self.vlm, trainables, observed, device: &self.device, scale, dropout: None }
    }

    fn suffix(&self, prefix: &Prefix<'_, B>, dropout: Option<SuffixRows<B>>) -> Suffix<B> {
        let (batch, chunk, device) = (prefix.valid.len(), self.config.chunk, &self.device);
        let head_dim = self.vlm.outline().layer.head_dim;
        let lengths: Vec<u32> = prefix.valid.iter().map(|row| row.len() as u32).collect();
        let behind = lengths.iter().flat_map(|length| (1..=chunk as u32).map(move |place| length + place));
        let alone = (0..batch).flat_map(|_| 0..chunk as u32);
        let rotary = |positions: Vec<u32>| Rotary::new(&positions, batch, head_dim, device);
        Suffix {
            batch,
            chunk,
            behind: rotary(behind.collect()),
            alone: rotary(alone.collect()),
            state: rotary(lengths),
            masks: Masks::new(&prefix.valid, prefix.seq, chunk, device),
            dropout,
        }
    }

    fn state_segment(&self, observed: PolicyObservation<'_>) -> StateSegment<'_, B> {
        let width = self.config.padded[0];
        let shape = [observed.state.len() / width, width];
        StateSegment { ends: &self.ends, state_bc: placed(observed.state.to_vec(), shape, &self.device) }
    }

    fn action_segment(&self, suffix: &Suffix<B>, draws: Draws<'_>) -> ActionSegment<'_, B> {
        let (rows, e) = (suffix.batch * suffix.chunk, self.expert_width());
        let row = |time: &f32| sinusoids(*time, e, self.config.periods).repeat(suffix.chunk);
        ActionSegment {
            ends: &self.ends,
            noisy_nc: placed(draws.noisy.to_vec(), [rows, self.config.padded[1]], &self.device),
            sinusoids_ne: placed(draws.times.iter().flat_map(row).collect(), [rows, e], &self.device),
        }
    }
}

impl<B: Tape<Base = B>> Policy<B> for SmolVla<B> {
    fn sizes(&self) -> PolicySizes<'_> {
        self.config.sizes()
    }

    fn forward_kept<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        training: Training<'_>,
        observed: PolicyObservation<'a>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, BackwardPass<'a, B>), TokenError> {
        let (velocity, trace) = self.forward(trainables, training, observed, draws)?;
        Ok((velocity, Box::new(move |dv_nc, grads| self.backward(trainables, trace, dv_nc, grads))))
    }

    fn feature_width(&self) -> usize {
        self.vlm.outline().layer.width
    }

    fn image_features(
        &self,
        trainables: &Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Tensor<B, 2>, TokenError> {
        self.prefix(trainables, observed).image_features()
    }

    fn sampler<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Velocity<'a, B>, TokenError> {
        Ok(Box::new(self.velocity(trainables, observed)?))
    }
}
