//! What a policy does with a micro-batch: train on it, tell its loss, sample from it.

use burn::tensor::Tensor;
use coxswain_models::{pretrained::prompts::DropoutKeys, vision_language::VlPass};
use coxswain_nn::{
    kernels::{DropoutRows, Tape, dropout::row_word},
    params::{GradientSums, ParamScope, Trainables},
    recompute::{
        Retention,
        segment::{Input, RecordedSegment, Segment},
    },
    rng::{Key, Purpose},
};
use coxswain_proto::run_spec::Recompute;
use coxswain_task::{MicroLoss, Pass, StageClock};

use super::{
    error::{StepError, check_finite, failed},
    parts::{Policy, Settings, VlFeatures, download, keys_mask},
};
use crate::vla_flow::{
    data::MicroBatch,
    expert::{ActionExpert, Conditioning, Draws},
    flow::{self, CleanActions, FlowKeys, FlowLoss, Padding, SamplingStart},
    head::ActionHead,
    oft::{self, OftHead},
};

/// Sensor encoder, head and loss, as their time is shown.
const HEAD_STAGE: &str = "expert";

/// What a head is given in a training pass.
struct HeadPass<'p, B: Tape<Base = B>> {
    trainables: &'p Trainables<B>,
    batch: &'p MicroBatch,
    /// What is at each place that it reads, `[b * s, d]`.
    hidden: Vec<Input<B>>,
}

/// What it gives: the loss sum, and the gradients of what it was given, if they are wanted.
type HeadLoss<B> = (f64, Option<Vec<Tensor<B, 2>>>);

impl<B: Tape<Base = B>> Policy<B> {
    /// Runs one micro-batch and adds the gradient of its loss *sum* to `grads`.
    ///
    /// Noise and flow time depend on the run's seed, `batch.step`, and each sample's index, on nothing else.
    /// On an error `grads` may hold part of the micro-batch's gradient: zero it before the next attempt.
    pub fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, StepError> {
        if batch.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let pass = VlPass {
            prompts: batch.prompts(),
            kept: self.kept(batch)?,
            trainables,
            retention: self.settings.retention,
            dropout: self.dropout(batch),
        };
        let vl = self.model.run(pass).map_err(|broken| failed(batch, broken))?;
        let (read, vl_trace) =
            vl.forward(&self.reads, &mut |stage| clock.lap(stage)).map_err(|broken| failed(batch, broken))?;

        let tracked = vl_trace.trains();
        let hidden = read.into_iter().map(|value| Input { value, tracked }).collect();
        let pass = HeadPass { trainables, batch, hidden };
        let (loss_sum, of_hidden) = match &self.head {
            ActionHead::Flow(expert) => self.flow_pass(expert, pass, grads, clock)?,
            ActionHead::Oft(head) => self.oft_pass(head, pass, grads, clock)?,
        };
        if let Some(of_hidden) = of_hidden {
            vl_trace
                .backward(of_hidden, grads, &mut |stage| clock.lap(stage))
                .map_err(|broken| failed(batch, broken))?;
        }
        Ok(MicroLoss { loss_sum, valid: self.clean(batch).valid_count() })
    }

    /// A flow-matching expert's part of it, sensor encoder included.
    fn flow_pass(
        &self,
        expert: &ActionExpert,
        pass: HeadPass<'_, B>,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<HeadLoss<B>, StepError> {
        let HeadPass { trainables, batch, hidden } = pass;
        let clean = self.clean(batch);
        let noised = flow::noise(self.settings.convention, self.keys(batch), clean);
        let sensor = self.sensor.as_ref().map(|sensor| {
            RecordedSegment::run(&sensor.segment(&batch.sensor, &self.device), trainables, vec![])
        });
        let conditioning = Conditioning {
            batch: batch.len(),
            state_bc: self.state(expert, batch),
            sensor: sensor.as_ref().map(|recorded| Input::tracked(recorded.output())),
            hidden,
            mask: keys_mask(batch),
        };
        let draws = Draws { times: &noised.times, noisy_nc: self.upload(&noised.noisy, self.dims.action) };
        let dropped = self.expert_dropout(expert, batch);
        let (velocity_nc, expert_trace) =
            expert.forward(trainables, self.expert_retention(), conditioning, draws, dropped);
        let loss = flow::squared_error(&download(velocity_nc), &noised.target, clean);
        check_finite(batch, &loss.per_sample)?;
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        let dv_nc = self.loss_gradient(&loss, clean, grads);
        let gradient = ActionExpert::backward(expert_trace, dv_nc, grads);
        if let (Some(sensor), Some(dtokens_nd)) = (sensor, gradient.sensor) {
            sensor.backward(dtokens_nd, grads);
        }
        clock.lap(HEAD_STAGE);
        Ok((loss.sum(), gradient.hidden))
    }

    /// A pass of a head that reads action tokens.
    fn oft_pass(
        &self,
        head: &OftHead,
        pass: HeadPass<'_, B>,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<HeadLoss<B>, StepError> {
        let HeadPass { trainables, batch, hidden } = pass;
        let clean = self.clean(batch);
        let [hidden] = <[_; 1]>::try_from(hidden).unwrap_or_else(|_| unreachable!("it reads one place"));
        let (actions_nc, trace) = head.forward(trainables, hidden, batch.len());
        let loss = oft::absolute_error(&download(actions_nc), clean);
        check_finite(batch, &loss.per_sample)?;
        clock.lap(HEAD_STAGE);

        clock.enter(Pass::Backward);
        let dactions_nc = self.loss_gradient(&loss, clean, grads);
        let dhidden_nd = OftHead::backward(trace, dactions_nc, grads);
        clock.lap(HEAD_STAGE);
        Ok((loss.sum(), dhidden_nd.map(|dhidden_nd| vec![dhidden_nd])))
    }

    /// The gradient of a loss by what the head gives, scaled where `grads` says so.
    fn loss_gradient(
        &self,
        loss: &FlowLoss,
        clean: CleanActions<'_>,
        grads: &mut dyn GradientSums<B>,
    ) -> Tensor<B, 2> {
        let gradient_nc = self.upload(&loss.gradient, self.dims.action);
        match grads.scaled(clean.valid_count()) {
            Some(scale) => gradient_nc * scale,
            None => gradient_nc,
        }
    }

    /// The loss that [`Policy::forward_backward`] would have, from the same draws of noise, if adapters
    /// dropped nothing.
    pub fn loss(&self, trainables: &Trainables<B>, batch: &MicroBatch) -> Result<MicroLoss, StepError> {
        if batch.is_empty() {
            return Ok(MicroLoss::default());
        }
        let clean = self.clean(batch);
        let loss = match &self.head {
            ActionHead::Flow(expert) => {
                let noised = flow::noise(self.settings.convention, self.keys(batch), clean);
                let velocity = self.velocity(expert, trainables, batch)?;
                let noisy_nc = self.upload(&noised.noisy, self.dims.action);
                let draws = Draws { times: &noised.times, noisy_nc };
                flow::squared_error(&download(velocity(draws)), &noised.target, clean)
            }
            ActionHead::Oft(head) => oft::absolute_error(&self.regressed(head, trainables, batch)?, clean),
        };
        check_finite(batch, &loss.per_sample)?;
        Ok(MicroLoss { loss_sum: loss.sum(), valid: clean.valid_count() })
    }

    /// Samples normalised action chunks, `[b, horizon, action]`, from noise keyed by (seed, sample index).
    pub fn sample_actions(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        seed: u64,
    ) -> Result<Vec<f32>, StepError> {
        let mut start =
            flow::starting_noise(seed, &batch.sample_indices, self.dims.horizon * self.dims.action);
        self.padding(batch).blank(&mut start);
        self.sample_actions_from(trainables, batch, start.into())
    }

    /// Samples normalised action chunks from noise that is given, `[b, horizon, action]`, 0 where it is
    /// padding. A head without a flow takes none.
    pub fn sample_actions_from(
        &self,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
        start: SamplingStart,
    ) -> Result<Vec<f32>, StepError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let expert = match &self.head {
            ActionHead::Flow(expert) => expert,
            ActionHead::Oft(head) => return self.regressed(head, trainables, batch),
        };
        let velocity = self.velocity(expert, trainables, batch)?;
        let Settings { convention, sampling_steps, .. } = self.settings;
        Ok(flow::sample(convention, sampling_steps, start, |x, t| {
            let times = vec![t; batch.len()];
            let draws = Draws { times: &times, noisy_nc: self.upload(x, self.dims.action) };
            let mut velocity = download(velocity(draws));
            self.padding(batch).blank(&mut velocity);
            velocity
        }))
    }

    /// The chunks that a head without a flow predicts, `[b, horizon, action]`, 0 where they are padding.
    fn regressed(
        &self,
        head: &OftHead,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<Vec<f32>, StepError> {
        let VlFeatures { hidden_nd, .. } = self.vl_features(trainables, batch)?;
        let mut actions = download(head.actions(trainables, hidden_nd, batch.len()));
        self.padding(batch).blank(&mut actions);
        Ok(actions)
    }

    /// The expert's prediction for a micro-batch, without a trace.
    fn velocity<'a>(
        &self,
        expert: &'a ActionExpert,
        trainables: &'a Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<impl Fn(Draws<'_, B>) -> Tensor<B, 2> + 'a, StepError> {
        let conditioning = self.conditioning(expert, trainables, batch)?;
        Ok(expert.velocity(trainables, self.settings.retention.activations, conditioning))
    }

    /// What the expert attends to, without a trace.
    fn conditioning(
        &self,
        expert: &ActionExpert,
        trainables: &Trainables<B>,
        batch: &MicroBatch,
    ) -> Result<Conditioning<B>, StepError> {
        let hidden = self.hidden_states(trainables, batch)?;
        let params = ParamScope::<B>::frozen(trainables);
        let sensor = self
            .sensor
            .as_ref()
            .map(|sensor| Input::constant(sensor.segment(&batch.sensor, &self.device).run(&params, &[])));
        Ok(Conditioning {
            batch: batch.len(),
            state_bc: self.state(expert, batch),
            sensor,
            hidden: hidden.into_iter().map(Input::constant).collect(),
            mask: keys_mask(batch),
        })
    }

    /// The states, where the expert has a token of them.
    fn state(&self, expert: &ActionExpert, batch: &MicroBatch) -> Option<Tensor<B, 2>> {
        (expert.shape().state > 0).then(|| self.upload(&batch.state, self.dims.state))
    }

    /// What keys the draws of the adapters' dropout; none where they drop nothing.
    fn dropout<'b>(&self, batch: &'b MicroBatch) -> Option<DropoutKeys<'b>> {
        let drops = self.lora.as_ref().is_some_and(|plan| plan.recipe().dropout > 0.0);
        let (samples, images_per_row) = (&batch.sample_indices[..], &batch.images_per_row[..]);
        let keys = DropoutKeys { seed: self.settings.seed, step: batch.step.0, samples, images_per_row };
        drops.then_some(keys)
    }

    /// The rows of the expert's tokens in a training pass, if its blocks drop some of what they add.
    fn expert_dropout(&self, expert: &ActionExpert, batch: &MicroBatch) -> Option<DropoutRows<B>> {
        let shape = expert.shape();
        if shape.form.dropout == 0.0 {
            return None;
        }
        let Settings { seed, repeats, .. } = self.settings;
        let draws =
            batch.sample_indices.iter().flat_map(|&sample| (1..).take(repeats).map(move |r| (sample, r)));
        let words = draws.flat_map(|(sample, repeat)| {
            // The vision-language model's rows are those of repeat 0.
            let key = Key { seed, purpose: Purpose::Dropout, step: batch.step.0, sample, repeat };
            let word = key.draws().word();
            (0..shape.tokens() as u64).map(move |token| row_word(word, token))
        });
        Some(DropoutRows::new(words.collect(), (!B::ON_HOST).then_some(&self.device)))
    }

    /// With one draw per sample the expert's activations are small beside the language model's, and computing
    /// them twice would buy nothing; with several they rival it.
    fn expert_retention(&self) -> Retention {
        let retention = self.settings.retention;
        if self.settings.repeats > 1 {
            retention
        } else {
            Retention { recompute: Recompute::None, ..retention }
        }
    }

    fn keys(&self, batch: &MicroBatch) -> FlowKeys {
        FlowKeys { seed: self.settings.seed, step: batch.step.0, repeats: self.settings.repeats }
    }

    fn clean<'b>(&self, batch: &'b MicroBatch) -> CleanActions<'b> {
        CleanActions {
            samples: &batch.sample_indices,
            actions: &batch.actions,
            valid: &batch.action_valid,
            action: self.dims.action,
            widths: &batch.action_widths,
        }
    }

    fn padding<'b>(&self, batch: &'b MicroBatch) -> Padding<'b> {
        Padding { action: self.dims.action, widths: &batch.action_widths }
    }
}
