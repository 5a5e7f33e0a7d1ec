//! A pi0.5 policy on a device: read from its directory, run forward and back, and asked for velocities.

use std::{cell::Cell, sync::Arc};

use burn::tensor::Tensor;
use coxswain_models::{
    Shelf,
    joint::JointModel,
    pretrained::{
        adapters::TunedModules,
        blocks::BlockWeights,
        checkpoint::Checkpoint,
        error::{ModelError, TokenError},
        loader::{Loader, check_dtype},
    },
};
use coxswain_nn::{
    kernels::{DropoutRows, Tape, precision},
    memory,
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
};

use super::{
    config::Pi05Config,
    ends::{ActionTokens, Projections, TimeSegment, TimedVelocity},
    layer::{ActionContext, ExpertLayer, ExpertSegment},
    names::{EXPERT_AT, RULES, is_reached},
};
use crate::{
    batch::{Draws, PolicyObservation, Training},
    dropped::{SampleRows, SuffixRows},
    kept::{KeptSegment, recorded},
    policy::{BackwardPass, Policy, PolicyFiles, PolicySizes, Velocity},
    prefix::{Prefix, PrefixPass},
    rotary::{Rotary, key_mask, placed},
    sinusoids::sinusoids,
    source::ExpertSource,
};

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
pub struct Pi05<B: Tape<Base = B>> {
    config: Pi05Config,
    vlm: Box<dyn JointModel<B>>,
    expert: Vec<ExpertLayer<B>>,
    ends: Projections<B>,
    device: B::Device,
}

/// What a forward pass kept.
struct PassTrace<'a, B: Tape<Base = B>> {
    pass: PrefixPass<'a, 'a, B>,
    prefix: Prefix<'a, B>,
    context: ActionContext<B>,
    time: RecordedSegment<'a, B>,
    actions: RecordedSegment<'a, B>,
    layers: Vec<KeptSegment<'a, B>>,
    velocity: RecordedSegment<'a, B>,
}

impl<B: Tape<Base = B>> Pi05<B> {
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
        let config = Pi05Config::of(directory)?;
        let checkpoint = &Arc::new(Checkpoint::open_for(&directory.dir, RULES, B::VALUES)?);
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            precision::follow(dtype.dense());
        }
        let (trains, in_flight, blocks) = (tuned.trains(), Cell::default(), BlockWeights::Held);
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight };
        let vlm = models.joint.of(backbone)?.load(backbone, Pi05Config::within(), &mut loader)?;
        let shape = config.expert(&vlm.outline().layer);
        let mut source = ExpertSource { loader: &mut loader, full: &tuned.full };
        let layer = |number| ExpertLayer::load(&mut source, &format!("{EXPERT_AT}.layers.{number}"), shape);
        let expert = (0..vlm.outline().layers).map(layer).collect::<Result<_, _>>()?;
        let ends = Projections::load(&mut source, &config, shape.width, shape.eps)?;
        // An adapter that nothing reads, as PEFT has it on the last layer, stays what it is.
        layout.without_decay(|name| !is_reached(name, vlm.outline().layers));
        Ok(Self { config, vlm, expert, ends, device: device.clone() })
    }

    fn prefix<'a, 'o>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'o>,
        dropout: Option<DropoutRows<B>>,
    ) -> PrefixPass<'a, 'o, B> {
        PrefixPass { model: &*self.vlm, trainables, observed, device: &self.device, scale: 1.0, dropout }
    }

    fn context(&self, prefix: &Prefix<'_, B>, dropout: Option<SuffixRows<B>>) -> ActionContext<B> {
        let (batch, chunk) = (prefix.valid.len(), self.chunk());
        let lengths = prefix.valid.iter().map(|row| row.len() as u32);
        let positions: Vec<u32> =
            lengths.flat_map(|length| (0..chunk as u32).map(move |place| length + place)).collect();
        ActionContext {
            batch,
            rotary: Rotary::new(&positions, batch, self.vlm.outline().layer.head_dim, &self.device),
            mask: key_mask(&prefix.valid, [prefix.seq, chunk], &self.device),
            dropout,
        }
    }

    fn chunk(&self) -> usize {
        self.config.sizes().chunk
    }

    fn time_segment(&self, draws: Draws<'_>) -> TimeSegment<'_, B> {
        let e = self.config.expert(&self.vlm.outline().layer).width;
        let rows = draws.times.iter().flat_map(|time| sinusoids(*time, e, self.config.periods)).collect();
        TimeSegment { ends: &self.ends, sinusoids_be: placed(rows, [draws.times.len(), e], &self.device) }
    }

    fn action_segment(&self, draws: Draws<'_>) -> ActionTokens<'_, B> {
        let PolicySizes { chunk, padded: [_, width], .. } = self.config.sizes();
        let shape = [draws.times.len() * chunk, width];
        ActionTokens { ends: &self.ends, noisy_nc: placed(draws.noisy.to_vec(), shape, &self.device) }
    }

    fn layer<'a>(&'a self, number: usize, context: &'a ActionContext<B>) -> ExpertSegment<'a, B> {
        ExpertSegment { layer: &self.expert[number], context }
    }

    fn velocity_segment<'a>(&'a self, context: &'a ActionContext<B>) -> TimedVelocity<'a, B> {
        TimedVelocity { ends: &self.ends, dropout: context.dropout.as_ref().map(|rows| &rows.state) }
    }

    /// Carries the gradient of the velocities back; parameter gradients are added to `grads`.
    fn backward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        trace: PassTrace<'a, B>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        let PassTrace { pass, mut prefix, context, time, actions, layers, velocity } = trace;
        let mut gradients = velocity.backward(dv_nc, grads).into_iter();
        let (Some(mut dx), mut dtime) = (gradients.next().flatten(), gradients.next().flatten()) else {
            return;
        };
        let rows = context.dropout.as_ref().map(|rows| &rows.actions);
        let mut dprefix = None;
        for (number, kept) in layers.into_iter().enumerate().rev() {
            memory::check();
            let graph = kept.again(&self.layer(number, &context), trainables, rows.cloned());
            let mut gradients = graph.backward(dx, grads);
            let told = gradients.pop().flatten();
            dtime = match (dtime, told) {
                (Some(dtime), Some(told)) => Some(dtime + told),
                (one, other) => one.or(other),
            };
            let mut gradients = gradients.into_iter();
            let Some(below) = gradients.next().flatten() else { return };
            dx = below;
            if prefix.trains(number) {
                dprefix = pass.backward(&mut prefix, dprefix, gradients.flatten().collect(), grads);
            }
        }
        actions.backward(dx, grads);
        if let Some(dtime) = dtime {
            time.backward(dtime, grads);
        }
        if let Some(dprefix) = dprefix {
            pass.backward_of_embedding(prefix, dprefix, grads);
        }
    }
}

impl<B: Tape<Base = B>> Policy<B> for Pi05<B> {
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
        let Training { recompute, dropout } = training;
        let rows = dropout.map(|keys| SampleRows::new(keys, observed.prompts, self.chunk(), &self.device));
        let (of_prefix, of_context) = rows.map(|rows| (rows.tokens, rows.suffix)).unzip();
        let pass = self.prefix(trainables, observed, of_prefix);
        let prefix = pass.forward(recompute)?;
        let context = self.context(&prefix, of_context);
        let rows = context.dropout.as_ref();
        let (of_time, of_actions) = rows.map(|rows| (rows.state.clone(), rows.actions.clone())).unzip();
        let time = recorded(&self.time_segment(draws), trainables, vec![], of_time);
        let actions = recorded(&self.action_segment(draws), trainables, vec![], of_actions.clone());
        let (mut x, told) = (actions.output(), Input::tracked(time.output()));
        let mut layers = Vec::with_capacity(self.expert.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            memory::check();
            let tracked = prefix.trains(number);
            let [k, v] = known.clone().map(|value| Input { value, tracked });
            let inputs = vec![Input::tracked(x), k, v, told.clone()];
            let segment = self.layer(number, &context);
            let (out, kept) = KeptSegment::run(&segment, trainables, recompute, inputs, of_actions.clone());
            x = out;
            layers.push(kept);
        }
        let inputs = vec![Input::tracked(x), told];
        let velocity = recorded(&self.velocity_segment(&context), trainables, inputs, of_actions);
        let trace = PassTrace { pass, prefix, context, time, actions, layers, velocity };
        let predicted = trace.velocity.output();
        Ok((predicted, Box::new(move |dv_nc, grads| self.backward(trainables, trace, dv_nc, grads))))
    }

    fn feature_width(&self) -> usize {
        self.vlm.outline().layer.width
    }

    fn image_features(
        &self,
        trainables: &Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Tensor<B, 2>, TokenError> {
        self.prefix(trainables, observed, None).image_features()
    }

    fn sampler<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Velocity<'a, B>, TokenError> {
        let prefix = self.prefix(trainables, observed, None).run()?;
        let context = self.context(&prefix, None);
        let known = prefix.layers;
        Ok(Box::new(move |draws: Draws<'_>| {
            let params = ParamScope::<B>::frozen(trainables);
            let time = self.time_segment(draws).run(&params, &[]);
            let x = self.action_segment(draws).run(&params, &[]);
            let x =
                self.expert.iter().zip(&known).fold(x, |x, (layer, known)| {
                    layer.run(&params, &context, known.clone(), [x, time.clone()])
                });
            self.velocity_segment(&context).run(&params, &[x, time])
        }))
    }
}
