//! A policy on a device: read from its directory, run forward and back, and asked for velocities. How it
//! goes on behind the prefix is its [`Suffix`]'s.

use std::{cell::Cell, sync::Arc};

use burn::tensor::Tensor;
use coxswain_models::{
    Shelf,
    joint::{JointModel, JointOutline},
    pretrained::{
        adapters::TunedModules,
        blocks::BlockWeights,
        checkpoint::Checkpoint,
        error::ModelError,
        loader::{Loader, check_dtype},
        location::FileLocation,
        rules::Rules,
    },
    vision_language::PassError,
};
use coxswain_nn::{
    kernels::{DropoutRows, Tape, precision},
    memory,
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment},
};

use crate::{
    batch::{Draws, PolicyObservation, Training},
    dropped::{SampleRows, SuffixRows},
    kept::{KeptSegment, recorded},
    kept_tokens::KeptTokens,
    policy::{BackwardPass, Policy, PolicyFiles, PolicySizes, Velocity},
    prefix::{Prefix, PrefixPass},
    source::ExpertSource,
    suffix::{Inputs, LayerPlace, Suffix, SuffixPart, SuffixSegment, in_rows},
};

/// Where a policy comes from, and where it goes to.
pub(crate) struct PolicyLoad<'l, B: Tape<Base = B>> {
    pub files: PolicyFiles<'l>,
    pub tuned: &'l TunedModules,
    pub models: Shelf<B>,
    /// What trains is registered here: what is in full under the file's names, adapters under PEFT's.
    pub layout: &'l mut TrainableLayout,
    pub device: &'l B::Device,
}

/// What is a kind's own of how its file is read.
#[derive(Clone, Copy)]
pub(crate) struct PolicyFile {
    pub rules: Rules,
    /// Where the vision-language model is in it.
    pub within: FileLocation<'static>,
    /// Whether anything reads what has this name, above so many decoder layers.
    pub reached: fn(&str, usize) -> bool,
}

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
pub(crate) struct PolicyNetwork<B: Tape<Base = B>, S> {
    vlm: Box<dyn JointModel<B>>,
    suffix: S,
    device: B::Device,
}

/// What a forward pass kept.
struct PassTrace<'a, B: Tape<Base = B>, C> {
    pass: PrefixPass<'a, 'a, B>,
    prefix: Prefix<'a, B>,
    context: C,
    rows: Option<SuffixRows<B>>,
    lead: RecordedSegment<'a, B>,
    actions: RecordedSegment<'a, B>,
    layers: Vec<KeptSegment<'a, B>>,
    velocity: RecordedSegment<'a, B>,
}

/// What leads before each layer with what actions read there, and what leads behind the last.
struct LeadReads<B: Tape<Base = B>> {
    layers: Vec<(Tensor<B, 2>, [Tensor<B, 4>; 2])>,
    lead: Option<Tensor<B, 2>>,
}

impl<B: Tape<Base = B>, S: Suffix<B>> PolicyNetwork<B, S> {
    /// Reads a policy whose suffix is read by `suffix` beside a model of such an outline.
    pub fn load(
        job: PolicyLoad<'_, B>,
        file: PolicyFile,
        suffix: impl FnOnce(&mut ExpertSource<'_, '_, B>, &JointOutline) -> Result<S, ModelError>,
    ) -> Result<Self, ModelError> {
        let PolicyLoad { files: PolicyFiles { directory, backbone, dtype }, tuned, models, layout, device } =
            job;
        let PolicyFile { rules, within, reached } = file;
        let checkpoint = &Arc::new(Checkpoint::open_for(&directory.dir, rules, B::VALUES)?);
        if B::VALUES {
            check_dtype::<B>(dtype)?;
        }
        precision::follow(dtype.dense());
        let (trains, in_flight, blocks) = (tuned.trains(), Cell::default(), BlockWeights::Held);
        let mut loader =
            Loader { checkpoint, dtype, blocks, trains, layout: &mut *layout, device, in_flight, within: "" };
        let vlm = models.joint.of(backbone)?.load(backbone, within, &mut loader)?;
        let suffix = suffix(&mut ExpertSource { loader: &mut loader, full: &tuned.full }, vlm.outline())?;
        // An adapter that nothing reads, as PEFT has it on the last layer, stays what it is.
        layout.without_decay(|name| !reached(name, vlm.outline().layers));
        Ok(Self { vlm, suffix, device: device.clone() })
    }

    fn prefix<'a, 'o>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'o>,
        dropout: Option<DropoutRows<B>>,
    ) -> PrefixPass<'a, 'o, B> {
        let scale = self.suffix.prefix_scale(self.vlm.outline().layer.width);
        PrefixPass { model: &*self.vlm, trainables, observed, device: &self.device, scale, dropout }
    }

    fn segment<'a>(&'a self, part: SuffixPart<'a, B, S::Context>) -> SuffixSegment<'a, B, S> {
        SuffixSegment { suffix: &self.suffix, part }
    }

    fn place<'a>(
        &'a self,
        number: usize,
        context: &'a S::Context,
        rows: Option<&'a SuffixRows<B>>,
    ) -> LayerPlace<'a, B, S::Context> {
        let last = number + 1 == self.vlm.outline().layers;
        LayerPlace { number, last, vlm: &*self.vlm, context, rows }
    }

    /// Carries the gradient of the velocities back; parameter gradients are added to `grads`.
    fn backward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        trace: PassTrace<'a, B, S::Context>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        let PassTrace { pass, mut prefix, context, rows, lead, actions, layers, velocity } = trace;
        let Some(mut dx_bw) = velocity.backward(dv_nc, grads).into_iter().next().flatten() else { return };
        let of_actions = rows.as_ref().map(|rows| &rows.actions);
        let mut dprefix = None;
        for (number, kept) in layers.into_iter().enumerate().rev() {
            memory::check();
            let segment = self.segment(SuffixPart::Layer(self.place(number, &context, rows.as_ref())));
            let graph = kept.again(&segment, trainables, of_actions.cloned());
            let mut gradients = graph.backward(dx_bw, grads).into_iter();
            let Some(below) = gradients.next().flatten() else { return };
            dx_bw = below;
            if prefix.trains(number) {
                dprefix = pass.backward(&mut prefix, dprefix, gradients.flatten().collect(), grads);
            }
        }
        let ([batch, width], e) = (dx_bw.dims(), self.suffix.width());
        let values = self.suffix.sizes().chunk * e;
        lead.backward(dx_bw.clone().narrow(1, 0, width - values), grads);
        let da_ne = dx_bw.narrow(1, width - values, values).reshape([batch * values / e, e]);
        actions.backward(da_ne, grads);
        if let Some(dprefix) = dprefix {
            pass.backward_of_embedding(prefix, dprefix, grads);
        }
    }

    /// What actions read, without a tape.
    fn reads(
        &self,
        params: &ParamScope<'_, B>,
        context: &S::Context,
        known: &[[Tensor<B, 2>; 2]],
        given: Inputs<'_, B>,
    ) -> LeadReads<B> {
        let mut lead = Some(self.suffix.lead(params, given));
        let mut layers = Vec::with_capacity(known.len());
        for (number, known) in known.iter().enumerate() {
            let Some(before) = lead.take() else { break };
            let at = self.place(number, context, None);
            let (next, read) = self.suffix.read(params, &at, before.clone(), known.clone());
            layers.push((before, read));
            lead = next;
        }
        LeadReads { layers, lead }
    }
}

impl<B: Tape<Base = B>, S: Suffix<B>> Policy<B> for PolicyNetwork<B, S> {
    fn sizes(&self) -> PolicySizes<'_> {
        self.suffix.sizes()
    }

    fn forward_kept<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        training: Training<'a>,
        observed: PolicyObservation<'a>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, BackwardPass<'a, B>), PassError> {
        let Training { recompute, dropout } = training;
        let chunk = self.suffix.sizes().chunk;
        let rows = dropout.map(|keys| SampleRows::new(keys, observed.prompts, chunk, &self.device));
        let (of_prefix, rows) = rows.map(|rows| (rows.tokens, rows.suffix)).unzip();
        let pass = self.prefix(trainables, observed, of_prefix);
        let prefix = pass.forward(recompute)?;
        let context = self.suffix.context(&prefix, &self.device);
        let given = Inputs { state: observed.state, draws, device: &self.device };
        let (of_lead, of_actions) =
            rows.as_ref().map(|rows: &SuffixRows<B>| (rows.state.clone(), rows.actions.clone())).unzip();
        let lead = recorded(&self.segment(SuffixPart::Lead(given)), trainables, vec![], of_lead);
        let segment = self.segment(SuffixPart::Actions(given));
        let actions = recorded(&segment, trainables, vec![], of_actions.clone());
        let mut x_bw = in_rows(Some(lead.output()), actions.output(), prefix.valid.len());
        let mut layers = Vec::with_capacity(prefix.layers.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            memory::check();
            let tracked = prefix.trains(number);
            let known = known.clone().map(|value| Input { value, tracked });
            let inputs = std::iter::once(Input::tracked(x_bw)).chain(known).collect();
            let segment = self.segment(SuffixPart::Layer(self.place(number, &context, rows.as_ref())));
            let (out, kept) = KeptSegment::run(&segment, trainables, recompute, inputs, of_actions.clone());
            x_bw = out;
            layers.push(kept);
        }
        let segment = self.segment(SuffixPart::Velocity(rows.as_ref()));
        let velocity = recorded(&segment, trainables, vec![Input::tracked(x_bw)], of_actions);
        let predicted = velocity.output();
        let trace = PassTrace { pass, prefix, context, rows, lead, actions, layers, velocity };
        Ok((predicted, Box::new(move |dv_nc, grads| self.backward(trainables, trace, dv_nc, grads))))
    }

    fn features(
        &self,
        trainables: &Trainables<B>,
        observed: PolicyObservation<'_>,
        kept: KeptTokens,
    ) -> Result<Tensor<B, 2>, PassError> {
        let pass = self.prefix(trainables, observed, None);
        Ok(if kept == KeptTokens::KeysValues { pass.keys_values()? } else { pass.image_features()? })
    }

    fn sampler<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Velocity<'a, B>, PassError> {
        let prefix = self.prefix(trainables, observed, None).run()?;
        let context = self.suffix.context(&prefix, &self.device);
        let (known, device, params) = (prefix.layers, &self.device, ParamScope::<B>::frozen(trainables));
        let before = Inputs { state: observed.state, draws: Draws { times: &[], noisy: &[] }, device };
        let fixed = S::LEAD_IS_FIXED.then(|| self.reads(&params, &context, &known, before));
        Ok(Box::new(move |draws: Draws<'_>| {
            let given = Inputs { state: &[], draws, device };
            let params = ParamScope::<B>::frozen(trainables);
            let of_draws;
            let LeadReads { layers, lead } = match &fixed {
                Some(fixed) => fixed,
                None => {
                    of_draws = self.reads(&params, &context, &known, given);
                    &of_draws
                }
            };
            let mut a_ne = self.suffix.actions(&params, given);
            for (number, (lead, read)) in layers.iter().enumerate() {
                let at = self.place(number, &context, None);
                a_ne = self.suffix.act(&params, &at, lead, read.clone(), a_ne);
            }
            self.suffix.velocity(&params, None, lead.clone(), a_ne)
        }))
    }
}
